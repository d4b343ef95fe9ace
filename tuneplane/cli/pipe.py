"""A reader that went away, as `head` does when it has enough: no failure, and no reason to say anything.

`main` asks. What only shows ends; what acts goes on to its end, with nobody listening.
"""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Sequence
from typing import IO

ACTING = {
    **dict.fromkeys(("init", "new", "render", "submit", "export", "eval", "image", "cluster")),
    "recipe": ("upgrade",),
    "job": ("stop", "pause", "resume", "retry", "rerun", "gc", "sync", "shell"),
}
"""Commands that change something, and of some those of their own commands that do."""


def acts(words: Sequence[str]) -> bool:
    """Whether a command line is of a command that changes something."""
    names = [word for word in words if not word.startswith("-")][:2]
    if not names or names[0] not in ACTING:
        return False
    of_it = ACTING[names[0]]
    return of_it is None or names[1:] == [] or names[1] in of_it


def open_closed() -> None:
    """Python has no stream where a descriptor was closed (`>&-`): what is said there goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123


class _Unheard(io.RawIOBase):
    """A stream's descriptor whose reader may go: what is written afterwards goes nowhere."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._fd, self._gone = stream, stream.fileno(), False  # kept, or it would be closed

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        if not self._gone:
            try:
                return os.write(self._fd, view)
            except BrokenPipeError:
                self._gone = True
        return len(view)


def speak_on() -> None:
    """Let standard output be written to whether or not anybody reads it."""
    out = sys.stdout
    if not isinstance(out, io.TextIOWrapper):  # a test's own
        return
    raw = io.BufferedWriter(_Unheard(out))
    sys.stdout = io.TextIOWrapper(
        raw, encoding=out.encoding, errors=out.errors, line_buffering=out.line_buffering, write_through=True
    )


def is_unread() -> bool:
    """Whether nobody reads standard output any more; else a broken pipe was another one, and a fault."""
    poll = select.poll()
    poll.register(1, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def fall_silent() -> None:
    """After a broken pipe: what is still in a buffer is not written at exit, which would fail once more."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.close(devnull)
