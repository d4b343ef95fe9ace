"""Signals in threads of ours. Called by the writer's and the stop marker's thread as they begin."""

from __future__ import annotations


def block_signals() -> None:
    """Leave every signal to the program's own threads, except those that tell of a crash in this very thread.

    A program that blocks a signal to wait for it (`sigwait`) would else be killed by it, through us.
    """
    import signal

    crashes = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - crashes)
