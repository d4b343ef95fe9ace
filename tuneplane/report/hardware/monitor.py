"""The thread that samples hardware and the file that it writes: one of a job from the SDK, or one a node.

Started by `tuneplane.report.hardware` for the SDK and by the node agent. Nobody waits for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from tuneplane.report import lines
from tuneplane.report.ingest import Ingest
from tuneplane.report.session import file_name
from tuneplane.report.signals import block_signals
from tuneplane.report.writer import Writer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tuneplane.report.hardware.sampler import Sampler

INTERVAL = "TUNEPLANE_JOB_MONITOR_INTERVAL"
DEFAULT_INTERVAL_S = 10.0
SHORTEST_S, LONGEST_S = 1.0, 86_400.0
"""Steps are whole seconds; and who says more than a day has mistaken the unit."""

FIRST_S = 1.0
"""The first sample comes early: a short run has one too, and a user sees at once that it works."""

FIRST_RANK = 1 << 20
"""Node n writes as rank FIRST_RANK + n: above all trainers' ranks, whose own names stay as they are."""

CAPACITY_BYTES = 1 << 20
"""What may wait in memory while the disk does not take it: some hours."""


class Monitor:
    """Samples from `start` to `stop`.

    ingest: where the trainer reports to. wanted: the interval that the environment asks for, in seconds; empty
    for the default, which is also taken, and said, where it names none. writer: that of an earlier Monitor of this
    process: each has a thread and a file, and a process may train hundreds of times.
    """

    def __init__(
        self, ingest: Ingest, node: int, sampler: Sampler, wanted: str = "", writer: Writer | None = None
    ) -> None:
        self.writer = writer or open_writer(ingest, node)
        self._sampler = sampler
        self._ended = threading.Event()
        self._interval_s = DEFAULT_INTERVAL_S
        interval_s = read_interval_s(wanted)
        if interval_s is not None:
            self._interval_s = interval_s
        elif wanted:
            self.writer.tell_once(
                "interval",
                f"{INTERVAL} is {wanted[:80]!r}, no number of seconds from {SHORTEST_S:.0f} to {LONGEST_S:.0f}:"
                f" hardware is sampled every {DEFAULT_INTERVAL_S:.0f} s",
            )

    def start(self) -> bool:
        """Start the thread; False where there is none to be had."""
        thread = threading.Thread(target=self._serve, name="tuneplane-hardware", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # a limit on threads, or the interpreter ends
            return False
        return True

    def stop(self, wait_s: float = 0.0) -> None:
        """End sampling. wait_s: how long at most to wait for what was sampled to be in the file."""
        self._ended.set()
        if wait_s > 0:
            self.writer.flush(wait_s)
        self.writer.close()

    def _serve(self) -> None:
        block_signals()
        pause_s = min(FIRST_S, self._interval_s)
        self._take()  # what rates are reckoned from
        while not self._ended.wait(pause_s) and not sys.is_finalizing():
            pause_s = self._interval_s
            numbers = self._take()
            if numbers and not self._ended.is_set():
                now_s = time.time()
                self.writer.put(lines.point_body(now_s, int(now_s), numbers))
        self._sampler.close()

    def _take(self) -> dict[str, float]:
        try:
            return self._sampler.sample()
        except Exception as error:  # sampling goes on (C16)
            self.writer.tell_once("fault", f"sampling hardware met a fault of its own ({error!r})")
            return {}


def open_writer(ingest: Ingest, node: int) -> Writer:
    """The writer of this process's hardware file; the file itself is made by the first sample."""
    own = Ingest(ingest.folder, ingest.run_id, ingest.token, ingest.attempt, FIRST_RANK + node)
    host = os.uname().nodename
    header = lines.header_line(own, host, os.getpid(), time.time())
    path = f"{own.folder.rstrip('/')}/{file_name(own, host, f'hardware{node}')}"
    return Writer(path, header, CAPACITY_BYTES)


def read_interval_s(text: str) -> float | None:
    """Seconds between samples; None where the text names none. Pure."""
    try:
        interval_s = float(text)
    except ValueError:
        return None
    return interval_s if SHORTEST_S <= interval_s <= LONGEST_S else None
