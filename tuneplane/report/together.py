"""Ending a training of many ranks after one and the same step. For `TunePlaneCallback`.

A rank that ended a step before the others would leave them waiting for it. Ranks do not vote, which would hold up
a step, and for ever where only some have the callback: rank 0 names a step ahead, the others read it in time.
"""

from __future__ import annotations

import sys
import time
from collections import deque

from tuneplane.report import should_stop
from tuneplane.report.stderr import say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LOOK_S = 0.5
"""How often a rank asks torch.distributed's store, which takes it a tenth of a millisecond."""

AHEAD_S = 2.0
"""How far ahead the last step lies, in time: every rank has asked by then."""

AHEAD_STEPS = 2
"""And in steps at least, where one takes longer than that: ranks are never more than one apart."""


SHORTEST_STEP_S = 1e-4
"""No training does ten thousand steps a second; a clock may stand still."""

RECENT_STEPS = 20
"""Of so many the fastest step counts: one with a save or an evaluation tells nothing of the next."""

FEWEST_STEPS = 3
"""Before so many have been timed, no step is named."""


class Together:
    """One training, from its begin. key: names it in the store, the same on every rank."""

    def __init__(self, key: str) -> None:
        self._ranks, self._last = f"{key}/ranks", f"{key}/last-step"
        self._store, self._rank, self._world = _store_of_ranks()
        self._last_step: int | None = None
        self._next_look = 0.0
        self._steps_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._stepped_at: float | None = None
        if self._store is not None:
            self._store.add(self._ranks, 1)

    def is_time_to_stop(self, step: int) -> bool:
        """Whether training is to end after `step`, which has just been done."""
        if self._world == 1:
            return should_stop()
        now = time.monotonic()
        if self._stepped_at is not None:
            self._steps_s.append(now - self._stepped_at)
        self._stepped_at = now
        if self._store is not None and self._last_step is None and now >= self._next_look:
            self._next_look = now + LOOK_S
            if self._rank == 0 and len(self._steps_s) >= FEWEST_STEPS and should_stop():
                self._name_last_step(step)
            if self._store is not None and self._store.check([self._last]):
                self._last_step = int(self._store.get(self._last))
        return self._last_step is not None and step >= self._last_step

    def _name_last_step(self, step: int) -> None:
        ranks = self._store.add(self._ranks, 0)
        if ranks < self._world:
            say(
                f"the run was asked to save and end; {ranks} of {self._world} ranks have TunePlaneCallback, which"
                " leaves the end to the trainer: give it to every rank"
            )
            self._store = None
            return
        fastest_s = max(min(self._steps_s), SHORTEST_STEP_S)
        self._store.set(self._last, str(step + AHEAD_STEPS + int(AHEAD_S / fastest_s)))


def _store_of_ranks() -> tuple[Any, int, int]:
    """torch.distributed's store, this rank and how many there are; None, 0 and 1 where training is one process."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None, 0, 1
    world = distributed.get_world_size()
    if world == 1:
        return None, 0, 1
    return distributed.distributed_c10d._get_default_store(), distributed.get_rank(), world
