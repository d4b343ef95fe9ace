"""What reporting says to the user: lines on stderr. Called by Writer's thread and, at the end, by Session."""

from __future__ import annotations

import os
import sys


def say(message: str) -> None:
    """Write one line past Python's own buffer: its lock must not be with a thread when the interpreter ends."""
    try:
        if sys.__stderr__ is not None:
            os.write(sys.__stderr__.fileno(), f"tuneplane: {message}\n".encode("utf-8", "replace"))
    except (OSError, ValueError):
        return
