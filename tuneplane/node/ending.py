"""When the ranks of a node are told to end, and when they are made to: by what its agent was told.

`trainer.py` asks it in its loop.
"""

from __future__ import annotations

from tuneplane.node.signals import Signals
from tuneplane.node.silence import FENCE_GRACE_S

DUMP_S = 5.0
"""Between the signal by which hanging processes say where they are and their end: that must reach the log."""


class Ending:
    """Times of TERM and KILL on the monotonic clock; None while nothing is due.

    save_s: from the stop marker to TERM. grace_s: from TERM to KILL; where TERM came from outside, from that.
    shared: a TERM from outside reaches the ranks too (Slurm sends it to every process of a step), so that
    there is no time left to save before it.
    """

    def __init__(self, save_s: float, grace_s: float, shared: bool) -> None:
        self.term_at: float | None = None
        self.kill_at: float | None = None
        self._save_s, self._grace_s, self._shared = save_s, grace_s, shared
        self._noted: set[str] = set()

    def note(self, signals: Signals, now: float) -> bool:
        """Take in what the signals say; whether the ranks are to be asked to save, which is so once."""
        ask = (signals.save or signals.told) and self._first("ask")
        if signals.save and self._first("save"):
            self._bring_forward(term=now + self._save_s)
        if signals.told and self._first("told"):
            self._bring_forward(term=now + self._grace_s / 2, kill=now + self._grace_s)
        if signals.told and (self._shared or signals.at_once) and self._first("at once"):
            self._bring_forward(term=now)
        if signals.hung and self._first("hung"):
            self._bring_forward(term=now + DUMP_S, kill=now + DUMP_S + FENCE_GRACE_S)
        if signals.cut and self._first("cut"):
            self._bring_forward(term=now, kill=now + FENCE_GRACE_S)
        return ask

    def told_to_end(self, now: float) -> None:
        """TERM was sent."""
        self._bring_forward(kill=now + self._grace_s)

    def _first(self, what: str) -> bool:
        if what in self._noted:
            return False
        self._noted.add(what)
        return True

    def _bring_forward(self, term: float | None = None, kill: float | None = None) -> None:
        if term is not None:
            self.term_at = term if self.term_at is None else min(term, self.term_at)
        if kill is not None:
            self.kill_at = kill if self.kill_at is None else min(kill, self.kill_at)
