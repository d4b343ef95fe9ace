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

ENDED_LOOKS = 10
"""One look of so many asks about ended runs too: `tp job resume` and `retry` start them again."""

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
        self._ended: dict[str, int] = {}  # given out as such, after so many attempts
        self._looked_at = float("-inf")
        self._looks = 0

    def sources(self) -> list[RunSource]:
        """The runs to read now; one that has ended, once, and again where it goes on after all."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._look()
        given = [source for run_id, source in self._sources.items() if run_id not in self._ended]
        for source in given:
            if source.ended:
                self._ended[source.run_id] = self.states[source.run_id].attempts
        return given

    def _look(self) -> None:
        runs = (
            list(self._chosen) if self._chosen is not None else sorted(iterate_runs(), key=lambda r: r.run_id)
        )
        known = {run.run_id for run in runs}
        for run_id in self._sources.keys() - known:  # its folder is gone
            del self._sources[run_id]
        asked = [run for run in runs if self._looks % ENDED_LOOKS == 0 or run.run_id not in self._ended]
        self._looks += 1
        for run, state in zip(asked, read_states(asked), strict=True):
            self.states[run.run_id] = state
            if state.cleared:
                self._ended[run.run_id] = state.attempts
                continue
            if state.is_final and self._ended.get(run.run_id) == state.attempts:
                continue
            self._ended.pop(run.run_id, None)
            try:
                self._sources[run.run_id] = read_source(run, state)
                self.faults.pop(run.run_id, None)
            except TunePlaneError as error:
                self.faults[run.run_id] = "; ".join(fault.what for fault in error.faults)
            except OSError as error:
                self.faults[run.run_id] = f"job.json: {error.strerror or error}"
