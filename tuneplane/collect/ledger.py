"""What is known of one run but its points: its columns, the lines they make, a summary of each. For `store`.

Kept beside the points, so that nothing but what is new is ever counted again.
"""

from __future__ import annotations

import json
import math
from typing import Any

from tuneplane.collect.columns import Columns
from tuneplane.collect.declared import DeclaredFile
from tuneplane.collect.lines import HARDWARE, Column, Summary, aliases_of, extended, name_lines, started
from tuneplane.collect.points import IngestFile
from tuneplane.collect.reader import Batch, RunReader
from tuneplane.collect.source import RunSource

_ColumnKey = tuple[str, int, str]  # file, attempt, metric


class Ledger:
    """One run.

    version: of what the cache holds; 0 where it holds nothing.
    stale: lines whose summaries have to be made from all their points.
    ended_at: monotonic time at which all of a run that has ended was read.
    """

    def __init__(self, source: RunSource, version: int = 0) -> None:
        self.source = source
        self.reader = RunReader(source)
        self.version = version
        self.ended_at = -math.inf
        self.columns: dict[_ColumnKey, Column] = {}
        self.summaries: dict[str, Summary | None] = {}
        self.stale: set[str] = set()
        self._aliases = aliases_of(source.metrics)
        self._lines: dict[str, list[Column]] | None = None
        self._names: dict[_ColumnKey, str] = {}
        self._resumed: dict[int, float] = {}

    def update(self, source: RunSource) -> bool:
        """What is known of the run by now: it may have ended; False where it is to be read as another one."""
        if source != self.source:
            if not self.reader.update(source):
                return False
            self.source = source
        return True

    def lines(self) -> dict[str, list[Column]]:
        """The columns of each line by name."""
        if self._lines is None:
            before, self._lines = self._names, name_lines(self.columns.values(), self._aliases)
            self._names = {
                (c.file, c.attempt, c.name): name for name, members in self._lines.items() for c in members
            }
            for key, name in self._names.items():
                if key in before and before[key] != name:
                    self.stale |= {name, before[key]}
            self.stale &= self._lines.keys()
            self.summaries = {name: s for name, s in self.summaries.items() if name in self._lines}
        return self._lines

    def add(self, batch: Batch) -> list[tuple[Column, Columns]]:
        """Count new points in; each with its column."""
        file = self.reader.files[batch.file]
        fresh: list[tuple[Column, Columns]] = []
        for (attempt, name), points in batch.points.items():
            key = (batch.file, attempt, name)
            column = self.columns.get(key)
            if column is None:
                column = self.columns[key] = _column(key, file)
                self._lines = None
            fresh.append((column, points))
        self.notice_resumed()
        latest = max(self._resumed, default=0)
        for column, points in fresh:
            self._summarise(column, points, latest)
            column.add(points)
        return fresh

    def notice_resumed(self) -> None:
        """Where a file says by now that its attempt took up again, that changes what is hidden in every line."""
        lines, resumed = self.lines(), self.resumed()
        if resumed != self._resumed:
            self._resumed = resumed
            self.stale.update(lines)

    def _summarise(self, column: Column, points: Columns, latest_resumed: int) -> None:
        name = self._names[column.file, column.attempt, column.name]
        if name in self.stale:
            return
        summary = self.summaries.get(name)
        following: Summary | None = None
        in_order = column.in_order and points.numbers[0] > column.last_number
        if in_order and column.attempt >= latest_resumed:
            if summary is not None:
                following = extended(summary, column.attempt, points)
            elif self.lines()[name] == [column] and not column.points:
                following = started(column.attempt, points)
        if following is None:
            self.stale.add(name)
        else:
            self.summaries[name] = following

    def forget(self, file: str) -> list[Column]:
        """All points of a file are void; their columns."""
        gone = [column for key, column in self.columns.items() if key[0] == file]
        for column in gone:
            key = (column.file, column.attempt, column.name)
            self.stale.add(self._names.get(key, ""))
            del self.columns[key]
        self._lines = None
        self._names = {key: name for key, name in self._names.items() if key in self.columns}
        return gone

    def resumed(self) -> dict[int, float]:
        """By attempt, the first step that it did anew, as its files say, where they hold points."""
        found: dict[int, float] = {}
        told = {
            name: file.resume_step
            for name, file in self.reader.files.items()
            if isinstance(file, IngestFile) and file.resume_step is not None
        }
        if told:
            for column in self.columns.values():
                step = told.get(column.file)
                if step is not None:
                    found[column.attempt] = min(step, found.get(column.attempt, step))
        return found

    def attempts(self) -> tuple[int, ...]:
        """Those that reported anything."""
        return tuple(sorted({column.attempt for column in self.columns.values()}))

    def newest_s(self) -> float | None:
        """Wall time of the newest point that the trainer gave: hardware goes on where training hangs."""
        trainers = [c for c in self.columns.values() if not c.name.startswith(HARDWARE)]
        newest = max((c.newest_s for c in trainers or self.columns.values()), default=-math.inf)
        return newest if newest > -math.inf else None

    def hparams(self) -> dict[str, Any]:
        """Of all attempts, later ones win."""
        merged: dict[str, Any] = {}
        files = [
            f for f in self.reader.files.values() if isinstance(f, IngestFile) and f.header and f.hparams
        ]
        for file in sorted(
            files, key=lambda f: (f.header.attempt, f.header.started_s) if f.header else (0, 0.0)
        ):
            merged.update(file.hparams)
        return merged

    def state(self) -> str:
        """As JSON text."""
        return json.dumps(
            {
                "reader": self.reader.state(),
                "columns": [
                    [c.file, c.attempt, c.name, c.key, c.points, c.in_order, c.last_number, c.newest_s]
                    for c in self.columns.values()
                ],
                "summaries": {name: s.state() if s else None for name, s in self.summaries.items()},
                "stale": sorted(self.stale),
            },
            separators=(",", ":"),
        )

    def restore(self, text: str) -> None:
        """Go on from a `state`. Raises TypeError, ValueError or LookupError where it is none of this run."""
        state = json.loads(text)
        self.reader.restore(state["reader"])
        for file, attempt, name, key, points, in_order, last_number, newest_s in state["columns"]:
            of = (str(file), int(attempt), str(name))
            column = _column(of, self.reader.files[file])
            column.key, column.points, column.in_order = int(key), int(points), bool(in_order)
            column.last_number, column.newest_s = float(last_number), float(newest_s)
            self.columns[of] = column
        self._resumed = self.resumed()
        self.lines()
        self.stale = {name for name in state["stale"] if name in self.lines()}
        self.summaries = {name: Summary.of(s) if s else None for name, s in state["summaries"].items()}


def columns_in(text: str) -> list[int]:
    """The keys of the columns that a `state` names, whatever else it says."""
    try:
        return [int(column[3]) for column in json.loads(text)["columns"] if int(column[3]) >= 0]
    except (TypeError, ValueError, LookupError):
        return []


def _column(key: _ColumnKey, file: IngestFile | DeclaredFile) -> Column:
    name, attempt, metric = key
    if isinstance(file, DeclaredFile):
        return Column(name, attempt, metric, 0, file.output, 0.0)
    header = file.header
    return Column(
        name, attempt, metric, header.rank if header else 0, "", header.started_s if header else 0.0
    )
