"""Lines on their way to one ingest file. `put` only queues; one daemon thread does all that touches the disk.

Called by Session. What the thread cannot write it keeps, up to a bound; beyond that it is dropped and counted.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from _thread import allocate_lock

from tuneplane.kernel.filesystem import keeps_writes_back
from tuneplane.report.lines import MAX_LINE_BYTES, dropped_body, numbered
from tuneplane.report.signals import block_signals
from tuneplane.report.stderr import say

CAPACITY_BYTES = 32 << 20
"""What may wait in memory: five scalars a hundred times a second fill it in more than half an hour."""

_LINGER_S = 0.01
"""Pause between two writes: a tight loop is written in batches, and a kill costs this much and a write."""

_CHUNK_BYTES = 1 << 20
_BACK_OFF_S = (0.1, 0.2, 0.5, 1.0, 2.0)  # after the first, second, … failed try; the last one stays
_FLUSH_POLL_S = 0.002
_TELL_AFTER_S = 5.0  # a failure that heals sooner (a restarted server, a stale handle) is nobody's business
_SYNC_S = 1.0  # how long points may stay in a client's own cache (C21: visible within 5 s)
_PROVE_S = 5.0  # how often an open file is looked for under its name: a folder may be deleted, or put back
_PROVE_BYTES = 1 << 20  # and after how much
_COUNTS_S = 1.0  # how often changed counts of dropped points are written

_OPEN_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Writer:
    """One file, its queue and its thread. Threads of the trainer may all call `put` at once.

    path: the file, made by the first write; its folder must exist and is never made here.
    header: the file's first line, ASCII.
    """

    def __init__(self, path: str, header: str, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.path = path
        self._header = header.encode("ascii")
        self._capacity_bytes = capacity_bytes

        # Shared with callers, under the lock. It is re-entrant: a signal handler may log while its thread is in
        # `put`. For the same reason the thread numbers the lines: a caller could so count one number twice.
        self._lock = threading.RLock()
        self._queue: list[str] = []
        self._queue_bytes = 0
        self._dropped = (0, 0)  # points, values
        self._messages: list[str] = []
        self._told: set[str] = set()
        self._idle = False
        self._hurry = False  # someone waits in `flush`
        self._close_wanted = False

        self._bell = allocate_lock()  # locked while nothing is to be done; the idle thread sleeps on it
        self._bell.acquire()
        self._thread: threading.Thread | None = None

        # The thread's own.
        self._numbers = 0  # lines numbered so far
        self._safe_numbers = 0  # of these, lines that are safe in the file
        self._taken_bytes = 0  # taken from the queue and not yet safe
        self._dropped_told = (0, 0)  # what a line tells of the points and values dropped
        self._fd = -1
        self._unwritten = b""
        self._unsynced: list[
            bytes
        ] = []  # written, but a client's cache may lose it; empty on most file systems
        self._unproven: list[
            bytes
        ] = []  # written, but its folder may have been deleted before anyone read it
        self._unproven_bytes = 0  # of both
        self._counts_written_at = 0.0
        self._proven_at = 0.0
        self._synced_at = 0.0
        self._must_sync = False
        self._identity = (0, 0)  # of the file last opened: device and inode
        self._end = 0  # where the last write to it ended
        self._failures = 0
        self._failing_since = 0.0
        self._last_error: OSError | None = None

    # What callers use

    def put(self, body: str) -> bool:
        """Queue a line, to be numbered; False, and counted as a dropped point, where the queue is full."""
        size = len(body)
        with self._lock:
            if size > MAX_LINE_BYTES or self._queue_bytes + self._taken_bytes + size > self._capacity_bytes:
                return self._refuse(size)
            self._queue.append(body)
            self._queue_bytes += size
            idle, self._idle = self._idle, False
        if idle or self._thread is None:
            self._wake()
        return True

    def count_dropped(self, points: int = 0, values: int = 0) -> None:
        """Add to the counts that the file will hold."""
        with self._lock:
            first = self._dropped == self._dropped_told  # of later ones the thread knows already
            self._dropped = (self._dropped[0] + points, self._dropped[1] + values)
        if first or self._thread is None:
            self._wake()

    def tell_once(self, kind: str, message: str) -> None:
        """Have the thread say `message` on stderr, once for each `kind`."""
        with self._lock:
            if kind in self._told:
                return
            self._told.add(kind)
            self._messages.append(message)
        self._wake()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was put is safe in the file and all messages are said, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            counts = 1 if self._dropped != self._dropped_told else 0  # a line that is still to be made
            target = self._numbers + len(self._queue) + counts
        self._hurry = True
        self._wake()
        if self._thread is None:  # none to be had, as when the interpreter is ending: write here
            self._turn()
        while self._something_waits(target) and time.monotonic() < deadline:
            time.sleep(_FLUSH_POLL_S)
        self._hurry = False
        return not self._something_waits(target)

    def close(self) -> None:
        """Have the thread close the file once all is written. A later `put` opens it again."""
        self._close_wanted = True
        self._wake()

    def unsafe_lines(self) -> int:
        """How many lines are not yet safe in the file."""
        with self._lock:
            return self._numbers + len(self._queue) - self._safe_numbers

    def last_error(self) -> str:
        """Why the file cannot be written just now, in the system's words; empty where no call failed."""
        return os.strerror(self._last_error.errno or 0) if self._last_error else ""

    # Under the lock

    def _refuse(self, size: int) -> bool:
        self.count_dropped(points=1)
        if size > MAX_LINE_BYTES:
            self.tell_once("size", f"a point of {size} bytes is too long and was dropped; training goes on")
        else:
            why = self.last_error() or "the file system does not answer"
            self.tell_once(
                "full", f"points are being dropped: cannot write to {self.path}: {why}; training goes on"
            )
        return False

    def _something_waits(self, target: int) -> bool:
        with self._lock:
            return self._safe_numbers < target or bool(self._messages)

    def _wake(self) -> None:
        self._idle = False
        if self._thread is None:
            self._start()
        try:
            self._bell.release()
        except RuntimeError:  # it has been rung already
            return

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._serve, name="tuneplane-report", daemon=True)
            self._thread = thread
            try:
                thread.start()
            except RuntimeError:  # a limit on threads, or the interpreter ends: the next call tries again
                self._thread = None

    # The thread

    def _serve(self) -> None:
        block_signals()
        while True:
            try:
                self._turn()
                pause_s = self._pause_s()
            except Exception as error:  # a fault of ours must not end reporting, nor be silent
                self.tell_once("fault", f"reporting met a fault of its own ({error!r}); training goes on")
                pause_s = _BACK_OFF_S[-1]
            if self._failures:
                self._back_off()
            elif pause_s == _LINGER_S:
                time.sleep(pause_s)
            else:
                self._bell.acquire(timeout=pause_s)

    def _turn(self) -> None:
        """Write what there is, then say what there is to say."""
        if not self._unwritten:
            self._take()
        written = self._write_all()
        self._say_messages()
        if written and self._close_wanted and not self._unproven and not self._unsynced:
            self._close_wanted = False
            self._close()

    def _pause_s(self) -> float:
        """How long to sleep after a turn; -1 until the bell rings."""
        with self._lock:
            if self._queue or self._messages or self._hurry:
                return _LINGER_S
            self._idle = True
        if self._unsynced or self._dropped != self._dropped_told:
            return _COUNTS_S
        return _PROVE_S if self._unproven else -1

    def _back_off(self) -> None:
        """Sleep longer after each failed try, but not while someone waits in `flush`."""
        left_s = _BACK_OFF_S[min(self._failures, len(_BACK_OFF_S)) - 1]
        while left_s > 0:
            time.sleep(_BACK_OFF_S[0])
            left_s -= _BACK_OFF_S[0]
            if self._hurry:
                return

    def _take(self) -> None:
        """Move the queue over to the thread and number it, with a line of the counts where these changed."""
        now = time.monotonic()
        with self._lock:
            self._idle = False
            bodies, self._queue = self._queue, []
            self._taken_bytes += self._queue_bytes
            self._queue_bytes = 0
            due = self._hurry or now - self._counts_written_at >= _COUNTS_S
            if due and self._dropped != self._dropped_told:
                self._counts_written_at = now
                self._dropped_told = self._dropped
                bodies.append(dropped_body(time.time(), *self._dropped))
            first, self._numbers = self._numbers, self._numbers + len(bodies)
        lines = [numbered(first + index, body) for index, body in enumerate(bodies)]
        self._unwritten = "".join(lines).encode("ascii", "backslashreplace")

    def _write_all(self) -> bool:
        """Write what was taken and see it safe. False: it failed, all is kept, try again later."""
        try:
            if self._unwritten or ((self._unproven or self._unsynced) and self._fd < 0):
                self._open()
            while self._unwritten:
                self._write_some()
            self._sync()
            self._prove()
        except OSError as error:
            self._note_failure(error)
            return False
        if "stopped" in self._told and self._failures:
            self.tell_once("resumed", "reporting goes on")
        self._failures = 0
        self._last_error = None
        if not self._unproven and not self._unsynced:
            with self._lock:
                self._taken_bytes = 0
                self._safe_numbers = self._numbers
        return True

    def _write_some(self) -> None:
        data = self._unwritten
        end = len(data)
        if end > _CHUNK_BYTES:  # cut between lines, unless one line is longer than a chunk
            end = data.rfind(b"\n", 0, _CHUNK_BYTES) + 1 or end
        written = os.write(self._fd, data[:end])
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end += written
        whole = data.rfind(b"\n", 0, written) + 1
        (self._unsynced if self._must_sync else self._unproven).append(data[:whole])
        self._unproven_bytes += whole
        # A line that was cut short stands there torn: the next write ends it and gives the line again, whole.
        self._unwritten = (b"\n" if written > whole else b"") + data[whole:]

    def _sync(self) -> None:
        """Where the file system's client keeps writes back: have it send them, a second after the last time."""
        if self._unsynced and (self._hurry or time.monotonic() - self._synced_at >= _SYNC_S):
            os.fdatasync(self._fd)
            self._synced_at = time.monotonic()
            self._unproven += self._unsynced
            self._unsynced = []

    def _prove(self) -> None:
        """Forget what was written, where the file is still found under its name: only there can it be read.

        Raises OSError where it is not, as after its folder was deleted or replaced.
        """
        now = time.monotonic()
        due = self._hurry or now - self._proven_at >= _PROVE_S or self._unproven_bytes >= _PROVE_BYTES
        if not self._unproven or self._unsynced or not due:
            return
        if self._found() != self._identity:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        self._proven_at = now
        self._unproven, self._unproven_bytes = [], 0

    def _found(self) -> tuple[int, int]:
        """Which file is there under our file's name."""
        state = os.stat(self.path)  # noqa: PTH116 (pathlib costs 10 ms of import)
        return state.st_dev, state.st_ino

    def _open(self) -> None:
        """Have the file open. A new one begins with the header, and with what the former one may have lost."""
        if self._fd >= 0:
            return
        fd = os.open(self.path, _OPEN_FLAGS, 0o600)
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._fd = fd
        self._must_sync = keeps_writes_back(os.path.dirname(self.path))  # noqa: PTH120 (pathlib costs 10 ms)
        former, self._identity = self._identity, self._found()
        if self._identity != former or state.st_size < self._end:
            self._unsynced, self._unproven = self._unproven + self._unsynced, []
        self._unwritten = b"".join((*self._unsynced, self._unwritten))  # what comes twice has one number
        self._unsynced, self._unproven_bytes = [], sum(map(len, self._unproven))
        self._end, self._proven_at = state.st_size, time.monotonic()
        if state.st_size == 0:
            if not self._unwritten.startswith(self._header):
                self._unwritten = self._header + self._unwritten
        elif self._unwritten and not self._unwritten.startswith(b"\n"):  # what stands last may be torn
            self._unwritten = b"\n" + self._unwritten

    def _note_failure(self, error: OSError) -> None:
        """Keep everything, open anew next time (ESTALE, EIO), and say so once where it lasts."""
        now = time.monotonic()
        self._close()
        self._last_error = error
        if self._failures == 0:
            self._failing_since = now
        self._failures += 1
        if now - self._failing_since >= _TELL_AFTER_S:
            self.tell_once(
                "stopped",
                f"reporting has stopped: cannot write to {self.path}: {self.last_error()}; training goes on, "
                "points are kept in memory as long as they fit",
            )

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        try:
            if fd >= 0:
                os.close(fd)
        except OSError:
            return

    def _say_messages(self) -> None:
        while self._messages:
            say(self._messages[0])
            del self._messages[0]
