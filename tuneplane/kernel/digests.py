"""Digests that are the same under any umask, locale, time zone, Python and archive format.

A tree's digest is the sha256 of its manifest: one line an entry, sorted by path bytes,
`<kind> <mode> <size> <sha256 of content> <path>` with the path percent-escaped where it could break a line.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote_from_bytes

_SAFE_IN_PATHS = "/ !\"#$&'()*+,;:<=>?@[]^`{|}"


@dataclass(frozen=True)
class Entry:
    """One file or link of a tree. `path` is relative, `/`-separated, surrogate-escaped like os.fsdecode."""

    path: str
    kind: str  # "file" or "link"
    mode: int  # 0o644 or 0o755; links 0o777
    size_bytes: int
    sha256: str  # of the file's content or of the link's target


def printable(path: str) -> str:
    """A path as one line of a message: as it is where it can be, else quoted with its odd bytes escaped."""
    return path if path.isprintable() else repr(path)


def sha256_bytes(data: bytes) -> str:
    """Hex sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's content, read in 1 MiB blocks. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def manifest(entries: Iterable[Entry]) -> bytes:
    """The canonical manifest text of a tree."""
    lines = []
    for entry in sorted(entries, key=lambda e: os.fsencode(e.path)):
        path = quote_from_bytes(os.fsencode(entry.path), safe=_SAFE_IN_PATHS)
        lines.append(f"{entry.kind} {entry.mode:o} {entry.size_bytes} {entry.sha256} {path}\n")
    return "".join(lines).encode("ascii")


def tree_digest(entries: Iterable[Entry]) -> str:
    """`sha256:<hex>` of the canonical manifest."""
    return "sha256:" + sha256_bytes(manifest(entries))
