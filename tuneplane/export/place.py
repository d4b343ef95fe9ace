"""Where an export goes: written beside its place under another name, renamed when it is whole.

Nothing that was there is touched before that, and nothing but an earlier export is ever replaced.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.kernel.runfolder import RUN_ID

EVENTS = "tfevents"
"""In the name of every event file: TensorBoard knows them by it."""


_YOUNG_S = 60.0
"""What is younger may be of an export that has not said yet that it is in use."""

_OURS = re.compile(rf"events\.out\.{EVENTS}\.\d{{10}}\.{RUN_ID.pattern}", re.ASCII)
_ATTEMPT = re.compile(r"attempt-\d+", re.ASCII)


@contextmanager
def new_file(path: Path, replace: bool) -> Iterator[IO[str]]:
    """A file to be written to `path`. replace: a file that is there; else it is refused.

    Raises UsageError where something is in the way, OperationError where the disk refuses; nothing is left then.
    """
    with _told(path):
        yield from _new_file(path, replace)


def _new_file(path: Path, replace: bool) -> Iterator[IO[str]]:
    _refuse(path, replace, stat.S_ISREG, "file")
    _clear_stale(path)
    temporary = _beside(path, "tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        _take(descriptor)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="", buffering=1 << 20) as file:
            yield file
        if not replace:
            _put(temporary, path)
        else:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path, replace: bool) -> Iterator[Path]:
    """A folder of event files to be written to `path`. replace: one that holds nothing else.

    Raises UsageError where something is in the way, OperationError where the disk refuses; nothing is left then.
    """
    with _told(path):
        yield from _new_folder(path, replace)


def _new_folder(path: Path, replace: bool) -> Iterator[Path]:
    _refuse(path, replace, stat.S_ISDIR, "folder")
    if replace and path.exists():
        _refuse_foreign(path)
    _clear_stale(path)
    temporary = _beside(path, "tmp")
    temporary.mkdir()
    taken = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _take(taken)
        yield temporary
        if replace and path.exists():
            old = _beside(path, "old")
            path.rename(old)
            try:
                temporary.rename(path)
            except OSError:
                old.rename(path)
                raise
            shutil.rmtree(old)
        else:
            temporary.rename(path)
    finally:
        os.close(taken)
        with suppress(FileNotFoundError):
            shutil.rmtree(temporary)


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name[:40]}.{os.urandom(4).hex()}.{kind}")


def _take(descriptor: int) -> None:
    """Say that the file or folder is in use, for as long as this process lives; some file systems cannot."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _clear_stale(path: Path) -> None:
    """Remove what exports to this place left that were killed; what is young, or in use, is another's still."""
    name = re.compile(rf"\.{re.escape(path.name[:40])}\.[0-9a-f]{{8}}\.tmp")
    with suppress(OSError):
        for entry in os.scandir(path.parent):
            status = entry.stat(follow_symlinks=False)
            old = time.time() - status.st_mtime > _YOUNG_S
            if (
                name.fullmatch(entry.name)
                and old
                and status.st_uid == os.geteuid()
                and not entry.is_symlink()
            ):
                _clear_unused(Path(entry.path))


def _clear_unused(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # in use, or on a file system that cannot tell
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    finally:
        os.close(descriptor)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """The system's refusal in words: of the name that the user gave, not of the temporary one."""
    try:
        yield
    except OSError as error:
        remedy = "make room, or name another place by --out"
        if error.errno == errno.ENOENT:
            remedy = f"make the folder {path.parent} first"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR):
            remedy = "name another place by --out"
        raise OperationError(
            Fault(f"cannot be written: {error.strerror or error}", str(path), remedy)
        ) from error


def _put(temporary: Path, path: Path) -> None:
    """Rename, and refuse where another process has made `path` meanwhile."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise _in_the_way(path, "appeared meanwhile") from None
    except OSError:  # a file system without hard links
        temporary.replace(path)


def _refuse(path: Path, replace: bool, kind: object, word: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise _in_the_way(path, "lies below what is no folder") from None
    assert callable(kind)
    if not kind(mode):
        raise UsageError(
            Fault(f"{path} is no {word}", "--out", f"give the name of a {word} that is not there yet")
        )
    if not replace:
        raise _in_the_way(path, "is there already")


def _in_the_way(path: Path, what: str) -> UsageError:
    return UsageError(Fault(f"{path} {what}", "--out", "give another name, or --force to replace it"))


def _refuse_foreign(folder: Path) -> None:
    """`--force` takes nothing away but an earlier export: no trainer's event files, no folder around one."""
    for where, folders, files in os.walk(folder):
        below = Path(where) != folder
        foreign = [name for name in files if not _OURS.fullmatch(name)]
        foreign += [name for name in folders if below or not _ATTEMPT.fullmatch(name)]
        if foreign:
            raise UsageError(
                Fault(
                    f"{folder} holds more than an earlier export: {Path(where, foreign[0])}",
                    "--force",
                    f"give a folder in it: --out {folder}/NAME",
                )
            )
