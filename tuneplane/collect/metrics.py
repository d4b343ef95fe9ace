"""All that one run has reported, read at once and kept in memory alone. For tests, and for programs of users."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from tuneplane.collect.lines import LastValue, summarise
from tuneplane.collect.overview import Overview
from tuneplane.collect.series import Series
from tuneplane.collect.source import RunSource
from tuneplane.collect.store import Store
from tuneplane.kernel.errors import Fault, OperationError

__all__ = ["LastValue", "Metrics", "last_values", "metrics_of", "read_metrics"]


@dataclass(frozen=True)
class Metrics(Overview):
    """What a run has reported by now; series: the line of each metric by name."""

    series: Mapping[str, Series] = field(default_factory=dict)

    def age_s(self, now_s: float | None = None) -> float | None:
        """Seconds since the newest point; None without points. Never below 0, whatever the clocks say."""
        if self.newest_s is None:
            return None
        return max(0.0, (time.time() if now_s is None else now_s) - self.newest_s)


def read_metrics(run_folder: Path, run_id: str, token_sha256: str) -> Metrics:
    """All that the run in `run_folder` has reported. Raises OperationError where its ingest cannot be listed."""
    with Store(memory=True) as store:
        store.refresh([RunSource(run_folder, run_id, token_sha256)])
        return metrics_of(store, run_id)


def metrics_of(store: Store, run_id: str) -> Metrics:
    """All that a store knows of a run. Raises OperationError where the run could not be read."""
    overview = store.overview(run_id)
    if overview.fault:
        raise OperationError(Fault(overview.fault))
    known = {each.name: getattr(overview, each.name) for each in fields(Overview)}
    return Metrics(**known, series=store.series(run_id, sorted(overview.metrics)))


def last_values(
    metrics: Metrics, names: Iterable[str] | None = None, now_s: float | None = None
) -> list[LastValue]:
    """The last value of each metric, by name; of `names` alone where given (unknown ones are left out)."""
    now_s = time.time() if now_s is None else now_s
    wanted = sorted(metrics.series) if names is None else [name for name in names if name in metrics.series]
    summaries = ((name, summarise(metrics.series[name])) for name in wanted)
    return [summary.told(name, now_s) for name, summary in summaries if summary is not None]
