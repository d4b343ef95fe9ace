"""What a rule finds: the cause in one sentence, where, by what evidence, what to do, and how sure that is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

CERTAIN, LIKELY, POSSIBLE = "certain", "likely", "possible"
"""certain: somebody who knows said so (Slurm, an exception, our own record). likely: nothing speaks against it,
and another cause would look otherwise. possible: worth a look."""

ORDER = (CERTAIN, LIKELY, POSSIBLE)


@dataclass(frozen=True)
class Finding:
    """cause: a short name, for programs. sentence: without a full stop. evidence: lines as they stand."""

    cause: str
    sentence: str
    remedy: str = ""
    node: int | None = None
    host: str = ""
    rank: int | None = None
    evidence: tuple[str, ...] = ()
    certainty: str = CERTAIN

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)
