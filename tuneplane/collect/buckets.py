"""Fewer points of a line for a drawing so many pixels wide. Pure; terminal and board draw what it keeps."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Protocol


class Line(Protocol):
    """What `Series` and `Points` have: steps ascending, a value for each."""

    @property
    def steps(self) -> array[float]: ...
    @property
    def values(self) -> array[float]: ...


def thin(line: Line, buckets: int) -> Sequence[int]:
    """Which points to draw, ascending, where the steps' range is cut into `buckets` of one width.

    Of each bucket its smallest and largest finite value stay, and the first NaN, +inf and -inf; of the line its
    first and last point. So no spike is lost, and the same line gives the same points. A line that has no more
    than two points a bucket stays whole.
    """
    size = len(line.steps)
    if size <= 2 * buckets or size <= 2:
        return range(size)
    kept = {0, size - 1}
    for start, end in _spans(line.steps, max(1, buckets)):
        values = line.values[start:end]
        if math.isfinite(sum(values)):  # so each of them is
            kept.add(start + values.index(min(values)))
            kept.add(start + values.index(max(values)))
        else:
            kept.update(start + index for index in _marked(values))
    return sorted(kept)


def _spans(steps: array[float], buckets: int) -> Iterator[tuple[int, int]]:
    """Where the points of each bucket stand; empty buckets are left out."""
    first, last = steps[0], steps[-1]
    start = 0
    for number in range(1, buckets):
        share = number / buckets
        end = bisect_left(
            steps, first * (1 - share) + last * share, start
        )  # a range may be wider than a float
        if end > start:
            yield start, end
        start = end
    yield start, len(steps)


def _marked(values: array[float]) -> Iterator[int]:
    """The points of a bucket that stay, where some may not be finite."""
    finite = [index for index, value in enumerate(values) if math.isfinite(value)]
    if finite:
        yield min(finite, key=values.__getitem__)
        yield max(finite, key=values.__getitem__)
    kinds: set[str] = set()
    for index, value in enumerate(values):
        kind = "" if math.isfinite(value) else str(value)
        if kind and kind not in kinds:
            kinds.add(kind)
            yield index
