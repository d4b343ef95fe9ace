"""One metric's line over all attempts of a run. Pure; called by `metrics` and by whoever draws.

A restarted attempt repeats steps: from the first step that it does anew, what earlier attempts said is hidden.
"""

from __future__ import annotations

import operator
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field


def _doubles() -> array[float]:
    return array("d")


@dataclass
class Points:
    """What one attempt logged of one metric, in the order in which it was logged."""

    steps: array[float] = field(default_factory=_doubles)
    values: array[float] = field(default_factory=_doubles)
    times_s: array[float] = field(default_factory=_doubles)

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, step: float, value: float, time_s: float) -> None:
        """Add a point that was logged after all others."""
        self.steps.append(step)
        self.values.append(value)
        self.times_s.append(time_s)


@dataclass
class Series:
    """The merged line: each step once, ascending; `attempts[i]` is the attempt that point i is of.

    hidden: by attempt, the points that a later attempt did anew, each step once, ascending.
    """

    steps: array[float] = field(default_factory=_doubles)
    values: array[float] = field(default_factory=_doubles)
    times_s: array[float] = field(default_factory=_doubles)
    attempts: array[int] = field(default_factory=lambda: array("q"))
    hidden: dict[int, Points] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.steps)


def merge(attempts: Mapping[int, Points], resumed: Mapping[int, float] | None = None) -> Series:
    """Merge what each attempt logged of one metric.

    Within an attempt steps may come late, and the last value of a step wins. A later attempt hides earlier ones
    from its smallest step of this metric on, or from where it says it took up again, whichever comes first.

    resumed: by attempt, that step, for attempts that logged anything: one that logged nothing hides nothing.
    """
    starts = {number: min(points.steps) for number, points in attempts.items() if len(points)}
    for number, step in (resumed or {}).items():
        starts[number] = min(step, starts.get(number, step))
    limits: dict[int, float] = {}  # from which step on an attempt is hidden
    limit = float("inf")
    for number in sorted(starts, reverse=True):
        limits[number] = limit
        limit = min(limit, starts[number])

    merged = Series()
    for number in sorted(limits):
        points = attempts.get(number)
        if points is None:
            continue
        order = _last_of_each_step(points.steps)
        columns = [points.steps, points.values, points.times_s]
        if order is not None:
            columns = [array("d", map(column.__getitem__, order)) for column in columns]
        cut = bisect_left(columns[0], limits[number])
        merged.steps.extend(columns[0][:cut])
        merged.values.extend(columns[1][:cut])
        merged.times_s.extend(columns[2][:cut])
        merged.attempts.extend(array("q", [number]) * cut)
        if cut < len(columns[0]):
            merged.hidden[number] = Points(*(column[cut:] for column in columns))
    return merged


def _last_of_each_step(steps: array[float]) -> list[int] | None:
    """Where the last point of each step stands, by ascending step; None where they stand so already."""
    if all(map(operator.lt, steps, steps[1:])):
        return None
    last = {step: index for index, step in enumerate(steps)}
    return [last[step] for step in sorted(last)]
