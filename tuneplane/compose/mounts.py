"""`SRC:DST[:ro]`: a mount as flags and configurations write it. Compose checks them, compile reads them."""

from __future__ import annotations

import re

from tuneplane.spec import Mount

FORM = r"SRC:DST or SRC:DST:ro, both absolute, a colon within a path written as \:"

_PART = re.compile(r"((?:[^\\:]|\\[\\:]|\\(?![\\:]))*)(:|$)", re.DOTALL)


def parse_mount(text: str) -> Mount:
    r"""A mount from its text; `\:` is a colon of a path and `\\` a backslash.

    Raises ValueError with what is wrong, to be read after the text itself.
    """
    parts = []
    position = 0
    while True:
        match = _PART.match(text, position)
        assert match is not None  # the pattern's end matches at the latest where the text ends
        parts.append(re.sub(r"\\([\\:])", r"\1", match[1]))
        position = match.end()
        if not match[2]:
            break
    mode = parts.pop() if len(parts) == 3 else "rw"
    if len(parts) != 2 or mode not in ("ro", "rw"):
        raise ValueError(f"must be {FORM}")
    for path in parts:
        if not path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"must hold absolute paths without '..', and {path!r} is none: {FORM}")
    source, target = parts
    if not target.strip("/"):
        raise ValueError("would hide the image's whole file system")
    return Mount(source, target, mode == "ro")


def format_mount(mount: Mount) -> str:
    """The text that `parse_mount` reads as this mount."""
    source, target = (re.sub(r"([\\:])", r"\\\1", path) for path in (mount.source, mount.target))
    return f"{source}:{target}:ro" if mount.read_only else f"{source}:{target}"
