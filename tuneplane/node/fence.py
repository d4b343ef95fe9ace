"""When a node must end its own ranks: others are silent, or a newer attempt is there (design decision 9).

The agent starts one `Fence`. It asks the network by `pulse.py` and the shared storage by a thread of its own,
which may hang there without holding up a verdict; the verdict itself goes to the agent's `Signals`.
"""

from __future__ import annotations

import math
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Callable

from tuneplane.kernel.files import create_once, json_text
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder, noted_jobs
from tuneplane.node.pulse import Pulse, Silence
from tuneplane.node.record import read_record, was_asked
from tuneplane.node.signals import Signals
from tuneplane.node.silence import ANSWER_S, BEATS_UNTIL_SILENT, CONNECT_S, silence_sentence, silent

PULSES_A_BEAT = 10
"""So many that a network which loses most of them still brings some: at a loss of 60 % all 30 of a silence are
lost once in 4 million times."""

CONTROLLER_S = 15.0
"""How long Slurm's controller may take to say that it is there."""

CONTROLLER_TRIES = 4

CONTROLLER_AWAY_S = 900.0
"""How long a node that lost others waits for a controller that is away: longer than a restart of it takes."""


class Fence:
    """The watch that one node keeps over its attempt, and over what is asked of the run meanwhile.

    start: what the claim noted of the attempt: its job, hosts and key.
    """

    def __init__(
        self,
        run: RunFolder,
        attempt: AttemptFolder,
        rank: int,
        start: Mapping[str, Any],
        heartbeat_s: float,
        signals: Signals,
        environ: Mapping[str, str],
    ) -> None:
        self._run, self._attempt, self._rank = run, attempt, rank
        self._hosts = [str(host) for host in start.get("hosts") or []]
        self._job_id = str(start.get("job_id"))
        self._beat_s, self._signals, self._environ = heartbeat_s, signals, environ
        self._limit_s = BEATS_UNTIL_SILENT * heartbeat_s
        watched = range(1, len(self._hosts)) if rank == 0 else [0]
        self._watched = set(watched if len(self._hosts) > 1 else [])
        self._beats = dict.fromkeys(self._watched, "")
        self._storage = {other: Silence(1.5 * heartbeat_s) for other in self._watched}
        self._storage_s: dict[int, float | None] = dict.fromkeys(self._watched)
        self._pulse = Pulse(
            rank,
            sorted(self._watched),
            str(start.get("address") or ""),
            int(start.get("port") or 0),
            str(start.get("claim") or ""),
            heartbeat_s / PULSES_A_BEAT,
        )
        self._looked_at: dict[int, float] = {}
        """When the storage last told of a node's heartbeat, on the monotonic clock: its thread may hang."""
        self._reached: dict[int, float] = {}
        """When the host of a node last answered a connection, on the monotonic clock."""
        self.dead: dict[int, float] = {}
        """The nodes that this one found silent, and for how many seconds."""
        self._done = threading.Event()
        self._look = threading.Event()

    def start(self) -> None:
        """Watch from here on."""
        if self._watched:
            self._pulse.start()
        for name, watch in (("fence", self._watch_nodes), ("look", self._watch_storage)):
            threading.Thread(target=watch, name=name, daemon=True).start()

    def stop(self) -> None:
        """This node's command has ended: no verdict from here on. Where it did so by itself, others are told."""
        if not self._signals.cut:
            self._pulse.say_ended()
        self._done.set()
        self._look.set()

    def look_now(self) -> None:
        """Something was asked of the run: see at once by whom."""
        self._look.set()

    def tell_hung(self) -> None:
        """Tell the other nodes that the attempt hangs, as long as this one is there. Of node 0."""
        self._pulse.hung = True

    def told_hung(self) -> bool:
        """Whether node 0 said so."""
        return self._pulse.told_hung

    def declare(self) -> bool:
        """Note the dead, once for all nodes; whether this node did, and so sees to the attempt's end.

        Called when this node's own ranks are gone. It waits for Slurm's controller, which may just be away, until
        others have noted it or the run has begun anew: a node that is itself cut off reaches none, and Slurm,
        which misses it too, starts the run again.
        """
        if not self.dead:
            return False
        deadline = time.monotonic() + CONTROLLER_AWAY_S
        while not controller_answers(self._environ):
            if time.monotonic() > deadline or self._answer(self._is_settled):
                return False
        noted = {
            "nodes": [
                {"rank": rank, "host": self._hosts[rank], "silent_s": round(age, 1)}
                for rank, age in self.dead.items()
            ],
            "by": self._rank,
            "at": time.time(),
        }
        return self._answer(lambda: create_once(self._attempt.fence, json_text(noted)))

    def _is_settled(self) -> bool:
        return self._attempt.fence.exists() or self._run.attempt(self._attempt.number + 1).path.exists()

    # The network's thread: no file is touched here.

    def _watch_nodes(self) -> None:
        interval_s = self._beat_s / PULSES_A_BEAT
        while not self._done.wait(interval_s):
            network = self._pulse.silences_s()
            self._watched -= self._pulse.ended
            if self._pulse.told_ending:
                return self._cut(f"node 0 ({self._hosts[0]}) ends the attempt")
            found = {
                other: network.get(other) or self._storage_s[other] or 0.0
                for other in sorted(self._watched)
                if silent(network.get(other), self._storage_s[other], self._limit_s)
            }
            if not found:
                continue
            answering = self._answering(found)
            ended = self._ended(found.keys() - answering)
            self._watched -= ended
            dead = {other: self._silent_s(other, age) for other, age in found.items()}
            dead = {other: age for other, age in dead.items() if other not in answering | ended}
            if dead and not self._done.is_set():
                self.dead = dead
                self._pulse.ending = self._rank == 0
                return self._cut(silence_sentence([self._hosts[r] for r in dead], max(dead.values())))
        return None

    def _cut(self, reason: str) -> None:
        self._signals.cut_off(reason)

    def _answering(self, found: Iterable[int]) -> set[int]:
        """Those that beat on the storage and whose hosts are reached: datagrams alone are lost on the way.

        Asked once a heartbeat, of both sides, so that neither is sure of the other for longer than that.
        """
        now = time.monotonic()
        beating = set()
        for other in found:
            age, looked_at = self._storage_s[other], self._looked_at.get(other, now)
            if age is not None and age + now - looked_at <= self._limit_s:
                beating.add(other)
        due = {other for other in beating if now - self._reached.get(other, -math.inf) >= self._beat_s}
        reached = self._pulse.reach(due, CONNECT_S) if due else set()
        self._reached.update(dict.fromkeys(reached, time.monotonic()))
        return (beating - due) | reached

    def _silent_s(self, other: int, age: float) -> float:
        """Since its last sign of life, of whatever kind."""
        return min(age, time.monotonic() - self._reached.get(other, -math.inf))

    def _ended(self, found: Iterable[int]) -> set[int]:
        """Those that have ended by themselves, as far as the storage says so in time."""
        ended: set[int] = set()
        asked = list(found)
        if not asked:
            return ended

        def ask() -> bool:
            for other in asked:
                if self._has_ended(other):
                    ended.add(other)
            return True

        self._answer(ask)
        return set(ended)

    def _has_ended(self, other: int) -> bool:
        """By itself: one that was cut off ends its ranks too, and may still write so."""
        record = read_record(self._attempt.node_record(other))
        return record.get("state") in ("ending", "ended") and not record.get("fenced")

    def _answer(self, ask: Callable[[], bool]) -> bool:
        """What the storage says, False where it takes too long."""
        answers: list[bool] = []
        asker = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
        asker.start()
        asker.join(ANSWER_S)
        return bool(answers and answers[0])

    # The storage's thread: it may hang in any line.

    def _watch_storage(self) -> None:
        newer = self._run.attempt(self._attempt.number + 1)
        while not self._done.is_set():
            try:
                if newer.path.exists():
                    return self._cut(f"attempt {newer.number} of this run has begun")
                if was_asked(self._attempt.stop_marker):
                    self._signals.ask_to_save()
                if self._job_id in noted_jobs(self._run.stopped):
                    self._signals.hurry()
                if self._attempt.fence.exists():
                    return self._cut("another node found that nodes of this attempt are dead")
                self._look_at_beats()
            except OSError:
                pass
            self._look.wait(self._beat_s)
            self._look.clear()
        return None

    def _look_at_beats(self) -> None:
        for other, silence in self._storage.items():
            try:  # opening it makes NFS ask its server
                beat = self._attempt.node_beat(other).read_text(encoding="ascii", errors="replace")
            except OSError:
                continue
            if beat != self._beats[other]:
                self._beats[other] = beat
                silence.hear()
            now = time.monotonic()
            self._storage_s[other], self._looked_at[other] = silence.tick(now), now


def controller_answers(environ: Mapping[str, str]) -> bool:
    """Whether this node reaches Slurm's controller, asked for about a minute; True where it has no scontrol."""
    for _ in range(CONTROLLER_TRIES):
        try:
            done = subprocess.run(
                ["scontrol", "show", "job", environ.get("SLURM_JOB_ID", "0")],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=CONTROLLER_S,
                check=False,
            )
        except FileNotFoundError:
            return True
        except subprocess.TimeoutExpired:
            continue
        except OSError:
            return True
        # By what it printed: its exit code may have been collected by the agent's own loop.
        if b"JobId=" in done.stdout or b"Invalid job id" in done.stderr:
            return True
        time.sleep(1)
    return False
