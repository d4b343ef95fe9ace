"""Metrics of a run, or of several side by side, as text: charts, tables, what was lost. For `tp job metrics`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from tuneplane.cli.run import find
from tuneplane.cli.show import age, size
from tuneplane.collect.chart import Line, Look, styled
from tuneplane.collect.choice import choose, is_system, nearest
from tuneplane.collect.figure import MARKS, Shown, View, render
from tuneplane.collect.metrics import LastValue
from tuneplane.collect.overview import Overview
from tuneplane.collect.printable import columns, number_text, printable, shorten, step_text
from tuneplane.collect.series import Series
from tuneplane.collect.source import RunSource
from tuneplane.collect.store import Store
from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.runs.sources import read_source

MOST_RUNS = len(MARKS)
_MOST_ROWS = 200
"""Rows of a table on a terminal; programs get all."""
_WIDEST_NAME = 100
_LEAST_NAME = 12
_LONGEST_VALUE = 60
_MOST_HPARAMS = 60


@dataclass(frozen=True)
class RunMetrics:
    """One run: what it reported, and the lines of the metrics asked for."""

    run_id: str
    overview: Overview
    series: Mapping[str, Series]
    began_s: float | None

    def age_s(self) -> float | None:
        """Seconds since its newest point; None without points."""
        newest = self.overview.newest_s
        return None if newest is None else max(0.0, time.time() - newest)


def find_runs(run: str, others: Sequence[str]) -> list[RunFolder]:
    """The runs that are meant, each once. Raises UsageError."""
    found = {folder.run_id: folder for folder in [find(run)]}
    for text in others:
        try:
            folder = find(text)
        except UsageError as error:
            hint = "after --compare every word is a run; names of metrics stand before it"
            raise UsageError(*error.faults, Fault(hint, "--compare")) from None
        found.setdefault(folder.run_id, folder)
    if len(found) > MOST_RUNS:
        raise UsageError(
            Fault(
                f"{len(found)} runs are too many to tell apart in one chart", "--compare", f"give {MOST_RUNS}"
            )
        )
    return list(found.values())


class CurveReader:
    """Reads runs again and again, and tells them as lines of text."""

    def __init__(self, folders: Sequence[RunFolder]) -> None:
        self.folders = list(folders)
        self.store = Store()
        self.sources: dict[str, RunSource] = {}
        self._overviews: dict[str, Overview] = {}

    def __enter__(self) -> CurveReader:
        self.store.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.__exit__(kind, error, trace)

    def refresh(self) -> None:
        """Read what is new. Raises UsageError or OSError where a run's job.json cannot be read."""
        self.sources = {folder.run_id: read_source(folder) for folder in self.folders}
        self.store.refresh(self.sources.values())
        self._overviews = {run_id: self.store.overview(run_id) for run_id in self.sources}

    def refuse_unread(self) -> None:
        """Raises OperationError where none of the runs could be read."""
        faults = [overview.fault for overview in self._overviews.values()]
        if faults and all(faults):
            raise OperationError(*(Fault(printable(fault)) for fault in faults))

    def names(self) -> set[str]:
        """Every metric of every run."""
        return {name for overview in self._overviews.values() for name in overview.metrics}

    def choose(self, patterns: Sequence[str], strict: bool = True) -> list[str]:
        """The metrics meant, all where none is named. strict: raise UsageError for one that there is not."""
        have = self.names()
        if not patterns:
            return sorted(have)
        chosen, unknown = choose(patterns, have)
        if unknown and have and strict:
            near = dict.fromkeys(name for pattern in unknown for name in nearest(pattern, have))
            names = ", ".join(printable(name) for name in near) or "tp job metrics RUN lists them"
            what = f"no metric {', '.join(map(printable, unknown))} in {self.folders[0].run_id}"
            raise UsageError(Fault(what, "NAME", f"nearest: {names}"))
        return chosen

    def to_draw(self, chosen: Sequence[str], patterns: Sequence[str], most: int) -> list[str]:
        """Those of the chosen that are drawn: all that were named, else a few, losses first, no hardware."""
        if patterns:
            return list(chosen)
        mine = [name for name in chosen if not is_system(name)]
        mine.sort(key=lambda name: "loss" not in name.rpartition("/")[2])
        return sorted(mine[:most])

    def metrics(self, folder: RunFolder, chosen: Iterable[str]) -> RunMetrics:
        """One run with its lines of these metrics."""
        source = self.sources[folder.run_id]
        series = self.store.series(folder.run_id, chosen)
        began_s = source.attempts[0][1] if source.attempts else None
        return RunMetrics(folder.run_id, self._overviews[folder.run_id], series, began_s)

    def charts(self, names: Sequence[str], view: View, look: Look) -> Iterable[str]:
        """A chart of each metric, of all runs that have it."""
        for name in names:
            shown = []
            for folder in self.folders:
                run = self.metrics(folder, [name])
                if name in run.series and len(run.series[name]):
                    first_s = min(run.series[name].times_s)
                    began_s = first_s if run.began_s is None else min(first_s, run.began_s)
                    shown.append(Shown(run.series[name], run.run_id, began_s))
            if not shown:
                continue
            by_time = replace(view, x="relative") if is_system(name) and view.x == "step" else view
            if len(shown) == 1 and len(self.folders) > 1:
                yield render(f"{name} of {shown[0].label}", shown, by_time, look)
            else:
                yield render(name, shown, by_time, look)

    def missing(self) -> list[str]:
        """Runs without a point, and why that may be."""
        from tuneplane.runs.state import read_state

        told = []
        for folder in self.folders:
            overview = self._overviews[folder.run_id]
            if overview.metrics or overview.fault:
                continue
            state = read_state(folder)
            when = f"{'' if state.is_final else ' yet'} ({state.state})"
            told.append(f"no points of {folder.run_id}{when}: log() of tuneplane.report writes them")
        return told

    def summary(self, chosen: Sequence[str], width: int | None) -> list[str]:
        """Last values, hardware apart, hyper-parameters, and how old the data is."""
        blocks = [self._legend()]
        own = [name for name in chosen if not is_system(name)]
        hardware = [name for name in chosen if is_system(name)]
        blocks.append(self._table("METRIC", own, width))
        blocks.append(self._table("HARDWARE", hardware, width))
        lines = [line for block in blocks if block for line in [*block, ""]][:-1]
        return [*lines, *self._hparams(), *self._ages()]

    def table(self, names: Sequence[str], width: int | None) -> list[str]:
        """Last values of these metrics, hardware or not."""
        return self._table("METRIC", names, width)

    def _legend(self) -> list[str]:
        if len(self.folders) < 2:
            return []
        return [f"{self._letter(place)}  {folder.run_id}" for place, folder in enumerate(self.folders)]

    def _letter(self, place: int) -> str:
        return MARKS[place] if len(self.folders) > 1 else ""

    def _table(self, heading: str, names: Sequence[str], width: int | None) -> list[str]:
        several = len(self.folders) > 1
        hardware = heading == "HARDWARE"
        rows: list[tuple[str, ...]] = []
        for name in names:
            for place, folder in enumerate(self.folders):
                value = self._overviews[folder.run_id].metrics.get(name)
                if value is not None:
                    rows.append((name, *([self._letter(place)] if several else []), *_cells(value, hardware)))
        if not rows:
            return []
        more = 0
        if width is not None and len(rows) > _MOST_ROWS:
            more = len(rows) - _MOST_ROWS
            rows = rows[:_MOST_ROWS]
        place_word = "AGE" if hardware else "STEP"
        headings = (heading, *(["RUN"] if several else []), "LAST", "MIN", "MAX", place_word, "POINTS")
        lines = table_lines(headings, rows, width)
        return [*lines, f"… {more} more rows: name some, or --json"] if more else lines

    def _hparams(self) -> list[str]:
        """Of one run all, of several those that differ."""
        told = [self._overviews[folder.run_id].hparams for folder in self.folders]
        names = sorted({str(name) for hparams in told for name in hparams})
        if len(told) == 1:
            parts = [f"{printable(name)}={_value(told[0][name])}" for name in names if name in told[0]]
        else:
            differing = [name for name in names if len({repr(hparams.get(name)) for hparams in told}) > 1]
            parts = [
                f"{printable(name)}: "
                + " ".join(
                    f"{self._letter(place)}={_value(hparams[name])}"
                    for place, hparams in enumerate(told)
                    if name in hparams
                )
                for name in differing
            ]
        if not parts:
            return []
        more = f", … {len(parts) - _MOST_HPARAMS} more: --json" if len(parts) > _MOST_HPARAMS else ""
        return [("hparams  " + ", ".join(parts[:_MOST_HPARAMS]) + more)]

    def _ages(self) -> list[str]:
        lines = []
        for place, folder in enumerate(self.folders):
            old = self.metrics(folder, ()).age_s()
            if old is not None:
                lines.append(f"{self._letter(place)}  newest point {age(old)} ago".lstrip())
        return lines

    def notices(self, chosen: Sequence[str], patterns: Sequence[str], most: int) -> list[str]:
        """What is not drawn, and what the runs could not keep, in words (C16, C21)."""
        drawn, own = self.to_draw(chosen, patterns, most), [name for name in chosen if not is_system(name)]
        told = []
        if not patterns and len(drawn) < len(own):
            told.append(f"curves of {len(drawn)} of {len(own)} metrics: name those you want")
        for folder in self.folders:
            of = f"{folder.run_id}: " if len(self.folders) > 1 else ""
            told += [of + printable(words) for words in loss_words(self._overviews[folder.run_id])]
        return told


def loss_words(overview: Overview) -> list[str]:
    """Why the run could not be read, and what of it was lost."""
    return ([overview.fault] if overview.fault else []) + overview.losses()


def table_lines(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """A table, its first column cut in the middle so that no row is wider than `width`.

    None: nothing is cut, and a name that is longer than others would be wide for sticks out of its own row alone.
    """
    cells = [list(headings), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(columns(row[i]) for row in cells) for i in range(len(headings))]
    if width is None:
        widths[0] = min(widths[0], _WIDEST_NAME)
    else:
        widths[0] = min(widths[0], max(_LEAST_NAME, width - sum(widths[1:]) - 2 * (len(widths) - 1)))
        for row in cells:
            row[0] = shorten(row[0], widths[0])
    return [
        "  ".join(cell + " " * (w - columns(cell)) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def _cells(value: LastValue, hardware: bool) -> tuple[str, ...]:
    texts = [
        "" if number is None else _measure(value.name, number) if hardware else number_text(number)
        for number in (value.last, value.min, value.max)
    ]
    place = age(value.age_s) if hardware else step_text(value.last_step)
    return (*texts, place, str(value.points))


def _measure(name: str, number: float) -> str:
    """A value of the hardware with the unit that its name ends with."""
    name = name.partition("@")[0]
    for ending, unit in (("_percent", " %"), ("_watts", " W"), ("_celsius", " °C")):
        if name.endswith(ending):
            return f"{number:.0f}{unit}" if math.isfinite(number) else number_text(number)
    if name.endswith(("_bytes", "_bytes_per_s")) and 0 <= number < float("inf"):
        return size(number) + ("/s" if name.endswith("_per_s") else "")
    return number_text(number)


def _value(value: object) -> str:
    text = str(value)
    return printable(shorten(text[: 4 * _LONGEST_VALUE], _LONGEST_VALUE))


def head(reader: CurveReader, states: Mapping[str, str], look: Look) -> list[str]:
    """A line on each run that is followed: state, age of its data, what was lost."""
    lines = []
    for place, folder in enumerate(reader.folders):
        run = reader.metrics(folder, ())
        old = run.age_s()
        parts = [folder.run_id, states.get(folder.run_id, "")]
        parts.append("no points yet" if old is None else f"newest point {age(old)} ago")
        lost = run.overview.dropped_points + run.overview.gaps
        parts += [f"{lost} points lost"] if lost else []
        parts += [run.overview.fault] if run.overview.fault else []
        text = shorten(printable("  ".join(part for part in parts if part), look.unicode), look.width - 3)
        if len(reader.folders) > 1:
            text = f"{styled(MARKS[place], Line((), (), colour=place), look)}  {text}"
        lines.append(text)
    return lines
