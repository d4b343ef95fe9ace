"""The images of the catalog's methods, built from containers/catalog without a registry of images.

Called by ``catalog-images``. Debian comes from packages of the machine's own archive, the rest from where the
machine's pip finds it. What does not fit here is left out, and said.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import apptainer
import images
import packages
from layout import CHECKOUT, Layout, TestbedError

DEFINITION = CHECKOUT / "containers" / "catalog"
NAMES = ("pytorch", "trl", "evalkit")
VENV = "opt/venv"
INCLUDED = ("python3", "ca-certificates")
#: Beside what images.write_rootfs does: certificates as their package's own script would install them.
CERTIFICATES = """\
export TMPDIR=/tmp
cd /usr/share/ca-certificates
find . -name '*.crt' | sed 's,^[.]/,,' >/etc/ca-certificates.conf
update-ca-certificates >/dev/null
"""
PIP_TIMEOUT_S = 3600
SQUASH_TIMEOUT_S = 1800
#: Free space that one image takes while it is built: its packages twice, and the image. Without CUDA evalkit took
#: most, 4.6 GB; with CUDA's libraries it is an estimate from the sizes of their wheels.
NEEDED_BYTES, NEEDED_WITH_CUDA_BYTES = 6 * 10**9, 20 * 10**9


class Skipped(Exception):
    """Why an image is not built here, in one sentence."""


def build(layout: Layout, base: Path, name: str, wheel: Path, index: str) -> Path:
    """`NAME.sif` in the shared folder, built anew; its path. `base` is what `write_base` made.

    ``wheel`` is this project's; ``index`` is where pip looks beside where it looks by itself. Raises Skipped where
    this machine lacks the space, or pip the packages; TestbedError where a step fails.
    """
    requirements = DEFINITION / "requirements" / f"{name}.txt"
    pip = [str(CHECKOUT / ".venv/bin/pip"), "--quiet", "--disable-pip-version-check", "install"]
    pip += ["--extra-index-url", index] if index else []
    check_space(layout, resolve([*pip, "--requirement", str(requirements)]))
    work = base.with_name(f"{name}-work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    folder = work / "rootfs"
    shutil.copytree(base, folder, symlinks=True)
    try:
        (site,) = (folder / VENV / "lib").glob("python3.*/site-packages")
        for wanted in (["--requirement", str(requirements)], ["--no-deps", str(wheel)]):
            run_pip([*pip, "--target", str(site), *wanted])
        move_commands(site / "bin", folder / VENV / "bin")
        return squash(layout, name, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_base(layout: Layout) -> Path:
    """Debian with Python, certificates and an empty venv, which all have in common; the caller removes it."""
    root = packages.read_layers(layout)
    work = layout.cache / "catalog"
    shutil.rmtree(work, ignore_errors=True)
    base = work / "base"
    work.mkdir(parents=True)
    images.write_rootfs(layout, root, base, INCLUDED)
    script = f"python3 -m venv --without-pip /{VENV}\n{CERTIFICATES}"
    argv = ["chroot", str(base), "/bin/sh", "-e", "-c", script]
    images.run_build(layout, root, argv, images.BUILD_TIMEOUT_S)
    (site,) = (base / VENV / "lib").glob("python3.*/site-packages")
    if site.parent.name != f"python3.{sys.version_info.minor}":
        raise TestbedError(f"the images have {site.parent.name}: start the testbed by that Python")
    return base


def squash(layout: Layout, name: str, work: Path) -> Path:
    """Make the image of ``work/rootfs`` and put it into the shared folder by one rename."""
    root = packages.read_layers(layout)
    text = (DEFINITION / "catalog.def").read_text(encoding="utf-8").replace("{{ packages }}", name)
    text = re.sub(
        r"(?ms)^%(?:arguments|files)\n.*?(?=^%|\Z)", "", images.local_definition(text, work / "rootfs")
    )
    definition = work / "catalog.def"
    definition.write_text(text, encoding="utf-8")
    program = str(apptainer.read_apptainer(layout, root))
    command = [program, "build", "--mksquashfs-args", images.COMPRESSION]
    images.run_build(layout, root, [*command, str(work / f"{name}.sif"), str(definition)], SQUASH_TIMEOUT_S)
    layout.images.mkdir(parents=True, exist_ok=True)
    target = layout.images / f"{name}.sif"
    new = target.with_name(f".{target.name}.new")
    shutil.move(work / target.name, new)
    new.chmod(0o755)
    new.replace(target)
    return target


def resolve(install: list[str]) -> list[str]:
    """The names of all packages that pip would install. Raises Skipped where it finds no such set."""
    argv = [*install, "--dry-run", "--ignore-installed", "--report", "-"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or ["no reason given"]
        raise Skipped(f"pip cannot get its packages: {said[0].removeprefix('ERROR: ')}")
    return [item["metadata"]["name"] for item in json.loads(done.stdout)["install"]]


def check_space(layout: Layout, names: Iterable[str]) -> None:
    """Raise Skipped where cache or state have less room than an image of these packages takes."""
    with_cuda = any(name.startswith("nvidia-") for name in names)
    needed = NEEDED_WITH_CUDA_BYTES if with_cuda else NEEDED_BYTES
    for place in (layout.cache, layout.state):
        there = next(folder for folder in (place, *place.parents) if folder.exists())
        free = shutil.disk_usage(there).free
        if free < needed:
            kind = "with CUDA" if with_cuda else "without CUDA"
            raise Skipped(f"{kind} it takes {needed / 1e9:.0f} GB, and {place} has {free / 1e9:.1f} GB free")


def run_pip(argv: list[str]) -> None:
    """Raises TestbedError with the end of what pip said."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise TestbedError(f"pip failed:\n{done.stderr[-2000:]}")


def move_commands(source: Path, target: Path) -> None:
    """Put what pip installed as commands (torchrun) where a venv has them, started by the venv's own Python."""
    for path in sorted(source.iterdir()):
        lines = path.read_bytes().split(b"\n", 1)
        if lines[0].startswith(b"#!") and b"python" in lines[0]:
            path.write_bytes(f"#!/{VENV}/bin/python3\n".encode() + lines[1])
        path.chmod(0o755)
        if not (target / path.name).exists():
            shutil.move(path, target / path.name)
    shutil.rmtree(source)


def build_all(layout: Layout, base: Path, names: Iterable[str], wheel: Path, index: str) -> Iterator[str]:
    """Build what can be built here; a line for each image: its path, size and time, or why it was left out."""
    for name in names:
        started = time.monotonic()
        try:
            path = build(layout, base, name, wheel, index)
        except Skipped as reason:
            yield f"{name} left out: {reason}"
        else:
            yield f"{path}  {path.stat().st_size / 1e6:.0f} MB, {time.monotonic() - started:.0f} s"
