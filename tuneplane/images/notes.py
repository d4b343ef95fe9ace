"""Small JSON files beside images, which in a shared folder anybody may have put there: read with suspicion.

`folder` reads what an image was made from, `turn` who builds one.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

LARGEST_NOTE_BYTES = 1 << 20


def read_note(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises OSError, ValueError: for anything else, without waiting for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("no regular file")
        data = file.read(LARGEST_NOTE_BYTES + 1)
    if len(data) > LARGEST_NOTE_BYTES:
        raise ValueError("too large for a note")
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value
