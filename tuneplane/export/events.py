"""TensorBoard event files: scalars as TFRecords of protobuf messages, by the standard library alone.

Formats: tensorflow/core/lib/io/record_writer.h (framing), tensorflow/core/util/event.proto (messages).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import IO

from tuneplane.collect.series import Series
from tuneplane.export.place import EVENTS
from tuneplane.export.rows import points

_POLYNOMIAL = 0x82F63B78
"""CRC-32C (Castagnoli), reflected. Source: RFC 3720, appendix B.4."""

_MASK_DELTA = 0xA282EAD8
"""Source: tensorflow/core/lib/hash/crc32c.h."""

_MAX_FLOAT32 = 3.4028234663852886e38
_MOST_STEP = 2**63 - 1


def _byte_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return table


_BYTES = _byte_table()


@cache
def _pair_table() -> list[int]:
    """The register after two bytes at once: half as many steps."""
    return [
        _BYTES[(_BYTES[pair & 0xFF] ^ (pair >> 8)) & 0xFF] ^ (_BYTES[pair & 0xFF] >> 8)
        for pair in range(1 << 16)
    ]


def crc32c(data: bytes, state: int = 0xFFFFFFFF) -> int:
    """The register after `data`, neither inverted nor masked, so that it can be carried on."""
    table = _BYTES
    for byte in data:
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state


def masked(state: int) -> int:
    """What stands in a record for the register: inverted, rotated and shifted."""
    crc = state ^ 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def write_events(folder: Path, run_id: str, series: Mapping[str, Series], by_attempt: bool) -> int:
    """Event files of a run in `folder`, which is there; how many points. Raises OSError.

    by_attempt: a folder `attempt-N` each with all that this attempt said; else the merged line alone.
    """
    parts: dict[int, list[tuple[str, list[Point]]]] = {}
    for name, line in series.items():
        for attempt, some in _by_attempt(line, by_attempt).items():
            parts.setdefault(attempt, []).append((name, some))
    count = 0
    for attempt, tagged in sorted(parts.items()):
        place = folder / f"attempt-{attempt}" if by_attempt else folder
        place.mkdir(exist_ok=True)
        began_s = min(point[2] for _, some in tagged for point in some)
        with (place / f"events.out.{EVENTS}.{max(0, int(began_s)):010d}.{run_id}").open(
            "xb", 1 << 20
        ) as file:
            events = EventFile(file, began_s)
            count += sum(events.add(name, some) for name, some in tagged)
    return count


Point = tuple[float, float, float]
"""Step, value, unix time."""


def _by_attempt(line: Series, by_attempt: bool) -> dict[int, list[Point]]:
    if not by_attempt:
        merged = list(zip(line.steps, line.values, line.times_s, strict=True))
        return {0: merged} if merged else {}
    found: dict[int, list[Point]] = {}
    for (attempt, _), step, value, time_s in points(line, hidden=True):
        found.setdefault(attempt, []).append((step, value, time_s))
    return found


class EventFile:
    """Scalars of one event file. file: open for bytes. began_s: unix time of its first event."""

    def __init__(self, file: IO[bytes], began_s: float) -> None:
        self._file = file
        self._lengths: dict[int, bytes] = {}
        version = b"brain.Event:2"  # the one there is
        self._write(b"\x09" + struct.pack("<d", began_s) + b"\x1a" + bytes([len(version)]) + version)

    def add(self, tag: str, some: Iterable[Point]) -> int:
        """Write (step, value, unix time) points of one tag; how many.

        A step becomes the whole number nearest to it, and a value a float of 32 bits: event files hold no others.
        """
        # Event{summary: {value: {tag, simple_value}}, wall_time, step}: what stays the same comes first, so that
        # its checksum is computed once. A parser takes fields in any order.
        name = tag.encode("utf-8", "backslashreplace")
        tagged = b"\x0a" + _varint(len(name)) + name + b"\x15"
        value_size = len(tagged) + 4
        summary = b"\x0a" + _varint(value_size) + tagged
        head = b"\x2a" + _varint(len(summary) + 4) + summary
        state, table, pairs = crc32c(head), _BYTES, _pair_table()
        fixed, halves, checksum = struct.Struct("<fBdB"), struct.Struct("<7H"), struct.Struct("<I")
        write, lengths = self._file.write, self._length
        count = 0
        for step, value, time_s in some:
            body = fixed.pack(_float32(value), 0x09, time_s, 0x10)
            crc = state
            for half in halves.unpack(body):
                crc = pairs[(crc ^ half) & 0xFFFF] ^ (crc >> 16)
            number = _varint(_whole(step))
            for byte in number:
                crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
            start = lengths(len(head) + len(body) + len(number))
            write(start + head + body + number + checksum.pack(masked(crc)))
            count += 1
        return count

    def _write(self, data: bytes) -> None:
        self._file.write(self._length(len(data)) + data + struct.pack("<I", masked(crc32c(data))))

    def _length(self, size: int) -> bytes:
        """A record's first twelve bytes."""
        known = self._lengths.get(size)
        if known is None:
            length = struct.pack("<Q", size)
            known = self._lengths[size] = length + struct.pack("<I", masked(crc32c(length)))
        return known


def _float32(value: float) -> float:
    if abs(value) > _MAX_FLOAT32 and value - value == 0:
        return float("inf") if value > 0 else float("-inf")
    return value


def _whole(step: float) -> int:
    return max(-_MOST_STEP - 1, min(_MOST_STEP, round(step)))


def _varint(number: int) -> bytes:
    """Base 128, lowest first; a negative int64 as its two's complement."""
    if 0 <= number < 128:
        return _SMALL[number]
    number &= 0xFFFFFFFFFFFFFFFF
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    found.append(number)
    return bytes(found)


_SMALL = [bytes([number]) for number in range(128)]
