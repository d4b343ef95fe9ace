"""All points of a finished run in one file beside its ingest folder: no machine parses it twice. For `store`.

Written once, by the run's owner. It stands for files of certain sizes and times; where one differs, it does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tuneplane.collect.columns import POINT_BYTES, Columns, unpack
from tuneplane.collect.tail import OPEN_FLAGS

NAME = "metrics.compact"
"""In the run folder."""

WORTH_BYTES = 1 << 20
"""Less is parsed in a blink, and many small files are a burden to shared storage."""

_MAGIC = b"tuneplane/points/v1\n"
_END = struct.Struct("<QI")  # length of the index and its CRC-32, at the very end
_MAX_INDEX_BYTES = 256 << 20

_DAMAGED = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
    struct.error, zlib.error,
)  # fmt: skip
"""What reading an index raises where it is none, by fault or by somebody's will."""

Sizes = Mapping[str, list[int]]
"""By file, its size, change time in nanoseconds, and who may read it."""


class Compact:
    """One such file, as it was found: each reading opens it, since a machine may look at thousands of runs."""

    def __init__(
        self, path: Path, state: os.stat_result, ledger: str, sizes: Sizes, columns: dict[int, list[int]]
    ) -> None:
        self._path = path
        self._identity = _identity(state)
        self.ledger = ledger
        self.sizes = sizes
        self._columns = columns  # by key: offset, length, CRC-32, points

    def points(self, column: int) -> Columns:
        """The points of a column. Raises OSError or ValueError where they are damaged."""
        try:
            offset, length, checksum, count = self._columns[column]
            fd = os.open(self._path, OPEN_FLAGS)
            try:
                if _identity(os.fstat(fd)) != self._identity:
                    raise ValueError("another file")
                data = os.pread(fd, length, offset)
            finally:
                os.close(fd)
            if len(data) != length or zlib.crc32(data) != checksum:
                raise ValueError("damaged")
            packed = zlib.decompressobj().decompress(data, count * POINT_BYTES + 1)
            if len(packed) != count * POINT_BYTES:
                raise ValueError("damaged")
            return unpack(packed)
        except (zlib.error, KeyError) as error:
            raise ValueError(str(error)) from error


def open_compact(run_folder: Path) -> Compact | None:
    """The compact file of a run; None where there is none that can be read."""
    path = run_folder / NAME
    try:
        fd = os.open(path, OPEN_FLAGS)
    except OSError:
        return None
    try:
        state = os.fstat(fd)
        size = state.st_size
        length, checksum = _END.unpack(os.pread(fd, _END.size, max(0, size - _END.size)))
        if length > min(size, _MAX_INDEX_BYTES) or os.pread(fd, len(_MAGIC), 0) != _MAGIC:
            raise ValueError
        text = os.pread(fd, length, size - _END.size - length)
        if zlib.crc32(text) != checksum:
            raise ValueError
        index: Any = json.loads(zlib.decompressobj().decompress(text, _MAX_INDEX_BYTES))
        columns = {int(key): [int(n) for n in place] for key, place in index["columns"].items()}
        for offset, stored, _, count in columns.values():
            # Nothing packs better than a thousand to one (zlib's own bound).
            most = 1032 * (stored + 1)
            if min(offset, stored, count) < 0 or offset + stored > size or count * POINT_BYTES > most:
                raise ValueError
        return Compact(path, state, index["ledger"], dict(index["sizes"]), columns)
    except _DAMAGED:
        return None
    finally:
        os.close(fd)


def write_compact(
    run_folder: Path, ledger: str, sizes: Sizes, columns: Iterable[tuple[int, Columns]]
) -> None:
    """Write the file, whole or not at all, for those who may read all that it stands for. Raises OSError."""
    path = run_folder / NAME
    temporary = path.with_name(f".{NAME}.{os.urandom(4).hex()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(_MAGIC)
            places: dict[str, list[int]] = {}
            for key, points in columns:
                data = zlib.compress(points.pack(), 1)
                places[str(key)] = [file.tell(), len(data), zlib.crc32(data), len(points)]
                file.write(data)
            index = {"ledger": ledger, "sizes": sizes, "columns": places}
            text = zlib.compress(json.dumps(index, separators=(",", ":")).encode("ascii"), 1)
            file.write(text + _END.pack(len(text), zlib.crc32(text)))
            file.flush()
            os.fchmod(fd, 0o400 | _all_of(status[2] for status in sizes.values()))
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _identity(state: os.stat_result) -> tuple[int, int, int, int]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _all_of(modes: Iterable[int]) -> int:
    bits = 0o444
    for mode in modes:
        bits &= mode
    return bits
