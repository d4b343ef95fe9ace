"""Reporting from inside a job, for every trainer: `from tuneplane.report import init, log, finish, should_stop`.

Outside a job every call does nothing. Inside, no call raises into the training loop or waits for a disk (C15–C18).
"""

from __future__ import annotations

import os

from tuneplane.report.forks import imports
from tuneplane.report.ingest import Ingest, is_bound, read_ingest
from tuneplane.report.stop import should_stop as _stop_asked

TYPE_CHECKING = False  # `typing` itself costs 10 ms of import; type checkers treat this name the same
if TYPE_CHECKING:
    from typing import Any

    from tuneplane.report.session import Session

__all__ = ["TunePlaneCallback", "finish", "init", "log", "should_stop"]


class _Off:
    """The session of a process that reports nothing: no token, reporting off, or not the reporting rank."""

    def start(self, hparams: Any, monitor_hardware: bool, resume_step: Any) -> None:
        """Nothing to start."""

    def log(self, metrics: Any, step: Any, prefix: Any) -> None:
        """Nothing to log to."""

    def finish(self) -> None:
        """Nothing to finish."""

    def count_lost_call(self) -> None:
        """Nothing was to be reported."""


_OFF = _Off()


class _Waiting(_Off):
    """Stands in while the session is being opened: a signal handler that reports may interrupt just that.

    Its calls are made when the session is there; opening another in the middle of our own imports would fail.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any]] = []

    def log(self, metrics: Any, step: Any, prefix: Any) -> None:
        """Keep the point, with its values as they are now."""
        self.calls.append((dict(metrics), step, prefix))


class _Process:
    """What this process has decided: nothing yet (None), or its session."""

    __slots__ = ("all_ranks", "session", "waiting")

    def __init__(self, all_ranks: bool = False) -> None:
        self.session: Session | _Off | None = None
        self.all_ranks = all_ranks
        self.waiting: _Waiting | None = None  # while a session is being opened

    def forget(self) -> None:
        """In a forked child: queue, thread and file are the parent's; the child decides and opens anew."""
        self.session = self.waiting = None


_process = _Process()
os.register_at_fork(after_in_child=_process.forget)


def init(
    hparams: Any = None,
    monitor_hardware: bool = False,
    *,
    all_ranks: bool = False,
    resume_step: int | None = None,
) -> None:
    """Open this process's reporting session. Calling it again changes nothing, but keeps hparams it did not know.

    hparams: a mapping, dataclass, namespace or config object, kept with the run and shown.
    monitor_hardware: sample GPUs, CPU, memory, disk and network, on the global rank 0 alone, and not where the
        platform does so itself (TUNEPLANE_JOB_HARDWARE_BRIDGE). Metrics are named `system/node0/…`.
    all_ranks: let every rank report; by default the global rank 0 alone does.
    resume_step: where this attempt took up again, the first step done anew: points of earlier attempts from there
        on are hidden. Without it each metric is hidden from the first step that this attempt logs of it.
    """
    try:
        if all_ranks and not _process.all_ranks:
            _process.all_ranks = True
            if _process.session is _OFF:
                _process.session = None
        (_process.session or _open()).start(hparams, monitor_hardware, resume_step)
    except Exception:  # never into the training loop (C16)
        _stumbled()


def log(metrics: Any, step: Any = None, prefix: str | None = None) -> None:
    """Report a point. Opens the session itself where nobody called `init`.

    metrics: a mapping of names to numbers; nested ones are flattened with `/`, tensors, arrays and lists become
        their mean, anything else is dropped and counted.
    step: the training step; without it the session counts on from its highest step.
    prefix: a namespace for names that have none of their own (`loss` → `validation/loss`; `eval/loss` stays).
    """
    try:
        (_process.session or _open()).log(metrics, step, prefix)
    except Exception:  # never into the training loop (C16)
        _stumbled()


def finish() -> None:
    """Write what is queued, waiting at most 2 s, and close the file. A later `log` goes on in the same file."""
    try:
        if isinstance(_process.session, _Off):
            _process.session = None  # the environment is looked at again, should anything be logged later
        elif _process.session is not None:
            _process.session.finish()
    except Exception:  # never into the training loop (C16)
        _stumbled()


def should_stop() -> bool:
    """Whether this run has been asked to save and end. Made for every step; needs only TUNEPLANE_STOP_FILE.

    The file system is asked at most twice a second, by a thread of its own: a dead mount does not stop the step.
    """
    try:
        return _stop_asked()
    except Exception:  # never into the training loop (C16)
        return False


def __getattr__(name: str) -> Any:
    if name == "TunePlaneCallback":  # only for those who ask for it
        with imports:
            from tuneplane.report.callback import TunePlaneCallback
        return TunePlaneCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _open() -> Session | _Off:
    """Decide once, from the environment, whether this process reports, and open its session."""
    if not is_bound(os.environ):
        _process.session = _OFF
        return _OFF
    with imports:
        if _process.session is not None:
            return _process.session
        if _process.waiting is not None:
            return _process.waiting
        waiting = _process.waiting = _Waiting()
        try:
            session = _process.session = _open_session()
        finally:
            _process.waiting = None
        for call in waiting.calls:
            session.log(*call)
        return session


def _open_session() -> Session | _Off:
    try:
        ingest = read_ingest(os.environ)
        if not isinstance(ingest, Ingest):
            why = ingest
        elif ingest.rank != 0 and not _process.all_ranks:
            return _OFF
        else:
            from tuneplane.report.session import Session

            return Session(ingest)
    except Exception as error:  # never into the training loop (C16)
        why = repr(error)
    from tuneplane.report.stderr import say

    say(f"reporting has stopped: {why}; training goes on")
    return _OFF


def _stumbled() -> None:
    """A call of ours failed where nothing should: count it, so that the loss is not silent."""
    try:
        if _process.session is not None:
            _process.session.count_lost_call()
    except Exception:  # nothing left to do, and the training loop comes first
        return
