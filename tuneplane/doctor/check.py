"""One thing that was looked at: ok, a warning, or a failure with the command that mends it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Check:
    """name: what was looked at, in a word or two. said: what was found. remedy: how to mend it."""

    name: str
    level: str
    said: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)
