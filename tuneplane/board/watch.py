"""What the board knows of all runs by now: states, in one thread, and metrics, in another. Called by `app`.

Neither reads while nobody looks. Requests read what is there, or wait for a thread, never for the storage itself.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from tuneplane.board import wire
from tuneplane.board.lines import View, draw
from tuneplane.board.worker import Worker
from tuneplane.collect.overview import Overview
from tuneplane.collect.store import Store
from tuneplane.kernel.errors import TunePlaneError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.runs.index import iterate_runs, started_order
from tuneplane.runs.sources import read_source
from tuneplane.runs.state import RunState, read_states

STATES_S = 4.0
"""Between two looks at the states, each of which may ask squeue once."""

QUIET_S = 15.0
"""How long after the last request nothing is read any more. An open page asks every two seconds."""

RUNNING_S = 3.0
"""How old the metrics of a run that still runs may get while nobody looks at that run."""

FRESH_S = 0.5
"""Metrics younger than this are not read again for a request."""

SETTLED_S = 60.0
"""How often a run that has ended is looked at again: it may be started anew, on another login node."""


@dataclass(frozen=True)
class Listed:
    """A run as it was last seen."""

    folder: RunFolder
    state: RunState


@dataclass(frozen=True)
class States:
    """All runs, newest first, as of `read_at`; 0 before the first look. fault: why the last look failed."""

    runs: tuple[Listed, ...] = ()
    read_at: float = 0.0
    fault: str = ""


@dataclass
class Known:
    """What is known of one run's metrics. `stamp` changes whenever `overview` may have."""

    read_at: float = 0.0
    tried_at: float = 0.0
    was_final: bool = False
    stamp: str = ""
    overview: Overview = field(default_factory=Overview)
    origin_s: float | None = None  # when the run first started
    names: dict[str, str] = field(default_factory=dict)  # metric ids → names


@lru_cache(maxsize=1 << 16)
def metric_id(name: str) -> str:
    """A metric's name in addresses: short, whatever it is called."""
    return hashlib.blake2s(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class Watch:
    """The runs of some storage roots, and further run folders.

    open_store: makes the store, in the thread that alone uses it.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        roots: list[Path] | None = None,
        further: Iterable[RunFolder] = (),
    ) -> None:
        self._roots, self._further = roots, tuple(further)
        self._states = States()
        self._looked: dict[Path, tuple[float, tuple[int, ...], Listed]] = {}
        self._known: dict[str, Known] = {}
        self._asked_at = 0.0
        self._looked_once = False
        self._open_store = open_store
        self._store: Store | None = None
        self._states_worker = Worker("board-states", self._look)
        self._metrics_worker = Worker("board-metrics", self._read_one)

    def close(self, timeout_s: float = 2.0) -> None:
        """Let go of the store, where the storage does not hang."""
        self._asked_at = 0.0
        self._metrics_worker.ask(self._close_store)
        self._metrics_worker.end(timeout_s)
        self._states_worker.end(0.1)

    def touch(self) -> None:
        """Somebody looks: read on."""
        self._asked_at = time.monotonic()

    def states(self) -> States:
        """All runs as last seen; it waits for nothing."""
        return self._states

    def notice(self) -> str:
        """Why nothing of what is read is kept on this machine's disk; empty where it is."""
        store = self._store
        return store.notice if store is not None else ""

    def run(self, run_id: str) -> Listed | None:
        """The run of this id, None where there is none."""
        return next((listed for listed in self._states.runs if listed.state.run_id == run_id), None)

    def known(self, run_id: str) -> Known:
        """Its metrics as last read."""
        return self._known.get(run_id, Known())

    def fresh(self, run_ids: Sequence[str]) -> Future[list[Known]]:
        """The metrics of these runs, read anew where they are older than `FRESH_S`."""
        return self._metrics_worker.ask(lambda: [self._fresh(run_id) for run_id in run_ids])

    def block(self, run_ids: Sequence[str], metrics: Sequence[str], view: View) -> Future[bytes]:
        """The lines of these metrics (by id) of these runs, as `wire.block` writes them."""
        return self._metrics_worker.ask(lambda: self._block(run_ids, metrics, view))

    def table(self, run_ids: Sequence[str], metrics: Sequence[str]) -> Future[list[tuple[str, str, object]]]:
        """All points of these metrics: (run id, metric's name, Series)."""

        def read() -> list[tuple[str, str, object]]:
            found: list[tuple[str, str, object]] = []
            for run_id in run_ids:
                names = self._fresh(run_id).names
                wanted = [names[metric] for metric in metrics if metric in names]
                series = self._opened().series(run_id, wanted) if wanted else {}
                found += [(run_id, name, line) for name, line in series.items()]
            return found

        return self._metrics_worker.ask(read)

    # The thread of states

    def _is_quiet(self) -> bool:
        return time.monotonic() - self._asked_at > QUIET_S

    def _look(self) -> float:
        if self._is_quiet() and self._looked_once:
            return 0.2
        begun = time.monotonic()
        try:
            self._states = States(self._read_states(), time.time())
        except Exception as error:  # whatever it is, the board goes on with what it knows
            self._states = States(self._states.runs, self._states.read_at, f"runs cannot be read: {error}")
        self._looked_once = True
        return max(STATES_S, 4 * (time.monotonic() - begun))  # a slow storage is not asked all the time

    def _read_states(self) -> tuple[Listed, ...]:
        folders = {run.path: run for run in (*iterate_runs(self._roots), *self._further)}
        now = time.monotonic()
        signs = {path: _signs(run) for path, run in folders.items()}
        stale = [run for path, run in folders.items() if self._is_stale(path, signs[path], now)]
        for run, state in zip(stale, read_states(stale), strict=True):
            self._looked[run.path] = (now, signs[run.path], Listed(run, state))
        for path in self._looked.keys() - folders.keys():
            del self._looked[path]
        listed = {one.state.run_id: one for _, _, one in self._looked.values()}
        return tuple(sorted(listed.values(), key=lambda one: started_order(one.folder), reverse=True))

    def _is_stale(self, path: Path, signs: tuple[int, ...], now: float) -> bool:
        if path not in self._looked:
            return True
        at, before, listed = self._looked[path]
        return not listed.state.is_final or signs != before or now - at > SETTLED_S

    # The thread of metrics

    def _opened(self) -> Store:
        if self._store is None:
            self._store = self._open_store()
        return self._store

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()

    def _read_one(self) -> float:
        """Read the run whose metrics are most overdue, so that requests never wait for more than one."""
        if self._is_quiet():
            return 0.2
        now = time.monotonic()
        due = [one for one in self._states.runs if self._is_due(one, now)]
        if not due:
            return 0.2
        run_id = min(due, key=lambda one: self.known(one.state.run_id).tried_at).state.run_id
        try:
            self._fresh(run_id)
        except Exception as error:  # a fault of the store's: told with the run, tried again later
            known = self._known.setdefault(run_id, Known())
            known.overview, known.stamp = Overview(fault=str(error)), f"fault-{now}"
        return 0.0

    def _is_due(self, listed: Listed, now: float) -> bool:
        known = self.known(listed.state.run_id)
        if known.was_final and listed.state.is_final:
            return False
        return known.tried_at == 0.0 or now - known.tried_at > RUNNING_S

    def _fresh(self, run_id: str) -> Known:
        listed = self.run(run_id)
        if listed is None:
            return Known()
        now = time.monotonic()
        known = self._known.setdefault(run_id, Known())
        if known.tried_at and (now - known.tried_at < FRESH_S or (known.was_final and listed.state.is_final)):
            return known
        known.tried_at = now
        origin_s = known.origin_s
        try:
            source = read_source(listed.folder, listed.state)
            first = source.attempts[0][1] if source.attempts else None
            origin_s = first or listed.state.started_at or listed.state.submitted_at
            self._opened().refresh([source])
            overview = self._opened().overview(run_id)
        except (OSError, TunePlaneError) as error:
            overview = Overview(fault=str(error))
        names = {metric_id(name): name for name in overview.metrics}
        # Replaced as a whole: requests read it in another thread.
        self._known[run_id] = Known(
            read_at=time.time(),
            tried_at=now,
            was_final=listed.state.is_final and not overview.fault,
            stamp=_stamp(overview, known),
            overview=overview,
            origin_s=origin_s,
            names=names,
        )
        return self._known[run_id]

    def _block(self, run_ids: Sequence[str], metrics: Sequence[str], view: View) -> bytes:
        found = []
        for run_id in run_ids:
            known = self._fresh(run_id)
            wanted = {known.names[metric]: metric for metric in metrics if metric in known.names}
            for name, series in self._opened().series(run_id, wanted).items() if wanted else ():
                lines = draw(series, view, known.origin_s or 0.0)
                found += [(run_id, wanted[name], line) for line in lines]
        return wire.block(found)


def _signs(run: RunFolder) -> tuple[int, ...]:
    """What changes in a run folder when it is started or cleared."""
    found = []
    for path in (run.path, run.submissions, run.attempts_folder):
        try:
            found.append(path.stat().st_mtime_ns)
        except OSError:
            found.append(0)
    return tuple(found)


def _stamp(overview: Overview, before: Known) -> str:
    """The former stamp where nothing but ages changed."""
    then, now = before.overview, overview
    same = before.stamp and (
        {name: (v.points, v.hidden, v.last) for name, v in then.metrics.items()}
        == {name: (v.points, v.hidden, v.last) for name, v in now.metrics.items()}
        and (then.newest_s, then.gaps, then.dropped_points, then.dropped_values, then.torn_lines, then.fault)
        == (now.newest_s, now.gaps, now.dropped_points, now.dropped_values, now.torn_lines, now.fault)
        and then.hparams == now.hparams
        and (then.refused, then.skipped, then.unreadable) == (now.refused, now.skipped, now.unreadable)
    )
    return before.stamp if same else f"{time.monotonic_ns():x}"
