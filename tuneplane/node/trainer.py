"""The command of one node and every process below it: started, told to end, surely gone.

The agent calls `start`, `wait` and `end_rest`, in this order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import Callable

from tuneplane.containers import Launch
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.node.ending import Ending
from tuneplane.node.process import (
    catches,
    descendants,
    led_by,
    reap,
    signal_all,
    speakers,
    trainers,
)
from tuneplane.node.signals import Signals

LEFTOVER_GRACE_S = 2.0
"""How long what the command left behind may take to end, once the command itself has ended by itself."""

IMAGE_GRACE_S = 1.0
"""How long the processes that serve the container's image may take to end after all others."""

KILL_S = 10.0
"""How long after KILL a process may still hang in the kernel (a dead filesystem) before it is given up."""

TELL_S = 0.2
"""Slurm signals all processes of a step at once: the agent's own signal may come just after the command's end."""

LOOK_AGAIN_S = 0.5
"""How often the process tree is looked at where no child's end says that it changed."""

HUNG = 124
"""The exit code of a command that was ended because it hung, as of timeout(1)."""

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""Exit codes of a command that cannot be started, as of env(1) and shells."""


@dataclass(frozen=True)
class Ended:
    """How the command ended. code: 128 + n where signal n ended it. told: asked to end from outside first."""

    code: int
    told: bool
    reason: str
    at: float  # seconds since the epoch


class CannotStart(OperationError):
    """The command is not there or may not be run; `code` is what a shell would exit with."""

    def __init__(self, code: int, fault: Fault) -> None:
        super().__init__(fault)
        self.code = code


class Trainer:
    """The command and its tree. Needs `become_subreaper`, so that orphans of the tree stay below this process.

    save: called once when the run is asked to save and end. save_signal: sent then to each process of the tree
    that catches it; empty for none.
    """

    def __init__(
        self, signals: Signals, ending: Ending, save: Callable[[], None], save_signal: str = ""
    ) -> None:
        self.signals, self.save, self.save_signal = signals, save, save_signal
        self._ending = ending
        self._process: subprocess.Popen[bytes] | None = None
        self._code: int | None = None
        self._told_to_end = self._asked_where = False
        self.told_at: float | None = None
        """When this was first seen to be told to end, seconds since the epoch."""
        self._leader: list[str] = []

    def start(self, started: Launch, log: int) -> int:
        """Start the command in a session of its own, its output to `log`. Returns its pid; raises CannotStart."""
        program = started.argv[0]
        self._leader = started.leader
        try:
            self._process = subprocess.Popen(
                started.argv,
                env=started.environ,
                cwd=started.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            remedy = f"PATH is {started.environ.get('PATH', 'not set')}; it comes from the cluster profile"
            fault = Fault(f"{program} cannot be started: {error.strerror}", "node agent", remedy)
            missing = isinstance(error, FileNotFoundError)
            raise CannotStart(NOT_FOUND if missing else NOT_EXECUTABLE, fault) from None
        return self._process.pid

    def wait(self) -> Ended:
        """Wait until the command itself has ended; pass on what the agent is told meanwhile."""
        while self._code is None:
            self._obey()
            now, kill_at = time.monotonic(), self._ending.kill_at
            if kill_at is not None and now - kill_at > KILL_S:
                hung = self.signals.hung
                told = f"{hung}, and it could not be killed" if hung else "the command could not be killed"
                return Ended(HUNG if hung else 128 + signal.SIGKILL, not hung, told, time.time())
            self.signals.wait(self._until_next(now))
            self._reap()
        at = time.time()
        code = 128 - self._code if self._code < 0 else self._code
        deadline = time.monotonic() + TELL_S
        while code > 128 and not self._is_told() and time.monotonic() < deadline:
            self.signals.wait(deadline - time.monotonic())
        if self.signals.hung:
            return Ended(HUNG, False, self.signals.hung, at)
        return Ended(code, self._is_told(), self.signals.cut or exit_sentence(code), at)

    def end_rest(self) -> None:
        """End every process that is left below this one: TERM, a grace, KILL.

        Where the agent was told to end, the tree has the rest of the whole grace: bash dies of TERM at once
        while the trainer that it started still saves.
        """
        if not self._reap():
            return
        self._obey()
        if self._ending.kill_at is None:  # else it is told by then
            self._tell_to_end()
        deadline = time.monotonic() + LEFTOVER_GRACE_S
        while self._reap():
            self._obey()
            now, until = time.monotonic(), max(deadline, self._ending.kill_at or 0.0)
            left = self._tree()
            if now >= until or not trainers(left):
                break
            self.signals.wait(min(LOOK_AGAIN_S, until - now))
        self._end_all()

    def _end_all(self) -> None:
        """TERM to the processes that serve the image, which alone may be left; then KILL until none is."""
        started = time.monotonic()
        if not trainers(self._tree()):
            signal_all(self._tree(), signal.SIGTERM)
            while self._reap() and time.monotonic() - started < IMAGE_GRACE_S:
                self.signals.wait(IMAGE_GRACE_S / 10)
        pause_s = 0.01  # a tree that forks while it is killed: again and again, bounded
        while self._reap() and time.monotonic() - started < IMAGE_GRACE_S + KILL_S:
            signal_all(self._tree(), signal.SIGKILL)
            self.signals.wait(pause_s)
            pause_s = min(2 * pause_s, LOOK_AGAIN_S)

    def _obey(self) -> None:
        """Do what the signals said, when it is due."""
        now = time.monotonic()
        if self.told_at is None and (self.signals.told or self.signals.cut):
            self.told_at = time.time()
        if self.signals.hung and not self._asked_where:
            self._asked_where = True
            signal_all(speakers(self._tree()), signal.SIGQUIT)
        if self._ending.note(self.signals, now):
            self.save()
            if self.save_signal:
                number = signal.Signals[f"SIG{self.save_signal}"]
                signal_all([pid for pid in self._tree() if catches(pid, number)], number)
        term_at, kill_at = self._ending.term_at, self._ending.kill_at
        if term_at is not None and now >= term_at and not self._told_to_end:
            self._tell_to_end()
            self._ending.told_to_end(now)
        elif self._code is None and kill_at is not None and now >= kill_at:
            signal_all(self._tree(), signal.SIGKILL)

    def _tell_to_end(self) -> None:
        self._told_to_end = True
        signal_all(trainers(self._tree()), signal.SIGTERM)

    def _until_next(self, now: float) -> float | None:
        """Seconds until something is due; None where nothing is."""
        ending = self._ending
        due = ending.kill_at if self._told_to_end or ending.term_at is None else ending.term_at
        if due is None:
            return None
        return due - now if due > now else LOOK_AGAIN_S

    def _is_told(self) -> bool:
        """Whether the command was asked or made to end, and did not end by itself."""
        return self.signals.told or bool(self.signals.cut) or self._told_to_end

    def _tree(self) -> list[int]:
        """Every process of the command. Below this one, or what Slurm started beside it, where that is there.

        srun, which waits for it here, is then left alone: told to end, it has Slurm kill all at once.
        """
        return (led_by(self._leader) if self._leader else []) or descendants(os.getpid())

    def _reap(self) -> bool:
        """Note the command's end, bury orphans; whether any child is left."""
        ended, left = reap()
        process = self._process
        if process is not None and self._code is None and process.pid in ended:
            self._code = process.returncode = ended[process.pid]
        return left


def exit_sentence(code: int) -> str:
    """An exit code in words."""
    if code > 128:
        try:
            return f"the command was ended by {signal.Signals(code - 128).name} (exit code {code})"
        except ValueError:
            pass
    return f"the command ended with exit code {code}"
