"""Whether a run hangs: no node's log and no ingest file grows for as long as the site or the user allows.

Node 0 decides, once its command has ended the next node where one still runs, and notes it in the attempt's
folder; each agent then ends its own ranks, and asks them first where they are. The storage is looked at by a
thread of its own, which may hang there.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Callable

from tuneplane.kernel.files import create_once, json_text
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder, is_hardware_file
from tuneplane.node.pulse import Silence
from tuneplane.node.record import read_record
from tuneplane.node.signals import Signals

HEAD_BYTES = 1 << 16

_OWN = re.compile(rb"(?:\[rank\d+\]: )?tuneplane: ")
"""A line of the node agent, or of the check before training."""

LOOKS = 20
"""So many looks within the limit: it is kept to a twentieth."""

SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.2, 10.0


HUNG_WORDS = "no output and no point for"
"""How the reason of such an end begins; `diagnose` knows it by them."""


def hang_sentence(limit_s: float) -> str:
    """Why such an attempt ended."""
    return f"{HUNG_WORDS} {limit_s:g} s: it was taken to hang"


class Growth:
    """Whether what a program leaves has grown. Pure but for the clock's value that it is given.

    The clock starts with the program's first output or point: a slow start (an image, weights) is nobody's hang.
    A look adds no more than its own interval, so that an agent that was itself stopped blames nobody.
    """

    def __init__(self, interval_s: float) -> None:
        self._silence = Silence(1.5 * interval_s)
        self._known: dict[str, int] = {}
        self.begun = False

    def silent_s(self, sizes: dict[str, int], begun: bool, now: float) -> float | None:
        """Seconds without any growth; None until the program has begun to say anything."""
        if begun and (not self.begun or sizes != self._known):
            self._silence.hear()
        self.begun, self._known = self.begun or begun, sizes
        return self._silence.tick(now)


class HangWatch:
    """One node's part of it. limit_s: 0 watches nothing.

    tell, told: by the network, from node 0 to the others, which the storage may tell late.
    """

    def __init__(
        self,
        run: RunFolder,
        attempt: AttemptFolder,
        rank: int,
        limit_s: float,
        signals: Signals,
        tell: Callable[[], None],
        told: Callable[[], bool],
    ) -> None:
        self._run, self._attempt, self._rank = run, attempt, rank
        self._limit_s, self._signals = limit_s, signals
        self._tell, self._told = tell, told
        self._interval_s = min(LONGEST_LOOK_S, max(SHORTEST_LOOK_S, limit_s / LOOKS))
        self._done = threading.Event()

    def start(self) -> None:
        """Watch from here on: the command has been started."""
        if self._limit_s <= 0:
            return
        waits = (self._wait_for_word, self._wait_for_note) if self._rank else ()
        for watch in (self._watch_growth, *waits):
            threading.Thread(target=watch, name="hang", daemon=True).start()

    def stop(self) -> None:
        """The command has ended."""
        self._done.set()

    def _found(self) -> None:
        if not self._done.is_set():
            self._signals.call_hung(hang_sentence(self._limit_s))

    def _watch_growth(self) -> None:
        growth = Growth(self._interval_s)
        while not self._done.wait(self._interval_s):
            try:
                if not self._decides():
                    continue
                sizes = read_sizes(self._run, self._attempt)
                begun = growth.begun or has_begun(self._run, self._attempt)
            except OSError:
                continue
            silent_s = growth.silent_s(sizes, begun, time.monotonic())
            if silent_s is None or silent_s < self._limit_s:
                continue
            self._found()
            if self._signals.hung:
                if self._rank == 0:
                    self._tell()
                self._note(silent_s)
            return

    def _decides(self) -> bool:
        """Whether this is the first node whose command has not ended."""
        before = (read_record(self._attempt.node_record(rank)) for rank in range(self._rank))
        return all(record.get("state") in ("ending", "ended") for record in before)

    def _note(self, silent_s: float) -> None:
        """Tried until the agent ends: the other nodes may have no other way to hear of it."""
        noted = json_text({"silent_s": round(silent_s, 1), "limit_s": self._limit_s, "at": time.time()})
        while True:
            try:
                create_once(self._attempt.hang, noted)
                return
            except OSError:
                if self._done.wait(self._interval_s):
                    return

    def _wait_for_word(self) -> None:
        while not self._done.wait(SHORTEST_LOOK_S):
            if self._told():
                return self._found()
        return None

    def _wait_for_note(self) -> None:
        while not self._done.wait(self._interval_s):
            try:
                if self._attempt.hang.exists():
                    return self._found()
            except OSError:
                pass
        return None


def has_begun(run: RunFolder, attempt: AttemptFolder) -> bool:
    """Whether the program itself has printed or reported anything yet. Raises OSError."""
    if any(not is_hardware_file(p.name) for p in run.ingest.glob(f"{attempt.number}-*")):
        return True
    for path in attempt.path.glob("node-*.log"):
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if any(line.strip() and not _OWN.match(line) for line in head.split(b"\n")):
            return True
    return False


def read_sizes(run: RunFolder, attempt: AttemptFolder) -> dict[str, int]:
    """The size of every node's log of the attempt and of every file of its points, by name. Raises OSError."""
    logs = attempt.path.glob("node-*.log")
    points = (p for p in run.ingest.glob(f"{attempt.number}-*") if not is_hardware_file(p.name))
    return dict(_sizes([*logs, *points]))


def _sizes(paths: Iterable[Path]) -> Iterable[tuple[str, int]]:
    for path in paths:
        try:  # opening it makes NFS ask its server
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            yield path.name, os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
