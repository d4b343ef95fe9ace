"""A metric's line as a chart of so many pixels needs it: thinned, cut to what is zoomed into. Pure.

Called by `wire`, which sends it.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from tuneplane.collect.series import Series

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
    attempts: Sequence[int] = (),
) -> Drawn:
    xs = steps if view.order == STEP else times_s
    if any(map(float.__gt__, xs, xs[1:])):  # by time, steps may have come late
        order = sorted(range(len(xs)), key=xs.__getitem__)
        xs, steps, values, times_s = (
            array("d", map(column.__getitem__, order)) for column in (xs, steps, values, times_s)
        )
        attempts = [attempts[i] for i in order] if attempts else attempts
    first = max(
        0, bisect_left(xs, view.low) - 1
    )  # with a neighbour on either side, so that lines reach the edge
    end = min(len(xs), bisect_right(xs, view.high) + 1)
    drawn = Drawn(attempt, end - first)
    kept: Sequence[int] = range(first, end)
    if end - first > 2 * view.buckets:
        kept = thin(xs, values, view.buckets, first, end, drawn.mean_x, drawn.mean_y)
    for to, column in ((drawn.steps, steps), (drawn.values, values), (drawn.times_s, times_s)):
        to.extend(map(column.__getitem__, kept))
    if attempts:
        drawn.starts = _starts([attempts[i] for i in kept])
    return drawn


def _starts(attempts: Sequence[int]) -> list[tuple[int, int]]:
    """Where each attempt begins: (index, attempt)."""
    return [(i, a) for i, a in enumerate(attempts) if i == 0 or a != attempts[i - 1]]


def thin(
    xs: array[float],
    values: array[float],
    buckets: int,
    first: int,
    end: int,
    mean_x: array[float],
    mean_y: array[float],
) -> list[int]:
    """Which of the points from `first` to `end` show the same curve: least and greatest of each bucket.

    First and last are kept, and of values that are not finite one of a kind a bucket. The mean of each bucket's
    finite values is added to `mean_x` and `mean_y`: what is smoothed must not be smoothed over extremes.
    """
    low, width = xs[first], (xs[end - 1] - xs[first]) / buckets
    kept = {first, end - 1}
    start = first
    for bucket in range(buckets):
        stop = end if bucket == buckets - 1 else bisect_left(xs, low + (bucket + 1) * width, start, end)
        if stop <= start:
            continue
        chunk = values[start:stop]
        total, count = sum(chunk), stop - start
        if math.isfinite(total):
            kept.add(values.index(min(chunk), start, stop))
            kept.add(values.index(max(chunk), start, stop))
        else:
            total, count = _keep_of_all_kinds(values, start, stop, kept)
        if count:
            mean_x.append(math.fsum(xs[start:stop]) / (stop - start))
            mean_y.append(total / count)
        start = stop
    return sorted(kept)


def _keep_of_all_kinds(values: array[float], start: int, stop: int, kept: set[int]) -> tuple[float, int]:
    """`thin` of a bucket with values that are not finite, or too great to be added; sum and count of the rest."""
    finite = [i for i in range(start, stop) if math.isfinite(values[i])]
    kinds: dict[str, int] = {}
    for i in range(start, stop):
        if not math.isfinite(values[i]):
            kinds.setdefault(str(values[i]), i)
    kept.update(kinds.values())
    if not finite:
        return 0.0, 0
    kept.update((min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)))
    return sum(values[i] / len(finite) for i in finite), 1
