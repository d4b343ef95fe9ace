"""Forks and imports: what reporting imports late, it imports under a lock that a fork waits for.

A child that is forked while another thread imports has half of the module, and its lock, for ever. Used by
`tuneplane.report` and `stop`, for the few milliseconds of a process's first call.
"""

from __future__ import annotations

import os
from _thread import RLock

_WAIT_S = 1.0
"""How long a fork waits at most: the importing thread may itself wait for what the forking thread is importing."""


class Imports:
    """A context manager; re-entrant, since a signal handler may report while its own thread imports."""

    def __init__(self) -> None:
        self._lock = RLock()
        os.register_at_fork(before=self._wait, after_in_parent=self._go_on, after_in_child=self._renew)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _wait(self) -> None:
        self._lock.acquire(timeout=_WAIT_S)

    def _go_on(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:  # waited in vain: it is not ours
            return

    def _renew(self) -> None:
        self._lock = RLock()


imports = Imports()
