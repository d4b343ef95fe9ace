"""Which points make one line, under which name, and what is said of it without them. Pure; `ledger` calls it."""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from tuneplane.collect.columns import Columns
from tuneplane.collect.series import Points, Series, merge

HARDWARE = "system/"
"""Metrics of hardware samplers: their step is the time in seconds."""


@dataclass(frozen=True)
class LastValue:
    """One metric in a line. `min` and `max` are of finite values, None where there is none."""

    name: str
    last: float
    last_step: float
    min: float | None
    max: float | None
    first_step: float
    points: int  # steps that have a value in the merged line
    hidden: int  # steps of earlier attempts that later ones did anew
    attempts: int
    age_s: float


@dataclass
class Column:
    """The points of one metric in one file and attempt: where they are kept, and whose they are.

    output: the name under which the file is declared; empty for one of the ingest folder. folder: of such a file,
    below the output folder. started_s: when the process that writes it began.
    """

    file: str
    attempt: int
    name: str
    rank: int
    output: str
    started_s: float
    key: int = -1  # of the cache; -1 where nothing is kept yet
    points: int = 0
    in_order: bool = True  # line numbers ascend
    last_number: float = -1.0
    newest_s: float = -math.inf

    @property
    def folder(self) -> str:
        return self.file.rpartition("/")[0]

    def add(self, columns: Columns) -> None:
        """Count more points in."""
        self.in_order = self.in_order and columns.numbers[0] > self.last_number
        self.last_number = max(self.last_number, columns.numbers[-1])
        newest_s = max(columns.times_s)
        self.newest_s = max(self.newest_s, newest_s)
        self.points += len(columns)


Aliases = Mapping[str, tuple[str, int]]
"""By the name in a file: the canonical name, and which of its names this is, the first preferred."""


def aliases_of(metrics: Iterable[tuple[str, Iterable[str]]]) -> dict[str, tuple[str, int]]:
    """From canonical names with their aliases. A name that two of them claim is the first one's."""
    found: dict[str, tuple[str, int]] = {}
    for canonical, aliases in metrics:
        for place, name in enumerate((canonical, *aliases)):
            found.setdefault(name, (canonical, place))
    return found


def name_lines(columns: Iterable[Column], aliases: Aliases | None = None) -> dict[str, list[Column]]:
    """The columns of each line, by the name that it is shown under; of one file the preferred name first.

    A metric has its canonical name, where there is one. The lowest rank that reports it has the plain name,
    others `loss@rank3`. Where a declared output has a name that the run itself or another output has too, that of
    the output is `<output>/loss`; where two folders of one output have it in the same attempt, it is
    `<folder>/loss` in each.
    """
    by_name: dict[str, list[Column]] = {}
    known = aliases or {}
    placed = [(*known.get(column.name, (column.name, 0)), column) for column in columns]
    for name, _, column in sorted(placed, key=operator.itemgetter(1)) if known else placed:
        by_name.setdefault(name, []).append(column)
    lines: dict[str, list[Column]] = {}
    others: list[tuple[str, list[Column]]] = []
    for name in sorted(by_name):
        for index, (prefix, members) in enumerate(_origins(by_name[name])):
            ranks: dict[int, list[Column]] = {}
            for column in members:
                ranks.setdefault(column.rank, []).append(column)
            plain = name if index == 0 and prefix.count("/") == 0 else f"{prefix.removeprefix('/')}/{name}"
            for place, rank in enumerate(sorted(ranks)):
                shown = plain if place == 0 else f"{plain}@rank{rank}"
                if shown == name:
                    lines[shown] = ranks[rank]
                else:
                    others.append((shown, ranks[rank]))
    for wanted, members in others:
        shown = wanted
        while shown in lines:
            shown += "*"
        lines[shown] = members
    return lines


def _origins(columns: list[Column]) -> list[tuple[str, list[Column]]]:
    """Columns of one name by who says it: the run itself first, then outputs, those of several folders apart.

    A prefix with a slash is to be shown.
    """
    by_output: dict[str, list[Column]] = {}
    for column in columns:
        by_output.setdefault(column.output, []).append(column)
    origins: list[tuple[str, list[Column]]] = []
    for output in sorted(by_output):
        folders: dict[int, set[str]] = {}
        for column in by_output[output]:
            folders.setdefault(column.attempt, set()).add(column.folder)
        if not output or all(len(found) == 1 for found in folders.values()):
            origins.append((output, by_output[output]))
            continue
        for folder in sorted(set().union(*folders.values())):
            prefix = "/" + (folder.partition("/")[2] or output)  # without `out`
            origins.append((prefix, [c for c in by_output[output] if c.folder == folder]))
    return origins


def assemble(parts: Iterable[tuple[Column, Columns]], resumed: Mapping[int, float]) -> Series:
    """The merged line of these columns, as `name_lines` orders them.

    resumed: by attempt, the step from which on it hides earlier ones.
    """
    by_attempt: dict[int, list[tuple[Column, Columns]]] = {}
    for column, points in parts:
        if column.name.startswith(HARDWARE):  # by time: where training took up again hides nothing of it
            resumed = {}
        by_attempt.setdefault(column.attempt, []).append((column, points))
    return merge({attempt: _in_order(found) for attempt, found in by_attempt.items()}, resumed)


def _in_order(parts: Sequence[tuple[Column, Columns]]) -> Points:
    """The points of one attempt in the order logged: by line number in one file, by time across several."""
    if len(parts) > 1:
        parts = _one_name_a_step(parts)
    if len(parts) == 1:
        column, points = parts[0]
        if not column.in_order:
            points = points.taken(sorted(range(len(points)), key=points.numbers.__getitem__))
        return Points(points.steps, points.values, points.times_s)
    rows = sorted(
        row
        for column, p in parts
        for row in zip(p.times_s, [column.started_s] * len(p), p.numbers, p.steps, p.values, strict=True)
    )
    _, steps, values = (array("d", map(operator.itemgetter(place), rows)) for place in (2, 3, 4))
    return Points(steps, values, array("d", map(operator.itemgetter(0), rows)))


def _one_name_a_step(parts: Sequence[tuple[Column, Columns]]) -> list[tuple[Column, Columns]]:
    """One column a file: where a writer has several names for a metric, the first that has a step has it."""
    by_file: dict[str, list[tuple[Column, Columns]]] = {}
    for column, points in parts:
        by_file.setdefault(column.file, []).append((column, points))
    found = []
    for members in by_file.values():
        column, points = members[0]
        if len(members) > 1:
            steps = set(points.steps)
            whole = points.slice(0, len(points))
            for _, others in members[1:]:
                whole.extend(others.taken([i for i, step in enumerate(others.steps) if step not in steps]))
                steps.update(others.steps)
            column, points = replace(column, in_order=False), whole
        found.append((column, points))
    return found


@dataclass(frozen=True)
class Summary:
    """What `LastValue` tells of a line, but its age. attempt: the latest that has points of it."""

    last: float
    last_step: float
    min: float | None
    max: float | None
    first_step: float
    points: int
    hidden: int
    attempts: int
    newest_s: float
    attempt: int

    def told(self, name: str, now_s: float) -> LastValue:
        """For users."""
        return LastValue(
            name=name,
            last=self.last,
            last_step=self.last_step,
            min=self.min,
            max=self.max,
            first_step=self.first_step,
            points=self.points,
            hidden=self.hidden,
            attempts=self.attempts,
            age_s=max(0.0, now_s - self.newest_s),
        )

    def state(self) -> list[Any]:
        """For JSON."""
        return list(astuple(self))

    @classmethod
    def of(cls, state: Any) -> Summary:
        """What `state` gave. Raises TypeError or ValueError where it is none."""
        last, last_step, low, high, first_step, points, hidden, attempts, newest_s, attempt = state
        return cls(
            last=float(last),
            last_step=float(last_step),
            min=None if low is None else float(low),
            max=None if high is None else float(high),
            first_step=float(first_step),
            points=int(points),
            hidden=int(hidden),
            attempts=int(attempts),
            newest_s=float(newest_s),
            attempt=int(attempt),
        )


def summarise(series: Series) -> Summary | None:
    """What is said of a line; None where it has no points."""
    if not len(series):
        return None
    low, high = _range(series.values)
    attempts = set(series.attempts) | set(series.hidden)
    return Summary(
        last=series.values[-1],
        last_step=series.steps[-1],
        min=low,
        max=high,
        first_step=series.steps[0],
        points=len(series),
        hidden=sum(len(points) for points in series.hidden.values()),
        attempts=len(attempts),
        newest_s=max(series.times_s),
        attempt=max(attempts),
    )


def extended(summary: Summary, attempt: int, columns: Columns) -> Summary | None:
    """The summary with points that go on where the line ends; None where they do not: then all points decide."""
    steps = columns.steps
    if attempt < summary.attempt or steps[0] <= summary.last_step or not _ascends(steps):
        return None
    low, high = _range(columns.values)
    newest_s = max(columns.times_s)
    return replace(
        summary,
        last=columns.values[-1],
        last_step=steps[-1],
        min=min((v for v in (summary.min, low) if v is not None), default=None),
        max=max((v for v in (summary.max, high) if v is not None), default=None),
        points=summary.points + len(columns),
        attempts=summary.attempts + (attempt != summary.attempt),
        newest_s=max(summary.newest_s, newest_s),
        attempt=attempt,
    )


def started(attempt: int, columns: Columns) -> Summary | None:
    """The summary of a line that begins with these points; None where all points decide."""
    low, high = _range(columns.values)
    return (
        Summary(
            last=columns.values[-1],
            last_step=columns.steps[-1],
            min=low,
            max=high,
            first_step=columns.steps[0],
            points=len(columns),
            hidden=0,
            attempts=1,
            newest_s=max(columns.times_s),
            attempt=attempt,
        )
        if _ascends(columns.steps)
        else None
    )


def _ascends(steps: array[float]) -> bool:
    return all(map(operator.lt, steps, steps[1:]))


def _range(values: array[float]) -> tuple[float | None, float | None]:
    """Smallest and largest finite value."""
    if math.isfinite(sum(values)):  # so each of them is
        return min(values), max(values)
    finite = [value for value in values if math.isfinite(value)]
    return min(finite, default=None), max(finite, default=None)
