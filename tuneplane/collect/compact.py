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

Sizes = Mapping[str, list[int]]
"""By file, its size, change time in nanoseconds, and who may read it."""


class Compact:
    """One such file, opened. Close it."""

    def __init__(self, fd: int, ledger: str, sizes: Sizes, columns: dict[int, list[int]]) -> None:
        self._fd = fd
        self.ledger = ledger
        self.sizes = sizes
        self._columns = columns  # by key: offset, length, CRC-32, points

    def points(self, column: int) -> Columns:
        """The points of a column. Raises OSError or ValueError where they are damaged."""
        try:
            offset, length, checksum, count = self._columns[column]
            data = os.pread(self._fd, length, offset)
            if len(data) != length or zlib.crc32(data) != checksum:
                raise ValueError("damaged")
            packed = zlib.decompressobj().decompress(data, count * POINT_BYTES + 1)
            if len(packed) != count * POINT_BYTES:
                raise ValueError("damaged")
            return unpack(packed)
        except (zlib.error, KeyError) as error:
            raise ValueError(str(error)) from error

    def close(self) -> None:
        """Let go of it."""
        os.close(self._fd)


def open_compact(run_folder: Path) -> Compact | None:
    """The compact file of a run; None where there is none that can be read."""
    try:
        fd = os.open(run_folder / NAME, OPEN_FLAGS)
    except OSError:
        return None
    try:
        size = os.fstat(fd).st_size
        length, checksum = _END.unpack(os.pread(fd, _END.size, max(0, size - _END.size)))
        if length > min(size, _MAX_INDEX_BYTES) or os.pread(fd, len(_MAGIC), 0) != _MAGIC:
            raise ValueError
        text = os.pread(fd, length, size - _END.size - length)
        if zlib.crc32(text) != checksum:
            raise ValueError
        index: Any = json.loads(zlib.decompressobj().decompress(text, _MAX_INDEX_BYTES))
        columns = {int(key): [int(n) for n in place] for key, place in index["columns"].items()}
        return Compact(fd, index["ledger"], dict(index["sizes"]), columns)
    except (OSError, ValueError, LookupError, TypeError, struct.error, zlib.error):
        os.close(fd)
        return None


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


def _all_of(modes: Iterable[int]) -> int:
    bits = 0o444
    for mode in modes:
        bits &= mode
    return bits
