"""Words that several rules use: where a finding is, which lines speak for it, what a state means."""

from __future__ import annotations

from typing import Any

from tuneplane.diagnose.culprit import Culprit
from tuneplane.diagnose.evidence import Evidence, Log, Mark, Trace
from tuneplane.diagnose.traces import cut

ENDED_BADLY = frozenset(
    (
        *("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL"),
        *("DEADLINE", "REVOKED", "LOST"),
    )
)
EVIDENCE_LINES = 8


def place(culprit: Culprit) -> dict[str, Any]:
    """Where: the arguments of a Finding."""
    node = culprit.node
    return {"node": node.rank if node else None, "host": node.host if node else "", "rank": culprit.rank}


def at(evidence: Evidence, log: Log, mark: Mark | None = None) -> dict[str, Any]:
    """Where a line of a log stands."""
    if log.node is None:
        return {}
    node = evidence.node(log.node)
    return {"node": log.node, "host": node.host if node else log.host, "rank": mark.rank if mark else None}


def trace_lines(trace: Trace) -> tuple[str, ...]:
    """The end of a traceback: where it was raised, and what."""
    lines = [line for line in trace.lines if line.strip() and set(line.strip()) - set("^~")]
    return tuple(cut(line, 300) for line in lines[-EVIDENCE_LINES:])


def last_lines(log: Log | None, most: int = 4) -> tuple[str, ...]:
    """The last lines that a program printed."""
    return tuple(cut(line, 300) for line in log.tail[-most:]) if log else ()


def image_lines(log: Log | None) -> tuple[str, ...]:
    """What the agent found wanting in the image, after a command that failed at once."""
    return tuple(line for line in (log.image if log else ()) if not line.startswith("ok"))


def lines_of(culprit: Culprit) -> tuple[str, ...]:
    """What speaks for a culprit: its traceback, else torchrun's word, else the last lines of its log."""
    if culprit.trace is not None:
        return (*trace_lines(culprit.trace), *culprit.victims[:2])
    told: tuple[str, ...] = ()
    if culprit.failure is not None:
        told = (f"torchrun: rank {culprit.failure.rank}, exit code {culprit.failure.exitcode}",)
    return (*told, *last_lines(culprit.log), *culprit.victims[:2])


def on(culprit: Culprit) -> str:
    """` on rank 1 (n2)`, as far as it is known and there are several."""
    where = []
    if culprit.rank is not None:
        where.append(f"rank {culprit.rank}")
    if culprit.host:
        where.append(culprit.host)
    return f" on {' of '.join(where)}" if where else ""


def on_host(host: str) -> str:
    """` on n2`, where the host is known."""
    return f" on {host}" if host else ""


def has_begun(evidence: Evidence) -> bool:
    """Whether the command was started on any node."""
    return any(node.command_started_at is not None for node in evidence.nodes)


def shortly(text: str, most: int = 160) -> str:
    """The first line of a message, for a sentence."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return cut(first, most).rstrip(". ")


def seconds(value: float) -> str:
    """`40 s`, `20 min`, `3 h`."""
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"
