"""One metric of one run or several as a chart with its title and legend. Pure; called by `tp job metrics`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from tuneplane.collect.chart import MIN_WIDTH, Axis, Line, Look, draw, styled
from tuneplane.collect.printable import (
    clock_text,
    columns,
    duration_text,
    fit,
    number_text,
    printable,
    shorten,
    step_text,
)
from tuneplane.collect.series import Series

X = Literal["step", "relative", "time"]

MARKS = "abcdefghijklmnopqrstuvwxyz"
"""Of the runs of one chart, in order."""

MIN_HEIGHT = 4
_HIGH = 8
"""Lines from which on one is spared for a second line of facts."""

_LEAST_TITLE = 8
_VALUES = 3
"""How many of the facts are last, min and max: they stand beside the title."""
_DAY_S = 86_400.0


@dataclass(frozen=True)
class View:
    """How a user asks to see curves.

    x: steps, seconds since the run began, or the time of day. log: the values by powers of ten.
    smooth: weight of what came before, 0 (none) to below 1.
    """

    x: X = "step"
    log: bool = False
    smooth: float = 0.0


@dataclass(frozen=True)
class Shown:
    """A run's line in a chart. label: in the legend; began_s: unix time from which relative times count."""

    series: Series
    label: str = ""
    began_s: float = 0.0


def render(title: str, shown: Sequence[Shown], view: View | None = None, look: Look | None = None) -> str:
    """The chart of one metric in at most `look.width` columns and `look.height` lines; no newline at its end.

    A legend that is higher than that stands above the lowest chart there is.

    Of one run: the line, and faint what later attempts did anew, marked with the attempt's number.
    Of several: a line each, told apart by a letter, and by colour where there is colour. No trailing blanks.
    """
    view, look = view or View(), look or Look()
    width, height = max(look.width, MIN_WIDTH), max(look.height, MIN_HEIGHT)
    several = len(shown) > 1
    lines = [line for place, one in enumerate(shown) for line in _lines(one, place, several, view)]
    if several:
        head = [fit(printable(title, look.unicode), width)]
        for place, one in enumerate(shown):
            mark = styled(_mark(place), Line((), (), colour=place), look)
            name = shorten(printable(one.label, look.unicode), max(_LEAST_TITLE, width // 2), look.unicode)
            facts = printable("  ".join(_facts(one.series, view)), look.unicode)
            head.append(f"  {mark} {fit(f'{name}  {facts}', width - 4)}".rstrip())
    else:
        head = _headlines(shown[0].series, title, view, width, look.unicode)
        head = head if height >= _HIGH else head[:1]
    look = Look(width, height - len(head), look.unicode, look.colours)
    return "\n".join([*(line.rstrip() for line in head), *draw(lines, look, _axis(shown, view), view.log)])


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """The exponential mean, without the pull of its start toward zero; what is not finite stays as it is.

    weight: of what came before, as TensorBoard and wandb count it.
    """
    mean, trust, result = 0.0, 0.0, []
    for value in values:
        if not math.isfinite(value):
            result.append(value)
            continue
        mean = mean * weight + value * (1 - weight)
        trust = trust * weight + (1 - weight)
        result.append(mean / trust)
    return result


def _mark(place: int) -> str:
    return MARKS[place] if place < len(MARKS) else "?"


def _lines(one: Shown, place: int, several: bool, view: View) -> list[Line]:
    """What is drawn of a run: beside its line, where it is alone, the raw values and hidden points, faint."""
    series = one.series
    xs, values = _placed(series.steps, series.values, series.times_s, one, view)
    mark, colour = (_mark(place), place) if several else ("", None)
    lines = []
    if not several:
        for attempt, points in sorted(series.hidden.items()):
            hidden = _placed(points.steps, points.values, points.times_s, one, view)
            lines.append(Line(*hidden, mark=str(attempt)[-1], faint=True))
        if view.smooth:
            lines.append(Line(xs, values, faint=True))
    return [*lines, Line(xs, smoothed(values, view.smooth) if view.smooth else values, mark, colour)]


def _placed(
    steps: Sequence[float], values: Sequence[float], times_s: Sequence[float], one: Shown, view: View
) -> tuple[Sequence[float], Sequence[float]]:
    """x and y of points, by ascending x."""
    if view.x == "step":
        return steps, values
    zero = one.began_s if view.x == "relative" else 0.0
    if all(before <= after for before, after in pairwise(times_s)):
        return [time_s - zero for time_s in times_s], values
    order = sorted(range(len(times_s)), key=times_s.__getitem__)
    return [times_s[index] - zero for index in order], [values[index] for index in order]


def _axis(shown: Sequence[Shown], view: View) -> Axis:
    ticks: list[tuple[float, str]] = []
    if len(shown) == 1:
        series, one = shown[0].series, shown[0]
        at = (
            series.steps
            if view.x == "step"
            else [t - one.began_s * (view.x == "relative") for t in series.times_s]
        )
        begins = [i for i in range(1, len(series)) if series.attempts[i] != series.attempts[i - 1]]
        ticks = [(at[index], str(series.attempts[index])) for index in begins]
    if view.x == "step":
        return Axis(step_text, "step ", ticks)
    if view.x == "relative":
        return Axis(duration_text, "after ", ticks)
    times = [time_s for one in shown for time_s in (*one.series.times_s[:1], *one.series.times_s[-1:])]
    with_date = bool(times) and max(times) - min(times) >= _DAY_S
    return Axis(lambda moment: clock_text(moment, with_date), "", ticks)


def _headlines(series: Series, title: str, view: View, width: int, unicode: bool) -> list[str]:
    """Title and facts in one line, or in two where they do not fit; the title is cut before the values are."""
    facts = [printable(fact, unicode) for fact in _facts(series, view)]
    if not title:
        return [fit("  ".join(facts), width)]
    name = printable(title, unicode)
    if len(facts) > _VALUES and len(name) + len("  ".join(["", *facts])) > width:
        first, more = facts[:_VALUES], ["  " + fit("  ".join(facts[_VALUES:]), width - 2)]
    else:
        first, more = facts, []
    said = "  ".join(first)
    name = shorten(name, max(_LEAST_TITLE, width - columns(said) - 2), unicode)
    return [fit(f"{name}  {said}", width), *more]


def _facts(series: Series, view: View) -> list[str]:
    finite = [value for value in series.values if math.isfinite(value)]
    if not len(series):
        return ["no points"]
    facts = [f"last {number_text(series.values[-1])}"]
    if finite:
        facts += [f"min {number_text(min(finite))}", f"max {number_text(max(finite))}"]
    if len(finite) < len(series):
        facts.append(f"{len(series) - len(finite)} not finite")
    low = sum(value <= 0 for value in finite) if view.log else 0
    if low:
        facts.append(f"{low} not above 0")
    attempts = sorted(set(series.attempts))
    if len(attempts) > 1:
        facts.append(f"attempts {attempts[0]}–{attempts[-1]}")
    hidden = sum(len(points) for points in series.hidden.values())
    if hidden:
        facts.append(f"{hidden} done anew")
    if view.smooth:
        facts.append(f"smoothed {number_text(view.smooth)}")
    return facts
