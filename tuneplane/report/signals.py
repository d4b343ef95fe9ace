"""Signals in threads of ours. Called by the writer's and the stop marker's thread as they begin.

Imported by the caller that starts the thread: nothing is imported in it, see `forks`.
"""

from __future__ import annotations

import signal

_OURS = frozenset(
    (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS)
)
"""Signals that tell of a crash in the very thread."""


def block_signals() -> None:
    """Leave every signal but crashes to the program's own threads.

    A program that blocks a signal to wait for it (`sigwait`) would else be killed by it, through us.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _OURS)
