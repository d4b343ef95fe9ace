"""A container without an image: this machine's programs, the mounts that were asked for, and nothing else.

The fake runtimes of this folder become a process in it, where real ones have an image.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000  # linux/sched.h
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18  # linux/mount.h

OF_THE_IMAGE = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "etc")
OF_THE_HOST = ("proc", "sys", "dev")

MAGIC = b"hsqs"
"""How a squashfs begins. Behind it the fakes' images have a line for each variable of their environment."""

_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Bind:
    source: str
    target: str
    read_only: bool = False


def write_image(path: Path, environment: Mapping[str, str] | None = None) -> Path:
    """An image for the fakes."""
    lines = [f"{name}={value}" for name, value in (environment or {}).items()]
    path.write_bytes(MAGIC + "\n".join(["", *lines, ""]).encode())
    return path


def read_image(path: str) -> dict[str, str] | None:
    """The environment of an image; None where the file is none."""
    try:
        content = Path(path).read_bytes()
    except OSError:
        return None
    if not content.startswith(MAGIC):
        return None
    return dict(line.split("=", 1) for line in content.decode().splitlines()[1:])


def become(
    root: str, binds: Sequence[Bind], writable: bool, folder: str, argv: Sequence[str], env: Mapping[str, str]
) -> NoReturn:
    """Become `argv` in the box. `root`: an empty folder, which stays empty for everybody else."""
    user, group = os.geteuid(), os.getegid()
    _check(_LIBC.unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)), "unshare")
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", 0)
    for name in OF_THE_IMAGE:
        host = Path("/", name)
        if host.is_symlink():
            Path(root, name).symlink_to(host.readlink())
        elif host.exists():
            _bind(str(host), root, f"/{name}", MS_REC)
            _mount("none", f"{root}/{name}", None, MS_BIND | MS_REMOUNT | MS_RDONLY)
    for name in OF_THE_HOST:
        _bind(f"/{name}", root, f"/{name}", MS_REC)
    for name in ("tmp", "var"):
        Path(root, name).mkdir()
    for bind in binds:
        _bind(bind.source, root, bind.target, MS_REC)
        if bind.read_only:
            _mount("none", root + bind.target, None, MS_BIND | MS_REMOUNT | MS_RDONLY)
    if not writable:
        _mount("none", root, None, MS_REMOUNT | MS_RDONLY)
    os.chroot(root)
    os.chdir(folder)
    os.execvpe(argv[0], list(argv), dict(env))


def _bind(source: str, root: str, target: str, flags: int) -> None:
    place = Path(root + target)
    if Path(source).is_dir():
        place.mkdir(parents=True, exist_ok=True)
    elif not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    _mount(source, str(place), None, MS_BIND | flags)


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    words = [os.fsencode(w) if w is not None else None for w in (source, target, kind)]
    _check(_LIBC.mount(*words, ctypes.c_ulong(flags), None), f"mount {source} at {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)


if __name__ == "__main__":
    become(tempfile.mkdtemp(), [], False, "/", ["/bin/sh", "-c", "exit 0"], {})
