"""How an attempt ended: one code and one reason out of its nodes' records.

The batch script calls it once every node has ended, and `local.py` after its one.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

from tuneplane.kernel.files import write_json
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.node.record import read_record

WRITE_S = 10.0
"""How long the end is tried to be written where the disk is full; the exit code is told all the same."""

RETRY_S = 0.5

NO_RECORD = "the node agent left no exit record: it was killed, or its node failed,"
"""The reason where a node is silent; read on as `… on n1`."""


@dataclass(frozen=True)
class Outcome:
    """code: the first failing node's. for_good: it does not start again by itself (C11)."""

    code: int
    node: dict[str, Any] | None  # the record of the node that failed first
    reason: str | None
    stop_requested: bool
    for_good: bool


def judge(nodes: list[dict[str, Any]], srun_code: int, marked: bool) -> Outcome:
    """The outcome of an attempt. Pure.

    nodes: their records; marked: whether the stop marker is there. srun's own code is the highest of all
    tasks, so a victim's 137 would hide the culprit's 1. A node that failed by itself comes first, the earliest
    of them, and the others were told to end because of it; then one that left no exit record while srun failed;
    then one that was told to end from outside.
    """
    failed = sorted((n for n in nodes if n.get("code")), key=lambda n: float(n.get("ended_at") or 0))
    own = [n for n in failed if not n.get("told_to_stop")]
    silent = [n for n in nodes if n.get("code") is None] if srun_code else []
    stopped = marked or any(n.get("told_to_stop") for n in nodes)
    for node in own:
        return Outcome(int(node["code"]), node, node.get("reason"), marked, True)
    for node in silent:
        return Outcome(srun_code, node, NO_RECORD, stopped, False)
    for node in failed:
        return Outcome(int(node["code"]), node, node.get("reason"), stopped, False)
    reason = f"srun ended with exit code {srun_code}, and no node failed" if srun_code else None
    return Outcome(srun_code, None, reason, stopped, srun_code == 0 and not stopped)


def never_began(nodes: list[dict[str, Any]], hosts: list[str]) -> list[dict[str, Any]]:
    """A silent record for each host of the claim whose agent left none: no Python there, no storage, no node."""
    seen = {node.get("rank") for node in nodes}
    return [{"rank": rank, "host": host} for rank, host in enumerate(hosts) if rank not in seen]


def end(run: RunFolder, number: int, srun_code: int) -> int:
    """Write how the attempt ended, remove the secrets of a run that ended for good, return the exit code."""
    attempt = run.attempt(number)
    nodes = [record for path in sorted(attempt.path.glob("node-*.json")) if (record := read_record(path))]
    nodes += never_began(nodes, read_record(attempt.start).get("hosts") or []) if srun_code else []
    outcome = judge(nodes, srun_code, attempt.stop_marker.exists())
    _write_end(
        attempt,
        {
            "code": outcome.code,
            "srun_code": srun_code,
            "first_failing_node": outcome.node.get("host") if outcome.node else None,
            "first_failing_rank": outcome.node.get("rank") if outcome.node else None,
            "reason": outcome.reason,
            "stop_requested": outcome.stop_requested,
            "for_good": outcome.for_good,
            "ended_at": time.time(),
        },
    )
    # An old attempt that was cut off and ends late must not take them from its successor.
    if outcome.for_good and run.attempts()[-1:] == [attempt]:
        try:
            run.secrets.unlink(missing_ok=True)
        except OSError as error:
            print(f"tuneplane: {run.secrets} not removed: {error.strerror}", file=sys.stderr)
    return outcome.code


def _write_end(attempt: AttemptFolder, values: dict[str, Any]) -> None:
    deadline = time.monotonic() + WRITE_S
    while True:
        try:
            return write_json(attempt.end, values)
        except OSError as error:
            if time.monotonic() > deadline or isinstance(error, FileNotFoundError):
                print(f"tuneplane: {attempt.end} not written: {error.strerror}", file=sys.stderr)
                return None
        time.sleep(RETRY_S)
