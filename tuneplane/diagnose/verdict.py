"""The judgement: what every rule says of the evidence, the surest first. Pure."""

from __future__ import annotations

from tuneplane.diagnose.evidence import Evidence
from tuneplane.diagnose.finding import ORDER, Finding
from tuneplane.diagnose.rules import RULES
from tuneplane.diagnose.rules.running import cannot_tell

GENERAL = (
    "python-exception",
    "first-failing-rank",
    "rank-exit",
    "command-failed",
    "rank-killed",
    "start-failed",
    "agent-gone",
)
"""Causes that say what happened and not why: left out beside one that says why."""

WELL = ("healthy", "completed")

WHILE_IT_ENDS = "ending"
"""What Slurm does meanwhile: left out beside what says why the run ends."""


def diagnose(evidence: Evidence) -> list[Finding]:
    """All findings, the one to tell first at the front: by how sure it is, then by the order of the rules.

    There is always one: where no rule knows, it says that.
    """
    found: dict[str, Finding] = {}
    for rule in RULES:
        finding = rule(evidence)
        if finding is not None:
            found.setdefault(finding.cause, finding)
    findings = list(found.values())
    special = [f for f in findings if f.cause not in GENERAL and f.cause not in WELL]
    if len(special) > 1:
        special = [f for f in special if f.cause != WHILE_IT_ENDS]
    if special:
        findings = special
    elif len(findings) > 1:
        general = [f for f in findings if f.cause in GENERAL]
        findings = sorted(general, key=_sureness)[:1] or findings
    return sorted(findings, key=_sureness) or [cannot_tell(evidence)]


def _sureness(finding: Finding) -> int:
    return ORDER.index(finding.certainty)
