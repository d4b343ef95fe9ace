"""The judgement: what every rule says of the evidence, the surest first. Pure."""

from __future__ import annotations

from tuneplane.diagnose.evidence import Evidence
from tuneplane.diagnose.finding import ORDER, Finding
from tuneplane.diagnose.rules import RULES


def diagnose(evidence: Evidence) -> list[Finding]:
    """All findings, the one to tell first at the front: by how sure it is, then by the order of the rules."""
    found = [finding for rule in RULES if (finding := rule(evidence)) is not None]
    unique = {finding.cause: finding for finding in reversed(found)}
    kept = [finding for finding in found if unique[finding.cause] is finding]
    return sorted(kept, key=lambda finding: ORDER.index(finding.certainty))
