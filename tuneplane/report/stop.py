"""The stop marker, `TUNEPLANE_STOP_FILE`: has this run been asked to save and end? Behind `should_stop()` alone.

A daemon thread looks at the file system, because a stat on a dead mount would hold the training loop for ever.
"""

from __future__ import annotations

import os
import time
from _thread import allocate_lock, start_new_thread

from tuneplane.report.forks import imports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

STOP_FILE = "TUNEPLANE_STOP_FILE"
_LOOK_EVERY_S = 0.5
"""The file system is asked at most this often: hundreds of ranks ask, and a stop leaves tens of seconds."""

_WAIT_S = 0.2
"""How long a call waits for the thread's answer: a healthy file system needs microseconds, a loaded machine some
milliseconds. Where the mount is dead one call waits this long, and none while its question is still unanswered."""


class StopMarker:
    """What is known of one marker file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.seen = False
        self._next_look = 0.0
        self._asked = allocate_lock()  # held while nothing is asked; the thread sleeps on it
        self._answered = allocate_lock()
        self._looking = False
        self._started = False

    def ask(self) -> bool:
        """Whether the marker is there, as of at most half a second ago."""
        now = time.monotonic()
        if self.seen or now < self._next_look:
            return self.seen
        self._next_look = now + _LOOK_EVERY_S
        if self._looking:  # the last question still hangs
            return False
        if not self._started:
            self._start()
        if self._started:
            self._looking = True
            self._answered.acquire(blocking=False)
            self._asked.release()
            self._answered.acquire(timeout=_WAIT_S)
        else:
            self._look()
        return self.seen

    def _start(self) -> None:
        with imports:
            from tuneplane.report.signals import block_signals

        self._asked.acquire(blocking=False)
        try:
            start_new_thread(self._serve, (block_signals,))
            self._started = True
        except RuntimeError:  # no thread to be had: a limit, or the interpreter is ending
            self._started = False

    def _serve(self, block_signals: Callable[[], None]) -> None:
        block_signals()
        while not self.seen:
            self._asked.acquire()
            self._look()
            self._looking = False
            if self._answered.locked():
                self._answered.release()

    def _look(self) -> None:
        try:
            os.stat(self.path)  # noqa: PTH116 (pathlib costs 10 ms of import)
            self.seen = True
        except (OSError, ValueError):
            self.seen = False


class _Process:
    """The marker that this process asks for, None before it first does."""

    marker: StopMarker | None = None

    def forget(self) -> None:
        """In a forked child: the thread stayed with the parent."""
        self.marker = None


_process = _Process()
os.register_at_fork(after_in_child=_process.forget)


def should_stop() -> bool:
    """Whether the marker has appeared. Once seen, it stays so."""
    if _process.marker is None:
        path = os.environ.get(STOP_FILE)
        if not path:
            return False
        _process.marker = StopMarker(path)
    return _process.marker.ask()
