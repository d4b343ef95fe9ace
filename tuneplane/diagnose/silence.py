"""How long a running command has said nothing. Pure; `gather.py` decides by it what to look at."""

from __future__ import annotations

from tuneplane.diagnose.evidence import Log, Node, Points

QUIET_S = 120.0
"""A run whose command prints and reports nothing for so long is looked at: a step may take a minute."""


def silence_s(now: float, nodes: tuple[Node, ...], logs: tuple[Log, ...], points: Points) -> float:
    """Seconds since a running command last printed or reported anything, or was started."""
    ages = [log.age_s for log in logs]
    ages += [points.newest_age_s] if points.newest_age_s is not None else []
    ages += [max(0.0, now - n.command_started_at) for n in nodes if n.command_started_at is not None]
    return min(ages, default=0.0)
