"""What a node leaves about itself: its record, replaced by rename, and its heartbeat, written in place."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tuneplane.kernel.files import write_json
from tuneplane.kernel.runfolder import AttemptFolder


class NodeRecord:
    """`node-<rank>.json` of one attempt. Its writer is this node's agent alone."""

    def __init__(self, attempt: AttemptFolder, rank: int, **facts: Any) -> None:
        self.path = attempt.node_record(rank)
        self.values: dict[str, Any] = {"rank": rank, "state": "starting", **facts, "started_at": time.time()}
        self.write()

    def write(self, **changes: Any) -> None:
        """Change values and replace the file. A full disk must not end the training: it is tried again."""
        self.values.update(changes)
        with suppress(OSError):
            write_json(self.path, self.values)

    def end(self, code: int, reason: str, told_to_stop: bool) -> None:
        """The last write; tried for a while, since it decides what is said of the run."""
        self.values.update(
            state="ended", code=code, reason=reason, told_to_stop=told_to_stop, ended_at=time.time()
        )
        for pause_s in (0.0, 0.5, 1.0, 2.0):
            time.sleep(pause_s)
            try:
                write_json(self.path, self.values)
            except OSError:
                continue
            return


class Heartbeat(threading.Thread):
    """Touches `node-<rank>.beat` in place every `interval_s`; a stalled filesystem stalls only this thread."""

    def __init__(self, path: Path, interval_s: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.path, self.interval_s = path, interval_s
        self._ended = threading.Event()

    def run(self) -> None:
        while True:
            with suppress(OSError):
                self._beat()
            if self._ended.wait(self.interval_s):
                return

    def stop(self) -> None:
        """End the thread; does not wait for a filesystem that stalls."""
        self._ended.set()

    def _beat(self) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, f"{time.time():.3f}\n".encode(), 0)
        finally:
            os.close(descriptor)
