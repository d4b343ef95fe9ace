"""One process's reporting session: counts steps, turns calls into lines, and flushes when the process ends.

Opened by `tuneplane.report` in a job, on the reporting rank alone; its Writer does everything that can wait.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time

from tuneplane.report import lines
from tuneplane.report.forks import imports
from tuneplane.report.hparams import known_secrets, plain
from tuneplane.report.stderr import say
from tuneplane.report.values import flatten, mean
from tuneplane.report.writer import Writer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from tuneplane.report.hardware.monitor import Monitor
    from tuneplane.report.ingest import Ingest

FLUSH_S = 2.0
"""How long `finish` and the end of the process wait for what is queued."""

HARDWARE_FLUSH_S = 0.2
"""Of that, what the last sample of hardware may take."""

_INT64 = 1 << 63


class Session:
    """Everything is counted, nothing raises for a bad value; `tuneplane.report` catches what is left."""

    def __init__(self, ingest: Ingest) -> None:
        started_s = time.time()
        host = os.uname().nodename
        header = lines.header_line(ingest, host, os.getpid(), started_s)
        self.writer = Writer(f"{ingest.folder.rstrip('/')}/{file_name(ingest, host)}", header)
        self._ingest = ingest
        self._monitor: Monitor | None = None
        self._hardware_writer: Writer | None = None  # of the monitor before
        self._steps = threading.RLock()
        self._next_step: int | float = 0
        self._hparams: dict[str, Any] = {}
        self._ending = False
        self._end_deadline = 0.0
        self._said_left = False
        _flush_at_end(self)

    def start(self, hparams: Any, monitor_hardware: bool, resume_step: Any) -> None:
        """What `init` was told beyond opening: hparams not yet known, where this attempt took up again."""
        if sys.is_finalizing():
            return
        if monitor_hardware:
            self._start_monitor()
        if resume_step is not None:
            step = storable_step(resume_step)
            if step is not None:
                self._put(lines.resume_body(time.time(), step))
        if hparams is not None:
            new = plain(hparams, known_secrets(os.environ))
            if any(key not in self._hparams or self._hparams[key] != value for key, value in new.items()):
                self._hparams.update(new)
                self._put(lines.hparams_body(time.time(), new))

    def log(self, metrics: Any, step: Any, prefix: Any) -> None:
        """One point of all that can be reduced to numbers."""
        if sys.is_finalizing():  # past all endings the thread stands still, perhaps with the queue's lock
            return
        now_s = time.time()
        if not hasattr(metrics, "items"):
            self._drop_point(
                f"log() takes a mapping of names to numbers, not {_shown(metrics)}: it was dropped"
            )
            return
        if step is not None and (type(step) is not int or not -_INT64 <= step < _INT64):
            given, step = step, storable_step(step)
            if step is None:
                self._drop_point(f"step {_shown(given)} is no 64-bit number: its point was dropped")
                return
        flat = flatten(metrics, prefix)
        if flat.dropped:
            self._drop_values(flat.dropped)
        with self._steps:
            if step is None:
                step = self._next_step
            if step >= self._next_step:
                self._next_step = int(step) + 1
            if flat.numbers:
                self._put_point(now_s, step, flat.numbers)

    def finish(self) -> None:
        """Wait for the queue, at most two seconds, and close the file."""
        if sys.is_finalizing():
            return
        self._end_monitor(0.0)
        if not self.writer.flush(FLUSH_S):
            self._say_left()
        self.writer.close()

    def at_end(self) -> None:
        """The process is ending: flush, and from now on let each call flush in what is left of the two seconds."""
        if not self._ending:
            self._ending = True
            self._end_deadline = time.monotonic() + FLUSH_S
            self._end_monitor(HARDWARE_FLUSH_S)
        if not self.writer.flush(max(0.0, self._end_deadline - time.monotonic())):
            self._say_left()

    def count_lost_call(self) -> None:
        """A call that failed as a whole."""
        self._drop_point("a reporting call failed: its point was dropped")

    def _start_monitor(self) -> None:
        with imports:
            from tuneplane.report.hardware import start_monitor
        with self._steps:
            if self._monitor is None:
                self._monitor = start_monitor(self._ingest, os.environ, self._hardware_writer)

    def _end_monitor(self, wait_s: float) -> None:
        if self._monitor is not None:
            from tuneplane.report.hardware import end_monitor

            end_monitor(self._monitor, wait_s)
            self._hardware_writer = self._monitor.writer
            self._monitor = None

    def _put_point(self, now_s: float, step: int | float, numbers: dict[str, Any]) -> None:
        """One line, or several where one would be too long: ten thousands of names in a call."""
        body = lines.point_body(now_s, step, numbers)
        if len(body) <= lines.MAX_LINE_BYTES or len(numbers) == 1:
            self._put(body)
            return
        names = list(numbers)
        for half in (names[: len(names) // 2], names[len(names) // 2 :]):
            self._put_point(now_s, step, {name: numbers[name] for name in half})

    def _put(self, body: str) -> None:
        self.writer.put(body)
        if self._ending:
            self.at_end()

    def _drop_point(self, why: str) -> None:
        self.writer.count_dropped(points=1)
        self.writer.tell_once("point", f"{why}; training goes on, further ones are only counted")

    def _drop_values(self, names: list[str]) -> None:
        self.writer.count_dropped(values=len(names))
        self.writer.tell_once(
            "value",
            f"{names[0]} has no mean and was dropped; training goes on, further ones are only counted",
        )

    def _say_left(self) -> None:
        left = self.writer.unsafe_lines()
        if left and not self._said_left:
            self._said_left = True
            why = self.writer.last_error() or "the file system does not answer"
            say(f"{left} points could not be written to {self.writer.path}: {why}")


def file_name(ingest: Ingest, host: str, writer: str = "") -> str:
    """`<attempt>-<host>-<rank>-<pid>-<random>.jsonl`: the random end because containers and hosts reuse pids.

    writer: what stands in the rank's place where it is no trainer's.
    """
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "._") else "_" for c in host)[:64] or "_"
    return f"{ingest.attempt}-{safe}-{writer or ingest.rank}-{os.getpid()}-{os.urandom(3).hex()}.jsonl"


def storable_step(step: Any) -> int | float | None:
    """A step as a 64-bit int, or a float where it is fractional; None where it is no finite number."""
    try:
        number = mean(step)
    except Exception:  # whatever a stranger's object raises: it is no step
        return None
    if number - number != 0.0 or not -_INT64 <= number < _INT64:
        return None
    return int(number) if number == int(number) else number


def _flush_at_end(session: Session) -> None:
    """Have `session` flushed when this process ends: by atexit, and in a forked worker, which ends past atexit, by
    multiprocessing's own finalizers."""
    atexit.register(_end, os.getpid(), session)
    if not threading.main_thread().is_alive():  # the interpreter is ending already, atexit takes no more
        session._ending = True
        session._end_deadline = time.monotonic() + FLUSH_S
    workers = sys.modules.get("multiprocessing.util")
    processes = sys.modules.get("multiprocessing.process")
    if workers is not None and processes is not None and processes.parent_process() is not None:
        workers.Finalize(None, _end, args=(os.getpid(), session), exitpriority=0)


def _end(pid: int, session: Session) -> None:
    try:
        if os.getpid() == pid:  # a forked child inherits this registration, but not the session's thread
            session.at_end()
    except Exception:  # the program's own ending comes first (C16)
        return


def _shown(value: Any) -> str:
    """A stranger's value in a message."""
    try:
        text = repr(value)
    except Exception:  # its own repr may fail
        text = type(value).__name__
    return text if len(text) <= 80 else text[:79] + "…"
