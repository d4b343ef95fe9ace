"""The images of tests and demo, built from containers/minimal without a registry.

Called by ``image``. The root folder comes from packages of the machine's own archive, where a user would have
Apptainer pull Debian's image; the rest is the same definition. Built images stay in the cache.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import apptainer
import packages
from layout import CHECKOUT, Layout, TestbedError

DEFINITIONS = CHECKOUT / "containers" / "minimal"
#: Raised when the way of building changes, so that images built the older way are not taken.
RECIPE = 3
INCLUDED = ("python3",)
#: Within a tenth of the default level's size at a sixth of its time.
COMPRESSION = "-comp gzip -Xcompression-level 3"
BUILD_TIMEOUT_S = 300
NAMES = ("minimal.sif", "minimal-env.sif")


def run_build(layout: Layout, root: Path, argv: list[str], timeout_s: float) -> None:
    """Run a build step as root with the unpacked packages. Raises TestbedError with the end of what it said."""
    layout.cache.joinpath("tmp").mkdir(exist_ok=True)
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(layout.cache / "tmp"),
        "LANG": "C.UTF-8",
        "TMPDIR": str(layout.cache / "tmp"),
        "APPTAINER_CACHEDIR": str(layout.cache / "tmp"),
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
        if "apt-get" not in post:  # what minimal.def installs is there
            run_build(layout, root, ["chroot", str(folder), "/bin/sh", "-e", "-c", post], BUILD_TIMEOUT_S)
        definition = work / f"{name}.def"
        definition.write_text(local_definition(text, folder), encoding="utf-8")
        command = [program, "build", "--mksquashfs-args", COMPRESSION, str(work / name), str(definition)]
        run_build(layout, root, command, BUILD_TIMEOUT_S)
    shutil.rmtree(folder)
    work.rename(built)
    return built


def write_rootfs(layout: Layout, root: Path, folder: Path, included: Sequence[str] = INCLUDED) -> None:
    """Make Debian's smallest system with ``included`` in ``folder``, as minimal.def would.

    Packages are unpacked and not configured, which takes a tenth of debootstrap's time; what their maintainer
    scripts would add and a trainer can miss follows here.
    """
    apt = packages.Apt(layout.cache / "apt" / "image", [s.line() for s in packages.read_sources()], "")
    folder.mkdir()
    packages.unpack(apt.download("?essential", *included), folder)
    shutil.rmtree(apt.folder)
    for name in ("bin", "sbin", "lib", "lib64"):
        if (folder / "usr" / name).exists():
            (folder / name).symlink_to(f"usr/{name}")
    for name in ("passwd", "group"):
        shutil.copy2(folder / "usr/share/base-passwd" / f"{name}.master", folder / "etc" / name)
    for name in ("doc", "man", "locale"):
        shutil.rmtree(folder / "usr/share" / name, ignore_errors=True)
    script = "ln -s mawk /usr/bin/awk; ln -s which.debianutils /usr/bin/which; ldconfig;"
    script += " python3 -m compileall -q -x /test/ /usr/lib/python3*"
    run_build(layout, root, ["chroot", str(folder), "/bin/sh", "-e", "-c", script], BUILD_TIMEOUT_S)


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
