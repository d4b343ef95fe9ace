"""How the preparation of an image tells what it does. The command line shows it; nothing here prints."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called often, from one thread at a time, while an image is prepared."""

    def __call__(self, what: str, done_bytes: int = 0, total_bytes: int = 0) -> None:
        """what: the step. total_bytes: 0 where the step cannot say how far it has come."""


def silent(what: str, done_bytes: int = 0, total_bytes: int = 0) -> None:
    """A progress that nobody looks at."""
