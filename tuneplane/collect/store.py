"""The metrics of many runs, read incrementally. For `tp job metrics`, `tp collect`, the board and exports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tuneplane.collect.metrics import Collector, LastValue, last_values
from tuneplane.collect.series import Series
from tuneplane.collect.source import RunSource
from tuneplane.kernel.errors import TunePlaneError


@dataclass(frozen=True)
class Overview:
    """What a run has reported by now, without its points.

    metrics: by name; where several ranks report one metric, those above the lowest are named `loss@rank3`.
    hparams: of all attempts, later ones win.
    dropped_points, dropped_values: what the job says it could not report (a full queue; a value without a mean).
    gaps: points that were numbered but are not in the files; torn_lines: lines there that are none.
    refused, skipped, unreadable: files that were not read, and why.
    attempts: those that reported anything. newest_s: wall time of the newest point, None without points.
    fault: why the run could not be read at all; empty where it could.
    """

    metrics: Mapping[str, LastValue] = field(default_factory=dict)
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
    fault: str = ""


class Store:
    """What was read of runs by now. A run that was never refreshed has nothing."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._collectors: dict[str, Collector] = {}
        self._faults: dict[str, str] = {}

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all that was read."""
        self._collectors.clear()

    def refresh(self, sources: Iterable[RunSource]) -> None:
        """Read what is new of each run. A run that cannot be read says so in its overview's `fault`."""
        for source in sources:
            collector = self._collectors.get(source.run_id)
            if collector is None:
                collector = Collector(source.folder, source.run_id, source.token_sha256)
                self._collectors[source.run_id] = collector
            try:
                collector.refresh()
                self._faults.pop(source.run_id, None)
            except TunePlaneError as error:
                self._faults[source.run_id] = str(error)

    def overview(self, run_id: str) -> Overview:
        """All but the points."""
        collector = self._collectors.get(run_id)
        if collector is None:
            return Overview(fault=self._faults.get(run_id, ""))
        m = collector.metrics()
        return Overview(
            metrics={value.name: value for value in last_values(m)},
            hparams=m.hparams,
            dropped_points=m.dropped_points,
            dropped_values=m.dropped_values,
            gaps=m.gaps,
            torn_lines=m.torn_lines,
            refused=m.refused,
            skipped=m.skipped,
            unreadable=m.unreadable,
            attempts=m.attempts,
            newest_s=m.newest_s,
            fault=self._faults.get(run_id, ""),
        )

    def series(self, run_id: str, names: Iterable[str]) -> dict[str, Series]:
        """The merged line of each of these metrics; names that the run has not are left out."""
        collector = self._collectors.get(run_id)
        if collector is None:
            return {}
        have = collector.metrics().series
        return {name: have[name] for name in names if name in have}
