"""Images that are files, `.sif` and `.sqsh`: whether one may be started, and its sha256. Prepare calls this."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tuneplane.images.progress import Progress, silent
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.files import write_atomic

SUFFIXES = (".sif", ".sqsh", ".squashfs")

SIF, SQUASHFS = "sif", "squashfs"
_SIF_MAGIC = b"SIF_MAGIC"
_SIF_MAGIC_OFFSET = 32  # behind the launch line; the SIF specification, "Global header"
_SQUASHFS_MAGIC = b"hsqs"  # little-endian superblock, squashfs 4.0

_BLOCK_BYTES = 4 << 20
_SETTLED_S = 2.0
"""A file changed so shortly ago may change again with the same mtime: its digest is not remembered."""


@dataclass(frozen=True)
class ImageFile:
    """A file that is an image, by its content. `path` is absolute, with no link in it."""

    path: str
    format: str  # sif | squashfs
    size_bytes: int
    modified_s: int = field(default=0, compare=False)


def is_local(text: str) -> bool:
    """Whether an image's name is a path: it starts like one, or ends in .sif, .sqsh or .squashfs.

    `docker://` before it makes it a registry's image whatever its end.
    """
    if text.startswith("docker://"):
        return False
    return text.startswith(("/", "./", "../", "~")) or text.endswith(SUFFIXES)


def inspect(
    text: str, folders: Sequence[str] | None, *, trusted: bool = False, contact: str = "", where: str = ""
) -> ImageFile | list[Fault]:
    """The image file that `text` names, or why it may not be started.

    folders: the site's image folders; the file must lie below one of them, links resolved on both sides.
        None, no setting: any readable file of the user's own or of root's. Another user's file could be
        changed by its owner between submit and start, and a folder's name is how a site vouches for it.
        An empty list allows no file, as an empty list of registries allows no registry (C28).
    trusted: the site's own choice, judged by no folder and no owner.
    """
    try:
        real = os.path.realpath(Path(text).expanduser(), strict=True)
    except OSError as error:
        return [_unreachable(text, error, where)]
    except (RuntimeError, ValueError) as error:  # ~ of nobody known; a NUL byte
        return [Fault(f"image {text!r} cannot be a path: {error}", where)]
    if any("\ud800" <= character <= "\udfff" for character in real):
        return [Fault(f"image {real!r}: its path is not UTF-8", where, "rename it; no runtime could be told")]
    if not trusted and folders is not None:
        refused = _folder_fault(text, real, folders, contact, where)
        if refused:
            return [refused]
    try:
        found, head = _read_head(real)
    except OSError as error:
        return [_unreachable(text, error, where)]
    if head is None:
        what = "is a folder" if stat.S_ISDIR(found.st_mode) else "is not a regular file"
        return [Fault(f"image {text!r} {what}", where, "give a .sif or .sqsh file")]
    if not trusted and folders is None and found.st_uid not in (os.geteuid(), 0):
        return [_owner_fault(text, found.st_uid, contact, where)]
    kind = _format(head)
    if kind is None:
        return [
            Fault(
                f"image {text!r} is neither a SIF nor a squashfs file",
                where,
                "build one with `apptainer build NAME.sif …`; a copy that was cut short looks like this too",
            )
        ]
    return ImageFile(real, kind, found.st_size, int(found.st_mtime))


def read_sha256(
    path: str | Path, cache_folder: Path, progress: Progress = silent, *, remember: bool = True
) -> str:
    """Hex sha256 of a file, remembered in `cache_folder` under its device, inode, size and mtime.

    `cache_folder` is the user's own; one small file an image, so that two at once disturb nobody. A cache
    that cannot be read or written costs time only. remember: False writes nothing anywhere.
    Raises OperationError where the file cannot be read or changes meanwhile.
    """
    try:
        with Path(path).open("rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            remembered = cache_folder / "images" / _cache_name(before)
            known = _recall(remembered)
            if known:
                return known
            digest = hash_file(file.fileno(), before.st_size, progress)
            after = os.fstat(file.fileno())
    except OSError as error:
        raise OperationError(Fault(f"the image cannot be read: {error.strerror}", str(path))) from error
    if _cache_name(before) != _cache_name(after):
        raise OperationError(
            Fault(
                "the image changed while it was read", str(path), "wait until it is written, then try again"
            )
        )
    if remember and time.time() - after.st_mtime > _SETTLED_S:
        with suppress(OSError):
            remembered.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(remembered, digest + "\n", 0o600)
    return digest


def _read_head(real: str) -> tuple[os.stat_result, bytes | None]:
    """What a path is and, of a regular file, its first bytes. Opens nothing else: some devices would act."""
    found = Path(real).stat()
    if not stat.S_ISREG(found.st_mode):
        return found, None
    # O_NONBLOCK: were it a FIFO by now, opening it would wait for a writer.
    descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        return os.fstat(descriptor), os.read(descriptor, _SIF_MAGIC_OFFSET + len(_SIF_MAGIC))
    finally:
        os.close(descriptor)


def hash_file(descriptor: int, total_bytes: int, progress: Progress) -> str:
    """Hex sha256 of an open file. Raises OSError."""
    digest = hashlib.sha256()
    done = 0
    progress("sha256 of the image", 0, total_bytes)
    while done <= total_bytes and (block := os.read(descriptor, _BLOCK_BYTES)):  # one that grows has no end
        digest.update(block)
        done += len(block)
        progress("sha256 of the image", done, total_bytes)
    return digest.hexdigest()


def read_format(path: Path) -> str | None:
    """SIF or SQUASHFS, by the file's first bytes; None for anything else. Raises OSError."""
    _, head = _read_head(str(path))
    return None if head is None else _format(head)


def _cache_name(found: os.stat_result) -> str:
    return f"{found.st_dev:x}-{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"


def _recall(remembered: Path) -> str | None:
    try:
        text = remembered.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return text if len(text) == 64 and not set(text) - set("0123456789abcdef") else None


def _format(head: bytes) -> str | None:
    if head[_SIF_MAGIC_OFFSET:] == _SIF_MAGIC:
        return SIF
    if head.startswith(_SQUASHFS_MAGIC):
        return SQUASHFS
    return None


def _folder_fault(text: str, real: str, folders: Sequence[str], contact: str, where: str) -> Fault | None:
    for folder in folders:
        root = Path(folder).expanduser()
        if root.is_absolute() and Path(real).is_relative_to(os.path.realpath(root)):
            return None
    written = os.path.normpath(Path(text).expanduser().absolute())
    leads = "" if written == real else f" (it leads to {real})"
    allowed = ", ".join(folders) or "none"
    return Fault(
        f"image {text!r}{leads} is not below one of this site's image folders",
        where,
        f"image folders here: {allowed}; ask {contact or 'the administrators of this cluster'}",
    )


def _owner_fault(text: str, owner: int, contact: str, where: str) -> Fault:
    return Fault(
        f"image {text!r} belongs to another user (uid {owner}), who could change it at any time",
        where,
        f"copy it to a folder of your own, or ask {contact or 'the administrators of this cluster'} "
        "to name its folder in site.image_folders",
    )


def _unreachable(text: str, error: OSError, where: str) -> Fault:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        remedy = (
            "" if text.startswith(("/", "./", "../", "~")) else f"for a registry's image: docker://{text}"
        )
        return Fault(f"image {text!r} does not exist", where, remedy)
    if error.errno in (errno.EACCES, errno.EPERM):
        return Fault(f"image {text!r} cannot be read: permission denied", where)
    return Fault(f"image {text!r} cannot be read: {os.strerror(error.errno or 0)}", where)
