"""A run's points as rows, and rows as CSV or JSON lines. For `export-metrics` and `metrics --csv` of `tp job`."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, NamedTuple

from tuneplane.collect.printable import cell
from tuneplane.collect.series import Series


class Row(NamedTuple):
    """One point. time_s: unix time. hidden: a later attempt did its step anew, so the merged line has it not."""

    run_id: str
    metric: str
    attempt: int
    step: float
    value: float
    time_s: float
    hidden: bool


COLUMNS = ("run_id", "metric", "attempt", "step", "value", "time", "hidden")


def rows(run_id: str, series: Mapping[str, Series], hidden: bool = False) -> Iterator[Row]:
    """Points metric by metric, by step; with `hidden` those of earlier attempts that were done anew too."""
    for name, line in series.items():
        for attempt, step, value, time_s in points(line, hidden):
            yield Row(run_id, name, attempt[0], step, value, time_s, attempt[1])


def points(line: Series, hidden: bool) -> Iterator[tuple[tuple[int, bool], float, float, float]]:
    """(attempt, whether hidden), step, value, time of each point; by attempt where hidden ones come along."""
    merged = zip(
        ((attempt, False) for attempt in line.attempts), line.steps, line.values, line.times_s, strict=True
    )
    if not hidden or not line.hidden:
        yield from merged
        return
    everything = list(merged)
    for attempt, points in line.hidden.items():
        everything += (
            ((attempt, True), *point)
            for point in zip(points.steps, points.values, points.times_s, strict=True)
        )
    yield from sorted(everything, key=lambda point: (point[0][0], point[1]))


def number(value: float) -> str:
    """A number in full: whole ones without a point, `nan`, `inf` and `-inf` as Python and pandas read them."""
    return (
        str(int(value))
        if math.isfinite(value) and value == int(value) and abs(value) < 2**53
        else repr(value)
    )


def write_csv(some: Iterable[Row], file: IO[str], headed: bool = True) -> int:
    """One line a point below a line of headings; how many points. No name is a formula to a spreadsheet."""
    writer = csv.writer(file, lineterminator="\n")
    if headed:
        writer.writerow(COLUMNS)
    clean = _remembered(cell)
    count = 0
    for row in some:
        writer.writerow(
            (
                *(clean(row.run_id), clean(row.metric), row.attempt, number(row.step)),
                *(number(row.value), f"{row.time_s:.6f}", int(row.hidden)),
            )
        )
        count += 1
    return count


def write_jsonl(some: Iterable[Row], file: IO[str]) -> int:
    """One JSON object a line; how many points. Values that JSON has no number for are `"NaN"`, `"Infinity"`."""
    count = 0
    quoted = _remembered(json.dumps)
    for row in some:
        file.write(
            f'{{"run_id":{quoted(row.run_id)},"metric":{quoted(row.metric)},"attempt":{row.attempt},'
            f'"step":{number(row.step)},"value":{json.dumps(json_number(row.value))},'
            f'"time":{row.time_s:.6f},"hidden":{"true" if row.hidden else "false"}}}\n'
        )
        count += 1
    return count


def json_number(value: float) -> float | int | str:
    """`value` as strict JSON can hold it; NaN and infinities as the words that wandb and protobuf use."""
    if math.isfinite(value):
        return int(value) if value == int(value) and abs(value) < 2**53 else value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _remembered(clean: Callable[[str], str]) -> Callable[[str], str]:
    """Names come again with every point."""
    known: dict[str, str] = {}

    def call(text: str) -> str:
        found = known.get(text)
        if found is None:
            found = known[text] = clean(text)
        return found

    return call
