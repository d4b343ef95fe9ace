"""Signals to a node agent: USR2 asks the trainer to save and end, TERM ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from tuneplane.node.process import descendants, signal_all, trainers


class StopRequest:
    """USR2 asks to save and end, by the marker; TERM and INT end the command, with a grace before KILL."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker
        self.told = False
        self._child: subprocess.Popen[bytes] | None = None
        self._grace_s = 0.0

    def listen(self) -> None:
        """Handle the signals from here on."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_end)
        signal.signal(signal.SIGUSR2, self._on_save)

    def pass_on_to(self, child: subprocess.Popen[bytes], grace_s: float) -> None:
        """From here on, signals reach this command."""
        self._child, self._grace_s = child, grace_s
        if self.told:
            self._end_child()

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        try:
            self.marker.touch()
        except OSError as error:
            print(f"tuneplane: stop marker not written: {error}", file=sys.stderr)

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        if not self.told:
            self.told = True
            self._end_child()

    def _end_child(self) -> None:
        if self._child is not None:
            signal_all(trainers([self._child.pid, *descendants(self._child.pid)]), signal.SIGTERM)
            threading.Thread(target=self._kill_later, daemon=True).start()

    def _kill_later(self) -> None:
        time.sleep(self._grace_s)
        child = self._child
        if child is not None and child.poll() is None:
            signal_all([child.pid, *descendants(child.pid)], signal.SIGKILL)
