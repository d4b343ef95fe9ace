"""What a node agent is told from outside: TERM, INT and HUP end it, USR2 asks the trainer to save and end.

Read in the agent's own loop, never in a handler, so that a signal finds it in no half-done step.
"""

from __future__ import annotations

import os
import select
import signal
from types import FrameType

ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class Signals:
    """Signals as facts. `told`: asked to end. `save`: asked to save and end, until somebody sets it back."""

    def __init__(self) -> None:
        self.told = False
        self.save = False
        self._read = self._write = -1

    def listen(self) -> None:
        """Handle the signals from here on. In the main thread, once."""
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # The C part of a handler writes the number here, whichever thread the kernel picked.
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # USR1 too: it would end the agent, and with it a trainer that it was meant for (`scancel --signal=USR1`).
        for number in (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
            signal.signal(number, _noted)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until any signal comes, the end of a child too, at most `timeout_s`; note what it says."""
        select.select([self._read], [], [], timeout_s)
        try:
            numbers = os.read(self._read, 4096)
        except BlockingIOError:
            return
        self.told = self.told or any(number in ENDING for number in numbers)
        self.save = self.save or signal.SIGUSR2 in numbers


def _noted(number: int, frame: FrameType | None) -> None:
    """Something must be set as the handler; the pipe has the number already."""
