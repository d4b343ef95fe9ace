"""Which runs' metrics are to be read now: all of a user's, or some, as they come and end. For `tp collect`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tuneplane.collect.source import RunSource
from tuneplane.kernel.errors import TunePlaneError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.runs.index import iterate_runs
from tuneplane.runs.sources import read_source
from tuneplane.runs.state import RunState, read_states

LOOK_S = 30.0
"""How often new runs are looked for, and Slurm is asked for the states of those that have not ended."""


class FollowedRuns:
    """Runs and what a reader of their metrics must know of them.

    chosen: these alone; None for all of the user's.
    states: as known by now, by run id. faults: why a run cannot be read at all.
    """

    def __init__(self, chosen: Sequence[RunFolder] | None = None) -> None:
        self.states: dict[str, RunState] = {}
        self.faults: dict[str, str] = {}
        self._chosen = chosen
        self._sources: dict[str, RunSource] = {}
        self._ended: set[str] = set()  # and given out as such
        self._looked_at = float("-inf")

    def sources(self) -> list[RunSource]:
        """The runs to read now; one that has ended for the last time, once."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._look()
        given = [source for run_id, source in self._sources.items() if run_id not in self._ended]
        self._ended.update(source.run_id for source in given if source.ended)
        return given

    def _look(self) -> None:
        runs = (
            list(self._chosen) if self._chosen is not None else sorted(iterate_runs(), key=lambda r: r.run_id)
        )
        open_runs = [run for run in runs if run.run_id not in self._ended]
        for run, state in zip(open_runs, read_states(open_runs), strict=True):
            self.states[run.run_id] = state
            if state.cleared:
                self._ended.add(run.run_id)
                continue
            try:
                self._sources[run.run_id] = read_source(run, state)
                self.faults.pop(run.run_id, None)
            except TunePlaneError as error:
                self.faults[run.run_id] = "; ".join(fault.what for fault in error.faults)
            except OSError as error:
                self.faults[run.run_id] = f"job.json: {error.strerror or error}"
