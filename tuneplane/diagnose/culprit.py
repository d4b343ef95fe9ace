"""Which node and rank failed first, and which of the others only lost their peer. Pure; rules of failures use it.

The failure that is seen first may be a victim's: its connection broke because another rank died. So what an
exception says comes before when it was raised.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuneplane.diagnose.evidence import Evidence, Log, Node, RankFailure, Trace
from tuneplane.node.failure import is_victim_of

LAUNCHERS = ("ChildFailedError", "SignalException", "ProcessExitedException", "CalledProcessError")
"""Exceptions by which a launcher says that one of its ranks has failed."""

TERM, KILL = 143, 137


@dataclass(frozen=True)
class Culprit:
    """What failed first, as far as can be told. ending: exit code of it, negative: the signal."""

    node: Node | None = None
    log: Log | None = None
    trace: Trace | None = None
    failure: RankFailure | None = None
    rank: int | None = None
    ending: int | None = None
    victims: tuple[str, ...] = ()
    is_victim: bool = False

    @property
    def host(self) -> str:
        return self.node.host if self.node else ""

    def text(self) -> str:
        """What the traceback says: its class and message, and those that it came from."""
        if self.trace is None:
            return ""
        return "\n".join([*self.trace.before, f"{self.trace.kind}: {self.trace.message}"])


def is_victim(trace: Trace) -> bool:
    """Whether an exception only tells that another rank is gone."""
    return is_victim_of(trace.kind, trace.message)


def is_launcher(trace: Trace) -> bool:
    """Whether a traceback is a launcher's own."""
    return trace.kind.rpartition(".")[2] in LAUNCHERS


def culprit(evidence: Evidence) -> Culprit:
    """The node, rank and traceback to tell first; empty where no node failed by itself.

    What the nodes' agents recorded comes before what is found in logs, where it is no victim's.
    """
    found = [c for log in evidence.logs for c in _of_log(evidence, log)]
    recorded = [c for node in evidence.nodes if (c := _of_record(evidence, node))]
    own = [c for c in recorded if not c.is_victim]
    if own:
        best = min(own, key=_recorded_order)
    elif found or recorded:
        # Of equals the one whose node ended first; within a node, as its log has them.
        best = min(found or recorded, key=lambda c: _order(c, found))
    else:
        return _of_nodes(evidence)
    found = [best, *(c for c in found if (c.rank, c.host) != (best.rank, best.host))] if own else found
    victims = tuple(_told(c) for c in found if c is not best and c.is_victim)
    return Culprit(
        best.node, best.log, best.trace, best.failure, best.rank, best.ending, victims, best.is_victim
    )


def _of_record(evidence: Evidence, node: Node) -> Culprit | None:
    failure = node.failure
    if failure is None:
        return None
    return Culprit(
        node,
        evidence.log(node.rank),
        failure.trace,
        None,
        failure.rank,
        failure.exitcode if failure.exitcode is not None else node.code,
        is_victim=failure.victim,
    )


def _recorded_order(one: Culprit) -> float:
    """By the clocks of the nodes, which are alike for the most part: only exceptions of their own are compared."""
    failure = one.node.failure if one.node else None
    at = failure.at if failure else None
    ended = one.node.ended_at if one.node else None
    return at if at is not None else ended if ended is not None else float("inf")


def _order(one: Culprit, found: list[Culprit]) -> tuple[bool, bool, str, float, int]:
    rooted = any(c.failure is not None and c.failure.root and not c.is_victim for c in found)
    not_root = rooted and not (one.failure is not None and one.failure.root)
    time = one.failure.time if one.failure else ""
    ended = one.node.ended_at if one.node and one.node.ended_at is not None else float("inf")
    return one.is_victim, not_root, time if rooted else "", ended, one.trace.offset if one.trace else 0


def _of_log(evidence: Evidence, log: Log) -> list[Culprit]:
    """One candidate for each rank that failed in a node's log."""
    node = evidence.node(log.node)
    failures = {failure.rank: failure for failure in log.failures}
    traces: dict[int | None, Trace] = {}
    for trace in log.traces:
        if not is_launcher(trace):
            known = traces.get(trace.rank)
            # The last of a rank ended it; but a victim's after its own failure is only the consequence.
            if known is None or is_victim(known) or not is_victim(trace):
                traces[trace.rank] = trace
    root = next((failure for failure in log.failures if failure.root), None)
    found = []
    for rank, trace in traces.items():
        failure = failures.get(rank) if rank is not None else root
        told = rank if rank is not None else failure.rank if failure else None
        ending = failure.exitcode if failure else node.code if node else None
        # A prefix is of torch's own hook for what nothing caught: such a rank had failed before it was ended.
        caught = trace.rank is None and _was_ended(failure)
        found.append(Culprit(node, log, trace, failure, told, ending, is_victim=is_victim(trace) or caught))
    spoken = {c.rank for c in found}
    for failure in log.failures:
        if failure.rank not in spoken and (None not in traces or failure.exitcode < 0):
            waited = failure.exitcode == -6 and log.mark("nccl-timeout") is not None  # its watchdog aborts it
            lost = waited or _was_ended(failure)
            found.append(Culprit(node, log, None, failure, failure.rank, failure.exitcode, is_victim=lost))
    if not found and node is not None and node.code:
        told_to_end = node.told_to_stop or node.code == TERM
        found.append(Culprit(node, log, ending=_signal(node.code), is_victim=told_to_end))
    elif not found and node is not None and node.code is None and evidence.code:
        return []
    return found


def _was_ended(failure: RankFailure | None) -> bool:
    """Whether torchrun itself ended a rank, since another had failed."""
    return failure is not None and failure.exitcode == -15


def _of_nodes(evidence: Evidence) -> Culprit:
    failed = [node for node in evidence.nodes if node.code]
    if not failed:
        return Culprit()
    own = [node for node in failed if not node.told_to_stop] or failed
    first = min(own, key=lambda node: node.ended_at or float("inf"))
    return Culprit(first, None, ending=_signal(first.code or 0), is_victim=first.told_to_stop)


def _signal(code: int) -> int:
    return 128 - code if code > 128 else code


def _told(one: Culprit) -> str:
    where = f"rank {one.rank}" if one.rank is not None else "a rank"
    host = f" on {one.host}" if one.host else ""
    why = ""
    if one.trace is not None:
        why = f": {one.trace.kind.rpartition('.')[2]}: {one.trace.message}"[:160]
    return f"{where}{host} was its victim{why}"
