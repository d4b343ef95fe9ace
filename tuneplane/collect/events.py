"""TensorBoard event files: the frames of a file that grows, and the scalars in them. Called by `declared`.

A file is TFRecords (https://www.tensorflow.org/tutorials/load_data/tfrecord): length, its checksum, data, its
checksum. The data is an `Event` of tensorboard/compat/proto/event.proto, of which the scalars alone are read.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any

from tuneplane.collect.tail import Tail

_BLOCK_BYTES = 1 << 20
_MAX_EVENT_BYTES = 4 << 20
"""A longer event is an image, a histogram or a graph: it is passed over unread."""

_HEAD_BYTES, _FOOT_BYTES = 12, 4
_LENGTH = struct.Struct("<QI")
_DOUBLE, _FLOAT = struct.Struct("<d"), struct.Struct("<f")


class EventTail(Tail):
    """Gives whole frames in batches. Their data is not checked against its checksum, their lengths are.

    damaged_at: where the file cannot be read on. It is tried again: a client's cache may not have had it yet.
    """

    damaged_at: int | None = None

    def is_same(self, status: os.stat_result) -> bool:
        return self.damaged_at is None and super().is_same(status)

    def _grown(self, fd: int, size: int) -> Iterator[bytes]:
        self.damaged_at = None
        while size - self._offset > _HEAD_BYTES:
            data = os.pread(fd, min(_BLOCK_BYTES, size - self._offset), self._offset)
            end = self._whole_frames(data)
            if end:
                self._offset += end
                yield data[:end]
                continue
            if self.damaged_at is not None or len(data) < _HEAD_BYTES:
                return
            length = _LENGTH.unpack_from(data)[0] + _HEAD_BYTES + _FOOT_BYTES
            if self._offset + length > size:  # still being written
                return
            if length > _MAX_EVENT_BYTES:
                self._offset += length
                continue
            yield os.pread(fd, length, self._offset)
            self._offset += length

    def _whole_frames(self, data: bytes) -> int:
        """How far `data` holds whole frames."""
        position, limit = 0, len(data)
        while position + _HEAD_BYTES <= limit:
            length, checksum = _LENGTH.unpack_from(data, position)
            if _checksums.get(length) != checksum and _checksum_of(length) != checksum:
                self.damaged_at = self._offset + position
                break
            following: int = position + _HEAD_BYTES + length + _FOOT_BYTES
            if following > limit:
                break
            position = following
        return position

    def state(self) -> dict[str, Any]:
        return {**super().state(), "damaged_at": self.damaged_at}

    def restore(self, state: Any) -> None:
        super().restore(state)
        self.damaged_at = state["damaged_at"]


def read_scalars(data: bytes) -> Iterator[tuple[float, float, list[tuple[str, float]]] | None]:
    """Wall time, step and scalars of each event in whole frames; None for one that is no event."""
    position = 0
    while position < len(data):
        length = _LENGTH.unpack_from(data, position)[0]
        start = position + _HEAD_BYTES
        position = start + length + _FOOT_BYTES
        try:
            yield _event(data, start, start + length)
        except (IndexError, ValueError, struct.error):
            yield None


def _event(data: bytes, position: int, end: int) -> tuple[float, float, list[tuple[str, float]]]:
    time_s, step = 0.0, 0
    scalars: list[tuple[str, float]] = []
    for field, value in _fields(data, position, end):
        if field == 1 and type(value) is bytes and len(value) == 8:
            time_s = _DOUBLE.unpack(value)[0]
        elif field == 2 and type(value) is int:
            step = value - (1 << 64) if value >> 63 else value
        elif field == 5 and type(value) is range:
            scalars += _summary(data, value)
    if time_s - time_s != 0:
        raise ValueError("no time")
    return time_s, float(step), scalars


def _summary(data: bytes, span: range) -> Iterator[tuple[str, float]]:
    """Tag and number of each value that is one number."""
    for field, inner in _fields(data, span.start, span.stop):
        if field != 1 or type(inner) is not range:
            continue
        tag, number = "", None
        for part, value in _fields(data, inner.start, inner.stop):
            if part == 1 and type(value) is range:
                tag = data[value.start : value.stop].decode("utf-8", "replace")
            elif part == 2 and type(value) is bytes and len(value) == 4:
                number = _FLOAT.unpack(value)[0]
            elif part == 8 and type(value) is range:
                number = _tensor(data, value)
        if tag and number is not None:
            yield tag, number


_TYPES = {  # tensorflow/core/framework/types.proto: how one number of it stands in tensor_content
    1: "<f",
    2: "<d",
    3: "<i",
    4: "<B",
    5: "<h",
    6: "<b",
    9: "<q",
    17: "<H",
    19: "<e",
    22: "<I",
    23: "<Q",
}
_BFLOAT16, _HALF = 14, 19


def _tensor(data: bytes, span: range) -> float | None:
    """The number in a tensor that has just one (tensor.proto); None for any other."""
    dtype = 0
    numbers: list[bytes | int] = []
    content = b""
    for field, value in _fields(data, span.start, span.stop):
        if field == 1 and type(value) is int:
            dtype = value
        elif field == 4 and type(value) is range:
            content = data[value.start : value.stop]
        elif field in (5, 6) and type(value) is range:  # packed floats, doubles
            width = 4 if field == 5 else 8
            packed = data[value.start : value.stop]
            numbers += [packed[at : at + width] for at in range(0, min(len(packed), 2 * width), width)]
        elif field in (7, 10, 13, 16, 17) and type(value) is range:  # packed varints
            numbers += _varints(data, value)
        elif field in (5, 6, 7, 10, 13, 16, 17) and type(value) is not range:
            numbers.append(value)
    if content and not numbers:
        if dtype == _BFLOAT16 and len(content) == 2:
            return float(_FLOAT.unpack(b"\0\0" + content)[0])
        form = _TYPES.get(dtype)
        return (
            float(struct.unpack(form, content)[0]) if form and len(content) == struct.calcsize(form) else None
        )
    if len(numbers) != 1 or dtype not in (*_TYPES, _BFLOAT16):
        return None
    one = numbers[0]
    if isinstance(one, bytes):
        return float((_DOUBLE if len(one) == 8 else _FLOAT).unpack(one)[0])
    if dtype == _HALF:
        return float(struct.unpack("<e", struct.pack("<H", one & 0xFFFF))[0])
    if dtype == _BFLOAT16:
        return float(_FLOAT.unpack(struct.pack("<I", (one & 0xFFFF) << 16))[0])
    return float(one - (1 << 64) if one >> 63 and dtype != 23 else one)


def _varints(data: bytes, span: range) -> list[int]:
    """The first two numbers that are packed there: more than one is not asked for."""
    found: list[int] = []
    position = span.start
    while position < span.stop and len(found) < 2:
        value, position = _varint(data, position)
        found.append(value)
    return found


def _fields(data: bytes, position: int, end: int) -> Iterator[tuple[int, int | bytes | range]]:
    """The fields of a message: a varint as int, fixed ones as their bytes, others as where they stand.

    Source: https://protobuf.dev/programming-guides/encoding/. Raises IndexError or ValueError.
    """
    while position < end:
        key = data[position]
        position += 1
        if key > 127:
            key, position = _varint(data, position - 1)
        kind = key & 7
        if kind == 2:
            length = data[position]
            position += 1
            if length > 127:
                length, position = _varint(data, position - 1)
            start, position = position, position + length
            if position > end:
                raise ValueError("a field that is longer than its message")
            yield key >> 3, range(start, position)
        elif kind == 0:
            value, position = _varint(data, position)
            yield key >> 3, value
        elif kind in (1, 5):
            start, position = position, position + (8 if kind == 1 else 4)
            if position > end:
                raise ValueError("a field that is longer than its message")
            yield key >> 3, data[start:position]
        else:
            raise ValueError("a kind of field that there is not")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where the next byte stands."""
    value, shift = 0, 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFF_FFFF_FFFF_FFFF, position
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


_MAX_CHECKSUMS = 4096
_checksums: dict[int, int] = {}  # by length: most events of a file are of a few lengths


def _checksum_of(length: int) -> int:
    """CRC-32C of a length, masked as TFRecord does it."""
    crc = 0xFFFF_FFFF
    for byte in length.to_bytes(8, "little"):
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F6_3B78 if crc & 1 else 0)
    crc ^= 0xFFFF_FFFF
    masked = ((crc >> 15 | crc << 17) + 0xA282_EAD8) & 0xFFFF_FFFF
    if len(_checksums) < _MAX_CHECKSUMS:
        _checksums[length] = masked
    return masked
