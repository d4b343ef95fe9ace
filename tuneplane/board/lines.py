"""A metric's line as a chart of so many pixels needs it: thinned, cut to what is zoomed into. Pure.

Called by `wire`, which sends it.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tuneplane.collect.buckets import thin
from tuneplane.collect.series import Points, Series

A = TypeVar("A", int, float)

STEP, RELATIVE, TIME = "step", "relative", "wall"


@dataclass(frozen=True)
class View:
    """What a chart shows. order: its axis: steps, seconds since the run's start, or unix seconds.

    low, high: the part of that axis. buckets: its pixels.
    """

    order: str = STEP
    low: float = -math.inf
    high: float = math.inf
    buckets: int = 1000


def _doubles() -> array[float]:
    return array("d")


@dataclass
class Drawn:
    """One line to be drawn. `total` points were in view; where fewer are here, means of each bucket are too.

    attempt: of a line that a later attempt did anew; None for the line that counts, of which `starts` says at
    which index which attempt begins.
    """

    attempt: int | None
    total: int
    starts: list[tuple[int, int]] = field(default_factory=list)
    steps: array[float] = field(default_factory=_doubles)
    values: array[float] = field(default_factory=_doubles)
    times_s: array[float] = field(default_factory=_doubles)
    mean_x: array[float] = field(default_factory=_doubles)  # steps, or unix seconds
    mean_y: array[float] = field(default_factory=_doubles)


def draw(series: Series, view: View, origin_s: float = 0.0) -> list[Drawn]:
    """The line that counts, then those that a later attempt hid. origin_s: when the run started."""
    if view.order == RELATIVE:
        view = View(TIME, view.low + origin_s, view.high + origin_s, view.buckets)
    merged = _line(series.steps, series.values, series.times_s, view, None, series.attempts)
    hidden = (
        _line(points.steps, points.values, points.times_s, view, attempt)
        for attempt, points in sorted(series.hidden.items())
    )
    return [line for line in (merged, *hidden) if len(line.steps)]


def _line(
    steps: array[float],
    values: array[float],
    times_s: array[float],
    view: View,
    attempt: int | None,
    attempts: array[int] | None = None,
) -> Drawn:
    xs = steps if view.order == STEP else times_s
    if any(map(float.__gt__, xs, xs[1:])):  # by time, steps may have come late
        order = sorted(range(len(xs)), key=xs.__getitem__)
        xs, steps, values, times_s = (
            array("d", map(column.__getitem__, order)) for column in (xs, steps, values, times_s)
        )
        attempts = array("q", map(attempts.__getitem__, order)) if attempts else None
    # With a neighbour on either side, so that lines reach the edge.
    first, end = max(0, bisect_left(xs, view.low) - 1), min(len(xs), bisect_right(xs, view.high) + 1)
    shown = Points(xs[first:end], values[first:end])
    kept = thin(shown, view.buckets)
    drawn = Drawn(attempt, end - first)
    if len(kept) < end - first:
        drawn.mean_x, drawn.mean_y = means(shown, view.buckets)
    drawn.steps, drawn.values, drawn.times_s = (
        _chosen(column[first:end], kept) for column in (steps, values, times_s)
    )
    if attempts:
        drawn.starts = _starts(_chosen(attempts[first:end], kept))
    return drawn


def _chosen(column: array[A], kept: Sequence[int]) -> array[A]:
    """These of a column's values; the column itself where it is all of them."""
    if len(kept) == len(column):
        return column
    return array(column.typecode, map(column.__getitem__, kept))


def _starts(attempts: array[int]) -> list[tuple[int, int]]:
    """Where each attempt begins: (index, attempt)."""
    if attempts and attempts.count(attempts[0]) == len(attempts):
        return [(0, attempts[0])]
    return [(i, a) for i, a in enumerate(attempts) if i == 0 or a != attempts[i - 1]]


def means(line: Points, buckets: int) -> tuple[array[float], array[float]]:
    """The mean of the finite values of each bucket, and its place: extremes are not what to smooth over."""
    xs, ys = _doubles(), _doubles()
    low, width = line.steps[0], line.steps[-1] / buckets - line.steps[0] / buckets
    start, size = 0, len(line)
    for bucket in range(1, buckets + 1):
        end = size if bucket == buckets else bisect_left(line.steps, low + bucket * width, start)
        finite = line.values[start:end]
        total = sum(finite)
        if not math.isfinite(total):
            finite = array("d", filter(math.isfinite, finite))
            total = sum(finite)
        if finite and math.isfinite(total):
            xs.append(sum(line.steps[start:end]) / (end - start))
            ys.append(total / len(finite))
        start = end
    return xs, ys
