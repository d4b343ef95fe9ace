"""What a node leaves about itself: its record, replaced by rename, and its heartbeat, written in place.

A thread of the agent writes both, so that a filesystem that stalls never holds the agent itself.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tuneplane.kernel.files import read_json, write_json
from tuneplane.kernel.runfolder import AttemptFolder

SHORTEST_BEAT_S = 0.05

RETRY_S = 0.5
"""How soon a write that failed (a full disk, a quota) is tried again."""

TOLD = "told to end\n"
"""In the stop marker where nobody asked for it, and an agent that was told to end left it for its own ranks."""

END_S = 20.0
"""How long the exit record is tried where nobody waits for this node to end."""

TOLD_END_S = 5.0
"""The same where the agent was told to end: Slurm's KillWait leaves 10 s after the trainer's own grace."""


class NodeRecord:
    """`node-<rank>.json` and `node-<rank>.beat` of one attempt. Their writer is this node's agent alone.

    interval_s: between two heartbeats. facts: what is known from the start.
    """

    def __init__(self, attempt: AttemptFolder, rank: int, interval_s: float, **facts: Any) -> None:
        self._record, self._beat = attempt.node_record(rank), attempt.node_beat(rank)
        self._marker = attempt.stop_marker
        self._interval_s = max(SHORTEST_BEAT_S, interval_s)
        self._values: dict[str, Any] = {"rank": rank, "state": "starting", **facts, "started_at": time.time()}
        self._lock = threading.Lock()  # of the values and the three below
        self._version, self._written = 1, 0
        self._ending = self._save = False
        self._because = ""
        self._news, self._done = threading.Event(), threading.Event()

    def start(self) -> None:
        """Write the record and beat from here on."""
        threading.Thread(target=self._run, name="record", daemon=True).start()

    def change(self, **values: Any) -> None:
        """Change values; returns at once. What cannot be written (a full disk) is tried again."""
        with self._lock:
            self._values.update(values)
            self._version += 1
        self._news.set()

    def ask_to_save(self, because: str = "") -> None:
        """Leave the stop marker, which the trainer looks for; returns at once. because: `TOLD`, or empty."""
        self._save, self._because = True, because
        self._news.set()

    def end(self, code: int, reason: str, told: bool, at: float) -> bool:
        """The last change, since it decides what is said of the run: tried for a while. Whether it is written."""
        self.change(state="ended", code=code, reason=reason, told_to_stop=told, ended_at=at)
        self._ending = True
        self._news.set()
        self._done.wait(TOLD_END_S if told else END_S)
        return self._written == self._version

    def _run(self) -> None:
        beat_at = time.monotonic()
        while not self._done.is_set():
            now = time.monotonic()
            if now >= beat_at:
                with suppress(OSError):
                    self._write_beat()
                # On the clock's own marks: neither a slow write nor a stall shifts or bunches later beats.
                beat_at += self._interval_s * (1 + (time.monotonic() - beat_at) // self._interval_s)
            settled = self._settle()
            if settled and self._ending and self._written == self._version:
                self._done.set()
                return
            left_s = max(0.0, beat_at - time.monotonic())
            self._news.wait(left_s if settled else min(RETRY_S, left_s))
            self._news.clear()

    def _settle(self) -> bool:
        """Write what is not written yet; whether all of it is."""
        with self._lock:
            version, values = self._version, dict(self._values)
        settled = True
        if version != self._written:
            try:
                write_json(self._record, values)
                self._written = version
            except OSError as error:
                if self._ending and self._write_in_place(values):
                    self._written = version
                else:
                    settled = False
                    if self._ending and isinstance(error, FileNotFoundError):  # the whole folder is gone
                        self._done.set()
        if self._save:
            try:
                with self._marker.open("a", encoding="ascii") as marker:
                    if marker.tell() == 0:
                        marker.write(self._because)
                self._save = False
            except OSError:
                settled = False
        return settled

    def _write_in_place(self, values: dict[str, Any]) -> bool:
        """Over the blocks that the record has already, since a full disk has no room for a second file."""
        data = json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n"
        try:
            descriptor = os.open(self._record, os.O_WRONLY)
        except OSError:
            return False
        try:
            status = os.fstat(descriptor)
            if len(data) > max(status.st_size, status.st_blocks * 512):  # stat(2): blocks of 512 bytes
                return False
            data = data[:-1].ljust(status.st_size - 1) + b"\n"
            return os.pwrite(descriptor, data, 0) == len(data)
        except OSError:
            return False
        finally:
            os.close(descriptor)

    def _write_beat(self) -> None:
        descriptor = os.open(self._beat, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, f"{time.time():.3f}\n".encode(), 0)
        finally:
            os.close(descriptor)


def was_asked(marker: Path) -> bool:
    """Whether somebody asked the run to save and end, by its stop marker."""
    try:
        return marker.read_text(encoding="ascii", errors="replace") != TOLD
    except OSError:
        return False


def read_record(path: Path) -> dict[str, Any]:
    """A JSON object of an attempt's folder; empty where there is none, or a broken one."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
