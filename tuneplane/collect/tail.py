"""The complete lines of one file that another machine still appends to. Called by `points.IngestReader`.

Opened anew at each look, since network file systems check a file's age at open (close-to-open); memory is bounded.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

MAX_LINE_BYTES = 16 << 20
"""A longer line is skipped: writers never make one."""

_BLOCK_BYTES = 1 << 20
_MAX_HOLES = 64
_HOLE_LIFE_S = 600.0
"""How long a block of zeros is looked at again: a client's cache may fill it seconds after the file has grown."""

_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class NotRegular(OSError):
    """The path names no regular file."""


class Tail:
    """How far one file has been read.

    on_restart: called when the file is another one or has shrunk: all its lines come again from the first.
    oversized: lines that were skipped for their length.
    """

    def __init__(self, path: Path, on_restart: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self.oversized = 0
        self.on_restart = on_restart
        self._identity: tuple[int, int] | None = None
        self._offset = 0  # of the first byte not yet given out
        self._skipping = False  # inside a line that is too long
        self._holes: list[tuple[int, int, float]] = []  # start, end, monotonic time of the first look

    def rewind(self) -> None:
        """Give all lines again from the first."""
        self._offset, self._skipping, self._holes = 0, False, []
        self.on_restart()

    def read_new(self) -> Generator[list[str], None, None]:
        """Lines complete by now and not yet given, in batches. Bytes that are no UTF-8 become U+FFFD.

        A line with zeros in it is given without them, and looked at again later: lines may so come twice.
        Raises OSError, NotRegular where the path has become something else.
        """
        fd = os.open(self.path, _OPEN_FLAGS)
        try:
            state = os.fstat(fd)
            if not stat.S_ISREG(state.st_mode):
                raise NotRegular(f"{self.path} is no regular file")
            identity = (state.st_dev, state.st_ino)
            if self._identity is not None and (identity != self._identity or state.st_size < self._offset):
                self.rewind()
            self._identity = identity
            if self._holes:
                yield from self._filled_holes(fd)
            if state.st_size > self._offset:
                yield from self._grown(fd, state.st_size)
        finally:
            os.close(fd)

    def _grown(self, fd: int, size: int) -> Iterator[list[str]]:
        position, rest = self._offset, b""
        while position < size:
            block = os.pread(fd, min(_BLOCK_BYTES, size - position), position)
            if not block:  # it shrank just now: the next look sees that
                return
            position += len(block)
            if self._skipping:
                end = block.find(b"\n")
                if end < 0:
                    self._offset = position = _past_zeros(fd, block, position, size)
                    continue
                block, self._skipping = block[end + 1 :], False
                self.oversized += 1
            data = rest + block
            cut = data.rfind(b"\n") + 1
            rest = data[cut:]
            self._offset = position - len(rest)
            if cut:
                yield self._lines(data[:cut], self._offset - cut)
            if len(rest) > MAX_LINE_BYTES:
                self._skipping, rest, self._offset = True, b"", position

    def _lines(self, data: bytes, start: int) -> list[str]:
        """The lines of `data`, which ends with a newline and stands at `start` in the file."""
        if b"\0" in data:
            data = self._without_zeros(data, start)
        lines = data.decode("utf-8", "replace").split("\n")
        lines.pop()
        return lines

    def _without_zeros(self, data: bytes, start: int) -> bytes:
        """Note each line with zeros for another look; what follows them may be a line of its own."""
        kept = []
        for line in data.splitlines(keepends=True):
            if b"\0" in line:
                if len(self._holes) < _MAX_HOLES:
                    self._holes.append((start, start + len(line), time.monotonic()))
                kept.append(line[line.rfind(b"\0") + 1 :])
            else:
                kept.append(line)
            start += len(line)
        return b"".join(kept)

    def _filled_holes(self, fd: int) -> Iterator[list[str]]:
        now = time.monotonic()
        holes, self._holes = self._holes, []
        for start, end, since in holes:
            data = os.pread(fd, end - start, start)
            if b"\0" not in data:
                yield data.decode("utf-8", "replace").rstrip("\n").split("\n")
            elif now - since < _HOLE_LIFE_S:
                self._holes.append((start, end, since))


def _past_zeros(fd: int, block: bytes, position: int, size: int) -> int:
    """Where to read on after `block`: past a stretch that the file system never stored, where it is one."""
    if block.count(0) < len(block):
        return position
    try:
        return min(size, max(position, os.lseek(fd, position, os.SEEK_DATA)))
    except OSError:  # no data any more, or a file system that cannot tell
        return position
