"""Writing files that matter: whole or not at all, with the mode they are to have from the first byte."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""A byte of a file name that is no UTF-8, as os.fsdecode carries it."""


def is_full(error: OSError) -> bool:
    """Whether a disk, or the user's share of it, has no room; else room would not have helped."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def room_or_right(error: OSError) -> str:
    """What helps where a file could not be written, as the beginning of a remedy."""
    return "free space there" if is_full(error) else "see that it is there and that you may write to it"


def write_atomic(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write `content` to a temporary name beside `path` and rename it there.

    A reader sees the old file or the new one. `mode` is exact, whatever the umask says.
    Raises OSError; the temporary file is then gone.
    """
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    # Cut, so that a name of 255 bytes has a temporary one too.
    temporary = path.with_name(f".{path.name[:40]}.{os.urandom(4).hex()}.tmp")
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


def create_once(path: Path, content: str, mode: int = 0o644) -> bool:
    """Write a file that must not be there yet, whole; whether it was this call that made it. Raises OSError."""
    temporary = path.with_name(f".{path.name[:40]}.{os.urandom(4).hex()}.once")
    write_atomic(temporary, content, mode)
    try:
        os.link(temporary, path)
        return True
    except FileExistsError:
        return temporary.stat().st_nlink > 1  # a server that lost its first answer to the link
    except OSError:  # a filesystem without hard links
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(content)
        return True
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """`write_atomic` of `json_text`."""
    write_atomic(path, json_text(value), mode)


def json_text(value: Any) -> str:
    """Indented JSON, non-ASCII kept readable; always UTF-8, whatever bytes a file name in it has.

    Raises ValueError for a number that JSON has no word for.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    return _LONE_SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def read_json(path: Path) -> Any:
    """The JSON value in `path`. Raises OSError, or ValueError where it is not JSON."""
    return json.loads(path.read_text(encoding="utf-8"))
