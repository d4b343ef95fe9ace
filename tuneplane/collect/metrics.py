"""All that a run has reported: series by name, hparams, what was lost, how old it is. For `tp job metrics`."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneplane.collect.points import File, Forgotten, IngestReader, Point
from tuneplane.collect.series import Points, Series, merge
from tuneplane.kernel.runfolder import RunFolder

HARDWARE = "system/"
"""Metrics of hardware samplers: their step is the time in seconds."""


@dataclass(frozen=True)
class Metrics:
    """What a run has reported by now.

    series: by metric name; where several ranks report one metric, those above the lowest are named `loss@rank3`.
    hparams: of all attempts, later ones win.
    dropped_points, dropped_values: what the job says it could not report (a full queue; a value without a mean).
    gaps: points that were numbered but are not in the files; torn_lines: lines there that are none.
    refused, skipped, unreadable: entries of the ingest folder that were not read, and why.
    attempts: those that reported anything.
    newest_s: wall time of the newest point, None without points.
    """

    series: Mapping[str, Series] = field(default_factory=dict)
    hparams: Mapping[str, Any] = field(default_factory=dict)
    dropped_points: int = 0
    dropped_values: int = 0
    gaps: int = 0
    torn_lines: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)
    attempts: tuple[int, ...] = ()
    newest_s: float | None = None

    def age_s(self, now_s: float | None = None) -> float | None:
        """Seconds since the newest point; None without points. Never below 0, whatever the clocks say."""
        if self.newest_s is None:
            return None
        return max(0.0, (time.time() if now_s is None else now_s) - self.newest_s)


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


def read_metrics(run_folder: Path, run_id: str, token_sha256: str) -> Metrics:
    """All that the run in `run_folder` has reported. Raises OperationError where its ingest cannot be listed."""
    collector = Collector(run_folder, run_id, token_sha256)
    collector.refresh()
    return collector.metrics()


def last_values(
    metrics: Metrics, names: Iterable[str] | None = None, now_s: float | None = None
) -> list[LastValue]:
    """The last value of each metric, by name; of `names` alone where given (unknown ones are left out)."""
    now_s = time.time() if now_s is None else now_s
    wanted = sorted(metrics.series) if names is None else [name for name in names if name in metrics.series]
    return [_last_value(name, metrics.series[name], now_s) for name in wanted if len(metrics.series[name])]


def _last_value(name: str, series: Series, now_s: float) -> LastValue:
    finite = [value for value in series.values if math.isfinite(value)]
    return LastValue(
        name=name,
        last=series.values[-1],
        last_step=series.steps[-1],
        min=min(finite, default=None),
        max=max(finite, default=None),
        first_step=series.steps[0],
        points=len(series),
        hidden=sum(len(points) for points in series.hidden.values()),
        attempts=len(set(series.attempts) | set(series.hidden)),
        age_s=max(0.0, now_s - max(series.times_s)),
    )


class _Columns:
    """The points of one metric from one file; `numbers` are the line numbers, mostly ascending."""

    __slots__ = ("numbers", "steps", "times_s", "values")

    def __init__(self) -> None:
        self.numbers = array("q")
        self.steps = array("d")
        self.values = array("d")
        self.times_s = array("d")


class Collector:
    """Follows one run: `refresh` reads what is new, `metrics` tells all there is."""

    def __init__(self, run_folder: Path, run_id: str, token_sha256: str) -> None:
        self._reader = IngestReader(RunFolder(run_folder).ingest, run_id, token_sha256)
        self._columns: dict[int, dict[str, _Columns]] = {}  # by source, by metric

    def refresh(self) -> int:
        """Read what is new; how many points that were. Raises OperationError as `read_metrics` does."""
        count = 0
        for item in self._reader.read_new():
            if isinstance(item, Forgotten):
                self._columns.pop(item.source, None)
            else:
                count += 1
                self._add(item)
        return count

    def _add(self, point: Point) -> None:
        columns = self._columns.setdefault(point.source, {})
        for name, value in point.values.items():
            try:
                number = float(value)
            except OverflowError:  # an int beyond floats: no writer of ours makes one
                continue
            column = columns.get(name)
            if column is None:
                column = columns[name] = _Columns()
            column.numbers.append(point.number)
            column.steps.append(point.step)
            column.values.append(number)
            column.times_s.append(point.time_s)

    def metrics(self) -> Metrics:
        """What is known by now."""
        reader = self._reader
        files = list(reader.files.values())
        newest = [max(c.times_s) for columns in self._columns.values() for c in columns.values()]
        return Metrics(
            series=self._series(),
            hparams=_hparams(files),
            dropped_points=sum(file.dropped_points for file in files),
            dropped_values=sum(file.dropped_values for file in files),
            gaps=sum(file.numbers.missing for file in files),
            torn_lines=sum(file.torn_lines for file in files),
            refused={name: file.refused for name, file in sorted(reader.files.items()) if file.refused},
            skipped=dict(sorted(reader.skipped.items())),
            unreadable=dict(sorted(reader.unreadable.items())),
            attempts=tuple(
                sorted({f.header.attempt for f in files if f.header and f.source in self._columns})
            ),
            newest_s=max(newest, default=None),
        )

    def _series(self) -> dict[str, Series]:
        files = {file.source: file for file in self._reader.files.values()}
        resumed: dict[int, float] = {}
        found: dict[str, dict[int, dict[int, list[tuple[float, _Columns]]]]] = {}  # name, rank, attempt
        for source, columns in self._columns.items():
            file = files[source]
            if file.header is None:
                continue
            attempt, rank = file.header.attempt, file.header.rank
            if file.resume_step is not None:
                resumed[attempt] = min(file.resume_step, resumed.get(attempt, file.resume_step))
            for name, column in columns.items():
                by_attempt = found.setdefault(name, {}).setdefault(rank, {})
                by_attempt.setdefault(attempt, []).append((file.header.started_s, column))
        series = {}
        for name in sorted(found):
            for index, rank in enumerate(sorted(found[name])):
                attempts = {attempt: _in_order(parts) for attempt, parts in found[name][rank].items()}
                # Hardware is by time: where training took up again hides nothing of it.
                again = {} if name.startswith(HARDWARE) else resumed
                series[name if index == 0 else f"{name}@rank{rank}"] = merge(attempts, again)
        return series


def _in_order(parts: list[tuple[float, _Columns]]) -> Points:
    """The points of one attempt in the order logged: by line number in one file, by time across several."""
    if len(parts) == 1:
        column = parts[0][1]
        numbers = column.numbers
        if all(map(int.__lt__, numbers, numbers[1:])):
            return Points(column.steps, column.values, column.times_s)
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        return Points(
            *(array("d", map(c.__getitem__, order)) for c in (column.steps, column.values, column.times_s))
        )
    rows = sorted(
        row
        for started_s, c in parts
        for row in zip(c.times_s, [started_s] * len(c.numbers), c.numbers, c.steps, c.values, strict=True)
    )
    points = Points()
    for time_s, _, _, step, value in rows:
        points.append(step, value, time_s)
    return points


def _hparams(files: list[File]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    told = [(f.header.attempt, f.header.started_s, f.hparams) for f in files if f.header and f.hparams]
    for _, _, hparams in sorted(told, key=lambda entry: entry[:2]):
        merged.update(hparams)
    return merged
