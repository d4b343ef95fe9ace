"""Points of one metric as numbers in columns. Made by whoever parses a file, kept by `cache`, `compact`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

POINT_BYTES = 32
"""A point as it is kept: line number, step, value, time."""

EXACT = 1 << 53
"""Whole numbers below are exact as floats."""


class Columns:
    """Points in the order in which their lines stand in the file; `numbers` are those of the lines."""

    __slots__ = ("numbers", "steps", "times_s", "values")

    def __init__(
        self,
        numbers: Iterable[float] = (),
        steps: Iterable[float] = (),
        values: Iterable[float] = (),
        times_s: Iterable[float] = (),
    ) -> None:
        """Raises OverflowError for an int that is beyond floats."""
        self.numbers = array("d", numbers)
        self.steps = array("d", steps)
        self.values = array("d", values)
        self.times_s = array("d", times_s)

    def __len__(self) -> int:
        return len(self.numbers)

    def append(self, number: float, step: float, value: float, time_s: float) -> None:
        """Add a point."""
        self.numbers.append(number)
        self.steps.append(step)
        self.values.append(value)
        self.times_s.append(time_s)

    def extend(self, other: Columns) -> None:
        """Add the points of another."""
        self.numbers.extend(other.numbers)
        self.steps.extend(other.steps)
        self.values.extend(other.values)
        self.times_s.extend(other.times_s)

    def slice(self, start: int, end: int) -> Columns:
        """Some of the points, by where they stand."""
        return Columns(*(column[start:end] for column in self.all()))

    def taken(self, order: Sequence[int]) -> Columns:
        """The points at these places, in this order."""
        return Columns(*(map(column.__getitem__, order) for column in self.all()))

    def all(self) -> tuple[array[float], array[float], array[float], array[float]]:
        """The four columns, in the order of `__init__`."""
        return self.numbers, self.steps, self.values, self.times_s

    def pack(self) -> bytes:
        """As bytes for this machine: the columns one after the other, which compress well."""
        return b"".join(column.tobytes() for column in self.all())


def unpack(data: bytes) -> Columns:
    """What `pack` made. Raises ValueError where its length is none of such."""
    if len(data) % POINT_BYTES:
        raise ValueError("half a point")
    flat = array("d")
    flat.frombytes(data)
    count = len(flat) // 4
    return Columns(*(flat[start * count : (start + 1) * count] for start in range(4)))
