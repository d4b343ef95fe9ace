"""What a node agent is told: TERM, INT and HUP end it, USR2 asks to save and end, fence and hang watch end it.

Read in the agent's own loop, never in a handler, so that a signal finds it in no half-done step.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from types import FrameType

ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class Signals:
    """Signals as facts.

    told: asked to end. at_once: without time to save. save: asked to save and end. cut: why this node must end
    its ranks whatever they do; empty where it need not. hung: why the attempt counts as hanging; else empty.
    """

    def __init__(self) -> None:
        self.told = self.at_once = self.save = False
        self.cut = self.hung = ""
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
        self.at_once = self.at_once or any(number in (signal.SIGINT, signal.SIGHUP) for number in numbers)
        self.save = self.save or signal.SIGUSR2 in numbers

    def cut_off(self, reason: str) -> None:
        """From another thread: end the ranks, for the first reason that is said."""
        self.cut = self.cut or reason
        self._wake()

    def call_hung(self, reason: str) -> None:
        """From another thread: the attempt makes no progress; ends it, unless somebody has asked for its end."""
        if not (self.told or self.save or self.cut or self.hung):
            self.hung = reason
            self._wake()

    def ask_to_save(self) -> None:
        """From another thread: as USR2 does."""
        if not self.save:
            self.save = True
            self._wake()

    def hurry(self) -> None:
        """From another thread: whoever asked to end leaves no time to save."""
        if not self.at_once:
            self.at_once = True
            self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # a full pipe wakes it all the same
            os.write(self._write, b"\0")


def _noted(number: int, frame: FrameType | None) -> None:
    """Something must be set as the handler; the pipe has the number already."""
