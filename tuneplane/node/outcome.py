"""How an attempt ended: one code and one reason out of its nodes' records, and whether the run goes on.

The batch script calls it once every node has ended, `local.py` after its one, another node where node 0 is dead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneplane.kernel.errors import TunePlaneError
from tuneplane.kernel.files import write_json
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.node.record import read_record, was_asked
from tuneplane.node.silence import silence_sentence

WRITE_S = 10.0
"""How long end and intent are tried to be written where the disk is full; the exit code is told all the same."""

RETRY_S = 0.5

NOT_NOTED = 75
"""The exit code where a run saved, to be continued, and that could not be noted: EX_TEMPFAIL of sysexits.h."""

ENDED_ELSEWHERE = 143
"""The exit code where no node has one of its own: as if TERM had ended it."""

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
    failed_itself: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether the records alone say that the run does not go on: it is complete, or failed by itself."""
        return self.failed_itself or (self.for_good and not self.code)


def judge(
    nodes: list[dict[str, Any]], srun_code: int, marked: bool, dead: Sequence[dict[str, Any]] = ()
) -> Outcome:
    """The outcome of an attempt. Pure.

    nodes: their records; marked: whether the stop marker is there; dead: nodes that were found silent, which
    come before all else, since the ranks of the others fail for want of them. srun's own code is the highest
    of all tasks, so a victim's 137 would hide the culprit's 1. A node that failed by itself comes first, the
    earliest of them (before it one that the check before training refused), and the others were told to end
    because of it; then one that left no exit record while srun failed: ranks that only lost others did not fail
    by themselves; then those, where no other is known; then one that was told to end from outside.
    """
    failed = sorted(
        (n for n in nodes if n.get("code")), key=lambda n: (not _is_refused(n), float(n.get("ended_at") or 0))
    )
    own = [n for n in failed if not n.get("told_to_stop")]
    silent = [n for n in nodes if n.get("code") is None] if srun_code else []
    stopped = marked or any(n.get("told_to_stop") for n in nodes)
    for node in dead:
        silent_s = max(float(n.get("silent_s") or 0) for n in dead)
        told = silence_sentence([str(n.get("host")) for n in dead], silent_s)
        return Outcome(srun_code or ENDED_ELSEWHERE, node, told, False, False)
    victims = [n for n in own if _is_victim(n)]
    for node in [n for n in own if n not in victims]:
        return Outcome(int(node["code"]), node, node.get("reason"), marked, True, failed_itself=True)
    for node in silent:
        # The others were told to end because of it; whether anybody asked for that first, Slurm knows.
        return Outcome(srun_code, node, NO_RECORD, False, False)
    for node in victims:
        return Outcome(int(node["code"]), node, node.get("reason"), marked, True, failed_itself=True)
    for node in failed:
        return Outcome(int(node["code"]), node, node.get("reason"), stopped, False)
    reason = f"srun ended with exit code {srun_code}, and no node failed" if srun_code else None
    return Outcome(srun_code, None, reason, stopped, srun_code == 0 and not stopped)


def _is_victim(node: dict[str, Any]) -> bool:
    """Whether no rank of a node failed but for want of another."""
    failure = node.get("failure")
    return isinstance(failure, dict) and failure.get("victim") is True


def _is_refused(node: dict[str, Any]) -> bool:
    """Whether the check before training found something wrong: what ranks did after that has no say."""
    checked = node.get("preflight")
    return isinstance(checked, dict) and checked.get("ok") is False


def never_began(nodes: list[dict[str, Any]], hosts: list[str]) -> list[dict[str, Any]]:
    """A silent record for each host of the claim whose agent left none: no Python there, no storage, no node."""
    seen = {node.get("rank") for node in nodes}
    return [{"rank": rank, "host": host} for rank, host in enumerate(hosts) if rank not in seen]


def end(run: RunFolder, number: int, srun_code: int, environ: Mapping[str, str], rank: int = 0) -> int:
    """End an attempt: its record written, the run started again where it goes on; the exit code.

    rank: whose agent or batch script calls it. May be called again where it was killed half-way. Secrets of a
    run that ended for good are removed.
    """
    attempt = run.attempt(number)
    fence = read_record(attempt.fence)
    if fence and fence.get("by") != rank:
        return srun_code or ENDED_ELSEWHERE  # node 0 was given up by the others, who see to the end
    end = read_record(attempt.end)
    code = int(end.get("code") or 0) if end else _end(run, attempt, srun_code, fence, environ)
    if srun_code and not fence:
        from tuneplane.node.clear import clear_nodes

        clear_nodes(run, attempt, environ)
    if attempt.restart.exists():
        from tuneplane.node.chain import go_on

        try:
            go_on(run, attempt, environ)
        except (OSError, TunePlaneError) as error:
            print(f"tuneplane: the run does not go on by itself: {error}", file=sys.stderr)
    return code


def _end(
    run: RunFolder, attempt: AttemptFolder, srun_code: int, fence: dict[str, Any], environ: Mapping[str, str]
) -> int:
    nodes = [record for path in sorted(attempt.path.glob("node-*.json")) if (record := read_record(path))]
    start = read_record(attempt.start)
    nodes += never_began(nodes, start.get("hosts") or []) if srun_code else []
    outcome = judge(nodes, srun_code, was_asked(attempt.stop_marker), fence.get("nodes") or [])
    follows: dict[str, Any] = {"cause": "", "to_be_continued": False, "not_restarted": ""}
    if not outcome.is_settled and run.attempts()[-1:] == [attempt]:  # one that was cut off ends late
        from tuneplane.node.chain import plan_next  # only here: most ends need neither Slurm nor the job

        try:
            follows = plan_next(run, attempt, fence, environ)
        except (OSError, TunePlaneError) as error:  # how it ended is written all the same
            follows["not_restarted"] = f"what follows could not be decided: {error}"
    values = {
        "code": outcome.code,
        "srun_code": srun_code,
        "first_failing_node": outcome.node.get("host") if outcome.node else None,
        "first_failing_rank": outcome.node.get("rank") if outcome.node else None,
        "reason": outcome.reason,
        **({"failure": outcome.node["failure"]} if outcome.node and outcome.node.get("failure") else {}),
        "stop_requested": outcome.stop_requested,
        "for_good": outcome.for_good,
        **follows,
        "ended_at": time.time(),
    }
    written = write_for_a_while(lambda: write_json(attempt.end, values), attempt.end)
    noted = attempt.restart.exists() or not follows["to_be_continued"]
    # An old attempt that was cut off and ends late must not take them from its successor.
    if (outcome.for_good or follows["not_restarted"]) and run.attempts()[-1:] == [attempt]:
        try:
            run.secrets.unlink(missing_ok=True)
        except OSError as error:
            print(f"tuneplane: {run.secrets} not removed: {error.strerror}", file=sys.stderr)
    if not outcome.for_good and not outcome.code and not (noted and written):
        # With 0 Slurm would call a run complete that is to be continued.
        told = f"it saved and ended, which could not be noted; tp job resume {run.run_id} goes on"
        print(f"tuneplane: {told}", file=sys.stderr)
        return NOT_NOTED
    return outcome.code


def write_for_a_while(act: Callable[[], object], path: Path) -> bool:
    """Do it again for a while where the disk is full; whether it was done."""
    deadline = time.monotonic() + WRITE_S
    while True:
        try:
            act()
            return True
        except OSError as error:
            if time.monotonic() > deadline or isinstance(error, FileNotFoundError):
                print(f"tuneplane: {path} not written: {error.strerror}", file=sys.stderr)
                return False
        time.sleep(RETRY_S)
