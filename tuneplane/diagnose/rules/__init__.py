"""The rules: one a cause, each a pure function of the evidence. `verdict.py` asks them in the order of `RULES`."""

from __future__ import annotations

from collections.abc import Callable

from tuneplane.diagnose.evidence import Evidence
from tuneplane.diagnose.finding import Finding

Rule = Callable[[Evidence], "Finding | None"]

RULES: tuple[Rule, ...] = ()
