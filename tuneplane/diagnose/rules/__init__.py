"""The rules: one a cause, each a pure function of the evidence. `verdict.py` asks them in the order of `RULES`."""

from __future__ import annotations

from collections.abc import Callable

from tuneplane.diagnose.evidence import Evidence
from tuneplane.diagnose.finding import Finding
from tuneplane.diagnose.rules import (
    hang,
    imports,
    memory,
    outside,
    pending,
    preflight,
    program,
    ranks,
    reporting,
    restarts,
    running,
    script,
    start,
    storage,
)

Rule = Callable[[Evidence], "Finding | None"]

RULES: tuple[Rule, ...] = (
    *start.REFUSED,
    *pending.RULES,
    *restarts.RULES,
    *outside.FIRST,
    *pending.WAITS,
    *start.RULES,
    *hang.RULES,
    *preflight.RULES,
    *script.RULES,
    *imports.RULES,
    *memory.RULES,
    *storage.RULES,
    *ranks.RULES,
    *program.RULES,
    *ranks.LAST,
    *outside.RULES,
    *outside.LAST,
    *start.LAST,
    *program.LAST,
    *running.RULES,
    *storage.LATER,
    *reporting.RULES,
    *running.WELL,
)
"""Of findings that are as sure, the first in this order is told first: who knows before who guesses, a cause
before its consequences, what is special before what is general."""
