"""Writing files that matter: whole or not at all, with the mode they are to have from the first byte."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any


def write_atomic(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write `content` to a temporary name beside `path` and rename it there.

    A reader sees the old file or the new one. `mode` is exact, whatever the umask says.
    Raises OSError; the temporary file is then gone.
    """
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """`write_atomic` of indented JSON, non-ASCII kept readable."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", mode)


def read_json(path: Path) -> Any:
    """The JSON value in `path`. Raises OSError, or ValueError where it is not JSON."""
    return json.loads(path.read_text(encoding="utf-8"))
