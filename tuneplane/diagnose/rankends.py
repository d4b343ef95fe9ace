"""The rank that failed first on a node, as the node's agent recorded it. `gather.py` reads it."""

from __future__ import annotations

from tuneplane.diagnose.evidence import RankEnd, Refusal, Trace
from tuneplane.diagnose.traces import parse_traces
from tuneplane.runs.records import number as real
from tuneplane.runs.records import whole


def read_rank_end(value: object) -> RankEnd | None:
    """The `failure` of an exit record; None where it has none that is sound."""
    if not isinstance(value, dict):
        return None
    rank = whole(value.get("rank"))
    if rank is None:
        return None
    kind, message = str(value.get("exception") or ""), str(value.get("message") or "")
    return RankEnd(
        rank=rank,
        at=real(value.get("at")),
        exception=kind,
        message=message,
        exitcode=whole(value.get("exitcode")),
        victim=value.get("victim") is True,
        trace=_trace(str(value.get("traceback") or ""), kind, message, rank),
    )


def read_refusal(value: object) -> Refusal | None:
    """The `preflight` of an exit record; None where it found nothing wrong, or was not made."""
    if not isinstance(value, dict) or value.get("ok") is True:
        return None
    return Refusal(str(value.get("told") or ""), whole(value.get("node")))


def _trace(text: str, kind: str, message: str, rank: int) -> Trace | None:
    if not kind:
        return None
    parsed = parse_traces([(0, line) for line in text.splitlines()])
    lines = parsed[-1].lines if parsed else ()
    before = parsed[-1].before if parsed else ()
    name = parsed[-1].kind if parsed else kind
    return Trace(kind=name, message=message, offset=0, rank=rank, before=before, lines=lines)
