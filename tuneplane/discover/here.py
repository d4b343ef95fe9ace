"""What this machine, the login node, shows of a site: file systems, interpreters, container runtimes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tuneplane.containers import RUNTIMES

NETWORK_FILE_SYSTEMS = frozenset(
    (
        *(
            "nfs",
            "nfs4",
            "lustre",
            "gpfs",
            "beegfs",
            "ceph",
            "fuse.ceph",
            "glusterfs",
            "fuse.glusterfs",
            "wekafs",
        ),
        *(
            "pvfs2",
            "panfs",
            "afs",
            "cifs",
            "smb3",
            "9p",
            "virtiofs",
            "vast",
            "fuse.juicefs",
            "daos",
            "quobyte",
        ),
    )
)
"""Types in /proc/self/mountinfo that other machines can see too."""

PROGRAM_S = 10.0
OLDEST_PYTHON = (3, 9)


@dataclass(frozen=True)
class Here:
    """shared: mount points of network file systems that hold what users write. pythons: path → version."""

    home: str
    shared: tuple[str, ...] = ()
    storage: str = "~/tuneplane"
    storage_why: str = ""
    storage_is_shared: bool = False
    python: str = ""
    python_why: str = ""
    runtime: str = "none"
    binary: str = ""
    runtime_version: str = ""


def look(environ: Mapping[str, str], interpreter: str) -> Here:
    """Look at this machine. interpreter: the one below tp itself."""
    home = environ.get("HOME") or str(Path.home())
    mounts = read_mounts(Path("/proc/self/mountinfo"))
    storage, why, shared = _storage(home, environ, mounts)
    folders = [
        home,
        *(environ[name] for name in ("SCRATCH", "WORK") if environ.get(name, "").startswith("/")),
    ]
    points = [mount_of(folder, mounts) for folder in folders]
    python, python_why = _python(interpreter, mounts)
    runtime, binary, version = _runtime(environ.get("PATH", os.defpath))
    return Here(
        home=home,
        shared=tuple(dict.fromkeys(point for point, kind in points if kind in NETWORK_FILE_SYSTEMS)),
        storage=storage,
        storage_why=why,
        storage_is_shared=shared,
        python=python,
        python_why=python_why,
        runtime=runtime,
        binary=binary,
        runtime_version=version,
    )


def read_mounts(path: Path) -> dict[str, str]:
    """Mount point → type of file system. Source: proc(5), mountinfo."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) > 4 and after:
            point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4])
            found[point] = after.split()[0]
    return found


def mount_of(folder: str, mounts: Mapping[str, str]) -> tuple[str, str]:
    """The mount point that holds a folder, and its type."""
    path = os.path.realpath(folder)
    while path != "/":
        if path in mounts:
            return path, mounts[path]
        path = os.path.dirname(path)  # noqa: PTH120
    return "/", mounts.get("/", "")


def is_shared(folder: str, mounts: Mapping[str, str] | None = None) -> bool:
    """Whether a folder lies on a file system of a kind that other machines see too."""
    known = read_mounts(Path("/proc/self/mountinfo")) if mounts is None else mounts
    return mount_of(folder, known)[1] in NETWORK_FILE_SYSTEMS


def _storage(home: str, environ: Mapping[str, str], mounts: Mapping[str, str]) -> tuple[str, str, bool]:
    """Where runs may live, why, and whether it is surely shared."""
    point, kind = mount_of(home, mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        return "~/tuneplane", f"your home is on {kind}, mounted at {point}", True
    for name in ("SCRATCH", "WORK"):
        folder = environ.get(name, "")
        if folder.startswith("/") and os.access(folder, os.W_OK):
            point, kind = mount_of(folder, mounts)
            if kind in NETWORK_FILE_SYSTEMS:
                return f"${{oc.env:{name}}}/tuneplane", f"${name} is on {kind}, mounted at {point}", True
    return "~/tuneplane", "", False


def _python(interpreter: str, mounts: Mapping[str, str]) -> tuple[str, str]:
    """An interpreter for the nodes: the system's, where it is new enough here; else tp's own."""
    version = python_version("/usr/bin/python3")
    if version is not None and version[:2] >= OLDEST_PYTHON:
        return (
            "/usr/bin/python3",
            f"{'.'.join(map(str, version))} on this machine; nodes mostly have the same system",
        )
    told = "the one below tp"
    shared = mount_of(interpreter, mounts)[1] in NETWORK_FILE_SYSTEMS
    return interpreter, told + (", on shared storage" if shared else "; it may not be on the nodes")


def python_version(program: str) -> tuple[int, ...] | None:
    """An interpreter's version; None where it cannot be run."""
    try:
        done = subprocess.run(
            [program, "-I", "-S", "-c", "import sys; print(*sys.version_info[:3])"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
            check=False,
        )
        return tuple(int(part) for part in done.stdout.split()) or None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def _runtime(path: str) -> tuple[str, str, str]:
    """A container runtime of this machine that TunePlane knows: its name, path and version."""
    for name in RUNTIMES:
        program = shutil.which(name, path=path) if name not in ("none", "pyxis") else None
        if program:
            return name, program, program_version(program)
    return "none", "", ""


def program_version(program: str) -> str:
    """The first line of `PROGRAM --version`; empty where it cannot be run."""
    argv = [program, "version"] if program.rpartition("/")[2] == "enroot" else [program, "--version"]
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROGRAM_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (done.stdout.strip().splitlines() or [""])[0] if done.returncode == 0 else ""
