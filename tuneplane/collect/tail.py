"""The complete lines of one file that another machine still appends to. Called by whoever parses such a file.

Opened anew at each look, since network file systems check a file's age at open (close-to-open); memory is bounded.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 16 << 20
"""A longer line is skipped: writers never make one."""

_BLOCK_BYTES = 1 << 20
_MAX_HOLES = 64
_HOLE_LIFE_S = 600.0
"""How long a block of zeros is looked at again: a client's cache may fill it seconds after the file has grown."""

_HOLE_PAUSE_S = 1.0
"""Between two looks at the same block of zeros."""

_TRAIL_BYTES = 64
"""Read again at each look, just before what is new: a file made anew may have the number of the old one."""

OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class NotRegular(OSError):
    """The path names no regular file."""


class Tail:
    """How far one file has been read.

    path: how the file is named in errors, and opened where no `opener` is given; a link is not followed.
    opener: gives a descriptor of the file, to be closed by the tail.
    on_restart: called when the file is another one or has shrunk: all its lines come again from the first.
    oversized: lines that were skipped for their length. modified_s: of the file, at the last look.
    seen: device, inode, size and change time (ns) of the file when all of it had been read.
    """

    def __init__(
        self,
        path: Path,
        on_restart: Callable[[], None] = lambda: None,
        opener: Callable[[], int] | None = None,
    ) -> None:
        self.path = path
        self.oversized = 0
        self.modified_s = 0.0
        self.on_restart = on_restart
        self._opener = opener or (lambda: os.open(path, OPEN_FLAGS))
        self._identity: tuple[int, int] | None = None
        self._offset = 0  # of the first byte not yet given out
        self._trail: tuple[int, bytes] = (0, b"")  # where bytes that were given out end, and these
        self._skipping = False  # inside a line that is too long
        self._holes: list[tuple[int, int, float]] = []  # start, end, time of the first look
        self._holes_seen_at = 0.0
        self.seen: tuple[int, int, int, int] | None = None

    def rewind(self) -> None:
        """Give all lines again from the first."""
        self._offset, self._skipping, self._holes, self.seen = 0, False, [], None
        self._trail = (0, b"")
        self.on_restart()

    def is_same(self, status: os.stat_result) -> bool:
        """Whether a file of this status holds nothing new, and no block of zeros has to be looked at again."""
        if self._holes and abs(time.time() - self._holes_seen_at) > _HOLE_PAUSE_S:
            return False
        return self.seen == (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def read_new(self) -> Generator[bytes, None, None]:
        """Lines complete by now and not yet given, in batches that end with a newline.

        A line with zeros in it is given without them, and looked at again later: lines may so come twice.
        Raises OSError, NotRegular where the path has become something else.
        """
        fd = self._opener()
        try:
            state = os.fstat(fd)
            if not stat.S_ISREG(state.st_mode):
                raise NotRegular(f"{self.path} is no regular file")
            identity = (state.st_dev, state.st_ino)
            same = identity == self._identity and state.st_size >= self._offset and self._follows(fd)
            if self._identity is not None and not same:
                self.rewind()
            self._identity = identity
            self.modified_s = state.st_mtime
            if self._holes:
                yield from self._filled_holes(fd)
            if state.st_size > self._offset:
                yield from self._grown(fd, state.st_size)
            self._remember(fd)
            self.seen = (*identity, state.st_size, state.st_mtime_ns)
        finally:
            os.close(fd)

    def _follows(self, fd: int) -> bool:
        """Whether what was given out stands there still, by its last bytes."""
        end, trail = self._trail
        return os.pread(fd, len(trail), end - len(trail)) == trail

    def _remember(self, fd: int) -> None:
        """Zeros are not remembered: a client's cache may still fill them."""
        start = max(0, self._offset - _TRAIL_BYTES)
        trail = os.pread(fd, self._offset - start, start)
        self._trail = (0, b"") if b"\0" in trail else (start + len(trail), trail)

    def _grown(self, fd: int, size: int) -> Iterator[bytes]:
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
                lines = data[:cut]
                yield self._without_zeros(lines, self._offset - cut) if b"\0" in lines else lines
            if len(rest) > MAX_LINE_BYTES:
                self._skipping, rest, self._offset = True, b"", position

    def _without_zeros(self, data: bytes, start: int) -> bytes:
        """Note each line with zeros for another look; what follows them may be a line of its own.

        data: lines that stand at `start` in the file.
        """
        kept = []
        for line in data.splitlines(keepends=True):
            if b"\0" in line:
                if len(self._holes) < _MAX_HOLES:
                    self._holes.append((start, start + len(line), time.time()))
                kept.append(line[line.rfind(b"\0") + 1 :])
            else:
                kept.append(line)
            start += len(line)
        return b"".join(kept)

    def _filled_holes(self, fd: int) -> Iterator[bytes]:
        now = self._holes_seen_at = time.time()
        for hole in list(self._holes):
            start, end, since = hole
            data = os.pread(fd, end - start, start)
            if b"\0" not in data:
                self._holes.remove(hole)
                yield data.rstrip(b"\n") + b"\n"
            elif abs(now - since) >= _HOLE_LIFE_S:
                self._holes.remove(hole)

    def state(self) -> dict[str, Any]:
        """For JSON: all but the path."""
        return {
            "identity": self._identity,
            "offset": self._offset,
            "trail": [self._trail[0], self._trail[1].hex()],
            "skipping": self._skipping,
            "holes": self._holes,
            "oversized": self.oversized,
            "modified_s": self.modified_s,
            "seen": self.seen,
        }

    def restore(self, state: Any) -> None:
        """Go on from a `state`. Raises TypeError, ValueError or LookupError where it is none."""
        self._identity = _integers(state["identity"], 2)
        self._offset = int(state["offset"])
        self._trail = (int(state["trail"][0]), bytes.fromhex(state["trail"][1]))
        self._skipping = bool(state["skipping"])
        self._holes = [(int(start), int(end), float(since)) for start, end, since in state["holes"]]
        self.oversized = int(state["oversized"])
        self.modified_s = float(state["modified_s"])
        self.seen = _integers(state["seen"], 4)


def _integers(value: Any, count: int) -> Any:
    if value is None:
        return None
    if len(value) != count:
        raise ValueError(f"not {count} numbers")
    return tuple(int(number) for number in value)


def _past_zeros(fd: int, block: bytes, position: int, size: int) -> int:
    """Where to read on after `block`: past a stretch that the file system never stored, where it is one."""
    if block.count(0) < len(block):
        return position
    try:
        return min(size, max(position, os.lseek(fd, position, os.SEEK_DATA)))
    except OSError:  # no data any more, or a file system that cannot tell
        return position
