"""Files below a folder that strangers' programs write to: no link is followed, no look is without end.

Every part of a path is opened below the one before, never through a link, so that nothing leads outside (C13).
For `reader`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from tuneplane.collect.tail import OPEN_FLAGS

MAX_ENTRIES = 100_000
"""Entries of folders that one listing looks at."""

MAX_FILES = 20_000
"""Files that one listing gives: 2,500 nodes with a writer for each of eight GPUs."""

_MAX_NAMED = 20
_MAX_DEPTH = 32
_FOLDER_FLAGS = OPEN_FLAGS | os.O_DIRECTORY


@dataclass
class Listing:
    """Files found, and what was passed over and why; of many such a few are named, the others counted."""

    files: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    unnamed: int = 0
    looked_at: int = 0
    full: bool = False

    def skip(self, name: str, why: str) -> None:
        """Pass over an entry."""
        if len(self.skipped) < _MAX_NAMED or name in self.skipped:
            self.skipped[name] = why
        else:
            self.unnamed += 1

    def told(self, what: str) -> dict[str, str]:
        """All that was passed over, of `what`."""
        more = {}
        if self.unnamed:
            more[f"{what}: {self.unnamed} more"] = "no such files either"
        if self.full:
            more[f"{what}: the rest"] = f"only the first {self.looked_at} entries are looked at"
        return {**self.skipped, **more}

    def look(self) -> bool:
        """Count an entry that is looked at; False where it is one too many."""
        self.full = self.full or self.looked_at >= MAX_ENTRIES or len(self.files) >= MAX_FILES
        self.looked_at += not self.full
        return not self.full


def open_beneath(root: Path, relative: str) -> int:
    """A descriptor of the file of that name below `root`, for reading. Raises OSError, ELOOP at a link."""
    *folders, name = relative.split("/")
    fd = os.open(root, _FOLDER_FLAGS)
    try:
        for folder in folders:
            above, fd = fd, os.open(folder, _FOLDER_FLAGS, dir_fd=fd)
            os.close(above)
        return os.open(name, OPEN_FLAGS, dir_fd=fd)
    finally:
        os.close(fd)


def list_folder(folder: Path, suffix: str) -> Listing:
    """Regular files of one folder whose names end so, by name; hidden ones are no matter. Raises OSError."""
    listing = Listing()
    with _opened(folder, None) as fd, os.scandir(fd) as entries:
        for entry in entries:
            if not listing.look():
                break
            if entry.name.startswith("."):
                continue
            if not entry.name.endswith(suffix):
                listing.skip(entry.name, f"no {suffix} file")
            elif entry.is_file(follow_symlinks=False):
                listing.files.append(entry.name)
            else:
                listing.skip(entry.name, _kind(entry))
    listing.files.sort()
    return listing


def find_files(root: Path, pattern: str) -> Listing:
    """Regular files below `root` that a glob matches, relative; `**` stands for any folders. Never raises."""
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    if parts and parts[-1] == "**":
        parts.append("*")
    listing = Listing()
    if pattern.startswith("/") or ".." in parts:
        listing.skip(pattern, "not below the output folder")
        return listing
    try:
        with _opened(root, None) as fd:
            _walk(fd, parts, "", listing)
    except FileNotFoundError:
        pass
    except OSError as error:
        listing.skip(pattern, _reason(error))
    listing.files = sorted(set(listing.files))
    return listing


def _walk(fd: int, parts: list[str], above: str, listing: Listing, deep: bool = False) -> None:
    """Add what `parts` match in the folder of `fd`, which stands at `above`; deep: `**` looks into its folders."""
    if not parts:
        return
    part, rest = parts[0], parts[1:]
    anywhere = part == "**"
    if anywhere:
        _walk(fd, rest, above, listing, deep=True)
    if above.count("/") > _MAX_DEPTH:
        listing.skip(above, "too deep")
        return
    for entry in _entries(fd, above, listing):
        relative = above + entry.name
        if not anywhere and not fnmatchcase(entry.name, part):
            continue
        if anywhere or rest:
            if entry.is_dir(follow_symlinks=False):
                try:
                    with _opened(entry.name, fd) as below:
                        _walk(below, parts if anywhere else rest, relative + "/", listing)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    listing.skip(relative, _reason(error))
            elif entry.is_symlink() and not anywhere:
                listing.skip(relative, "a link")
        elif entry.is_file(follow_symlinks=False):
            listing.files.append(relative)
        elif not (deep and entry.is_dir(follow_symlinks=False)):
            listing.skip(relative, _kind(entry))


def _entries(fd: int, above: str, listing: Listing) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                if not listing.look():
                    return
                yield entry
    except OSError as error:
        listing.skip(above or ".", _reason(error))


@contextmanager
def _opened(folder: Path | str, dir_fd: int | None) -> Iterator[int]:
    fd = os.open(folder, _FOLDER_FLAGS, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def _reason(error: OSError) -> str:
    if error.errno in (errno.ELOOP, errno.ENOTDIR):  # a link, where O_DIRECTORY and O_NOFOLLOW meet (open(2))
        return "a link, or no folder"
    return error.strerror or str(error)


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "a link"
    if entry.is_dir(follow_symlinks=False):
        return "a folder"
    try:
        mode = entry.stat(follow_symlinks=False).st_mode
    except OSError:
        return "no regular file"
    return "a FIFO" if stat.S_ISFIFO(mode) else "no regular file"
