"""The images of tests and demo, built from containers/minimal without a registry.

Called by ``image``. The root folder comes from debootstrap and the machine's own archive, where a user would
have Apptainer pull Debian's image; the rest is the same definition. Built images stay in the cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import apptainer
import packages
from layout import CHECKOUT, Layout, TestbedError

DEFINITIONS = CHECKOUT / "containers" / "minimal"
#: Raised when the way of building changes, so that images built the older way are not taken.
RECIPE = 1
INCLUDED = ("python3", "bash")
DEBOOTSTRAP_TIMEOUT_S = 600
BUILD_TIMEOUT_S = 300
NAMES = ("minimal.sif", "minimal-env.sif")


def run_build(layout: Layout, root: Path, argv: list[str], timeout_s: float) -> None:
    """Run a build step as root with the unpacked packages. Raises TestbedError with the end of what it said."""
    layout.cache.joinpath("tmp").mkdir(exist_ok=True)
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(layout.cache / "tmp"),
        "LANG": "C.UTF-8",
        "DEBIAN_FRONTEND": "noninteractive",
        "TMPDIR": str(layout.cache / "tmp"),
        "APPTAINER_CACHEDIR": str(layout.cache / "tmp"),
        **{
            name: value
            for name, value in os.environ.items()
            if name.lower() in ("http_proxy", "https_proxy", "no_proxy")
        },
    }
    done = subprocess.run(
        packages.layered(root, argv),
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
        raise TestbedError(f"{Path(argv[0]).name} failed:\n{tail}")


def build_images(layout: Layout) -> Path:
    """The folder in the cache with both images, which are built first where it has none."""
    texts = [(DEFINITIONS / name).read_text(encoding="utf-8") for name in ("minimal.def", "minimal-env.def")]
    key = hashlib.sha256("\0".join([str(RECIPE), *INCLUDED, *texts]).encode()).hexdigest()[:12]
    built = layout.cache / "images" / key
    if built.exists():
        return built
    root = packages.read_layers(layout)
    program = str(apptainer.read_apptainer(layout, root))
    work = layout.cache / "images" / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    folder = work / "rootfs"
    write_rootfs(layout, root, folder)
    for name, text in zip(NAMES, texts, strict=True):
        post = section(text, "post")
        if "apt-get" not in post:  # minimal.def installs what debootstrap included
            run_build(layout, root, ["chroot", str(folder), "/bin/sh", "-e", "-c", post], BUILD_TIMEOUT_S)
        definition = work / f"{name}.def"
        definition.write_text(local_definition(text, folder), encoding="utf-8")
        run_build(layout, root, [program, "build", str(work / name), str(definition)], BUILD_TIMEOUT_S)
    shutil.rmtree(folder)
    work.rename(built)
    return built


def write_rootfs(layout: Layout, root: Path, folder: Path) -> None:
    """Make Debian's smallest system with Python in ``folder``: as minimal.def would."""
    main = packages.read_sources()[0]
    debs = layout.cache / "debs" / "debootstrap"
    debs.mkdir(parents=True, exist_ok=True)
    command = ["debootstrap", "--variant=minbase", f"--keyring={main.signed_by}", f"--cache-dir={debs}"]
    command += [f"--include={','.join(INCLUDED)}", packages.CODENAME, str(folder), main.uri]
    run_build(layout, root, command, DEBOOTSTRAP_TIMEOUT_S)
    for waste in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
        shutil.rmtree(folder / waste, ignore_errors=True)
    # The archive's address is this machine's business and would differ from image to image.
    (folder / "etc/apt/sources.list").unlink(missing_ok=True)


def section(text: str, name: str) -> str:
    """The lines of one section of an Apptainer definition."""
    found = re.search(rf"(?ms)^%{name}\n(.*?)(?=^%|\Z)", text)
    return found[1] if found else ""


def local_definition(text: str, folder: Path) -> str:
    """A definition with its source replaced by ``folder``, in which its %post has run already.

    Apptainer runs %post with every capability there is, which fails where root itself lacks one.
    """
    text = re.sub(r"(?m)^Bootstrap: .*\nFrom: .*$", f"Bootstrap: localimage\nFrom: {folder}", text, count=1)
    return re.sub(r"(?ms)^%post\n.*?(?=^%|\Z)", "", text)


def install_images(layout: Layout) -> Path:
    """Put the images into the shared folder and return the minimal one's path."""
    built = build_images(layout)
    layout.images.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        target = layout.images / name
        if target.exists() and target.stat().st_mtime_ns == (built / name).stat().st_mtime_ns:
            continue
        temporary = target.with_name(f".{name}.new")
        shutil.copy2(built / name, temporary)
        temporary.chmod(0o755)
        temporary.replace(target)
    return layout.images / NAMES[0]
