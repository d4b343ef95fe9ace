"""How an attempt ended: one code and one reason out of its nodes' records, and whether the run goes on.

The batch script calls it once every node has ended, `local.py` after its one, another node where node 0 is dead.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneplane.kernel.errors import OperationError, TunePlaneError
from tuneplane.kernel.files import write_json
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder, noted_jobs
from tuneplane.node.allocation import slurm_job_id
from tuneplane.node.fence import fenced_after_s, silence_sentence
from tuneplane.node.progress import Progress, has_progressed, read_progress, recorded
from tuneplane.node.record import read_record
from tuneplane.node.restart import (
    WALLTIME,
    Plan,
    SlurmWord,
    ask_slurm,
    carry_out,
    cause_of,
    chain_ended,
    excluded,
    note_intent,
    requeued_by_slurm,
    run_slurm,
)
from tuneplane.spec import JobSpec, read

WRITE_S = 10.0
"""How long end and intent are tried to be written where the disk is full; the exit code is told all the same."""

RETRY_S = 0.5

NOT_NOTED = 75
"""The exit code where a run saved, to be continued, and that could not be noted: EX_TEMPFAIL of sysexits.h."""

TAIL_BYTES = 1 << 16
"""What is read of the batch script's output: Slurm says why it ends a job as it does so."""

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


def judge(
    nodes: list[dict[str, Any]], srun_code: int, marked: bool, dead: Sequence[dict[str, Any]] = ()
) -> Outcome:
    """The outcome of an attempt. Pure.

    nodes: their records; marked: whether the stop marker is there; dead: nodes that were found silent, which
    come before all else, since the ranks of the others fail for want of them. srun's own code is the highest
    of all tasks, so a victim's 137 would hide the culprit's 1. A node that failed by itself comes first, the
    earliest of them, and the others were told to end because of it; then one that left no exit record while
    srun failed; then one that was told to end from outside.
    """
    failed = sorted((n for n in nodes if n.get("code")), key=lambda n: float(n.get("ended_at") or 0))
    own = [n for n in failed if not n.get("told_to_stop")]
    silent = [n for n in nodes if n.get("code") is None] if srun_code else []
    stopped = marked or any(n.get("told_to_stop") for n in nodes)
    for node in dead:
        silent_s = max(float(n.get("silent_s") or 0) for n in dead)
        told = silence_sentence([str(n.get("host")) for n in dead], silent_s)
        return Outcome(srun_code or ENDED_ELSEWHERE, node, told, False, False)
    for node in own:
        return Outcome(int(node["code"]), node, node.get("reason"), marked, True, failed_itself=True)
    for node in silent:
        # The others were told to end because of it; whether anybody asked for that first, Slurm knows.
        return Outcome(srun_code, node, NO_RECORD, False, False)
    for node in failed:
        return Outcome(int(node["code"]), node, node.get("reason"), stopped, False)
    reason = f"srun ended with exit code {srun_code}, and no node failed" if srun_code else None
    return Outcome(srun_code, None, reason, stopped, srun_code == 0 and not stopped)


def never_began(nodes: list[dict[str, Any]], hosts: list[str]) -> list[dict[str, Any]]:
    """A silent record for each host of the claim whose agent left none: no Python there, no storage, no node."""
    seen = {node.get("rank") for node in nodes}
    return [{"rank": rank, "host": host} for rank, host in enumerate(hosts) if rank not in seen]


def end(run: RunFolder, number: int, srun_code: int, environ: Mapping[str, str], rank: int = 0) -> int:
    """End an attempt: its record written, the run started again where it goes on; the exit code.

    rank: whose agent or batch script calls it. May be called again where it was killed half-way. Secrets of a
    run that ended for good are removed.
    """
    attempt, job = run.attempt(number), read(run.job)
    job_id = str(read_record(attempt.start).get("job_id") or slurm_job_id(environ))
    fence = read_record(attempt.fence)
    if fence and fence.get("by") != rank:
        return srun_code or ENDED_ELSEWHERE  # node 0 was given up by the others, who see to the end
    if not attempt.end.exists():
        if fence:
            _wait_until_fenced(attempt, job, fence)
        code = _end(run, attempt, job, srun_code, job_id, fence, environ)
    else:
        code = int(read_record(attempt.end).get("code") or 0)
    if attempt.restart.exists() and not carry_out(run, attempt, job, job_id, environ):
        told = attempt.restart_error.read_text(encoding="utf-8", errors="replace").strip()
        print(f"tuneplane: the run does not go on by itself: {told}", file=sys.stderr)
    return code


def end_for_node_0(run: RunFolder, attempt: AttemptFolder, environ: Mapping[str, str]) -> None:
    """On another node, node 0 being dead: end the attempt, and the job, which its batch script cannot end."""
    rank = int(environ.get("SLURM_NODEID", "0"))
    try:
        end(run, attempt.number, ENDED_ELSEWHERE, environ, rank)
    except (OSError, TunePlaneError) as error:
        print(f"tuneplane: the attempt could not be ended: {error}", file=sys.stderr)
    job_id = slurm_job_id(environ)
    if job_id:
        with suppress(OperationError):
            run_slurm(["scancel", job_id], environ)


def _end(
    run: RunFolder,
    attempt: AttemptFolder,
    job: JobSpec,
    srun_code: int,
    job_id: str,
    fence: dict[str, Any],
    environ: Mapping[str, str],
) -> int:
    nodes = [record for path in sorted(attempt.path.glob("node-*.json")) if (record := read_record(path))]
    start = read_record(attempt.start)
    nodes += never_began(nodes, start.get("hosts") or []) if srun_code else []
    outcome = judge(nodes, srun_code, attempt.stop_marker.exists(), fence.get("nodes") or [])
    progress = read_progress(run, job, attempt.number)
    plan = make_plan(run, attempt, job, outcome, progress, bool(fence), job_id, environ)
    noted = not plan.way or _write(lambda: note_intent(attempt, plan), attempt.restart)
    values = {
        "code": outcome.code,
        "srun_code": srun_code,
        "first_failing_node": outcome.node.get("host") if outcome.node else None,
        "first_failing_rank": outcome.node.get("rank") if outcome.node else None,
        "reason": outcome.reason,
        "stop_requested": outcome.stop_requested,
        "for_good": outcome.for_good,
        "cause": plan.cause,
        "to_be_continued": bool(plan.way),
        "not_restarted": plan.refused,
        "progress": progress.as_dict(),
        "ended_at": time.time(),
    }
    written = _write(lambda: write_json(attempt.end, values), attempt.end)
    # An old attempt that was cut off and ends late must not take them from its successor.
    if (outcome.for_good or plan.refused) and run.attempts()[-1:] == [attempt]:
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


def make_plan(
    run: RunFolder,
    attempt: AttemptFolder,
    job: JobSpec,
    outcome: Outcome,
    progress: Progress,
    dead: bool,
    job_id: str,
    environ: Mapping[str, str],
) -> Plan:
    """Whether this run goes on, and how. Asks Slurm where the records alone do not tell the cause."""
    slurm = job.spec.slurm
    if slurm is None or run.attempts()[-1:] != [attempt]:  # one that was cut off ends late
        return Plan()
    if job_id in noted_jobs(run.stopped) | noted_jobs(run.paused):
        return Plan()
    itself, completed = outcome.failed_itself, outcome.for_good and not outcome.code
    word = SlurmWord() if dead or itself or completed else ask_slurm(job_id, environ)
    start = read_record(attempt.start)
    started_at = float(start.get("started_at") or 0)
    cause = cause_of(
        dead=dead,
        failed_itself=itself,
        completed=completed,
        asked_at=_changed_at(attempt.stop_marker),
        word=word,
        warned_s=slurm.signal_before_end_s or 0,
        now=time.time(),
    )
    if not cause:
        if word.restarts <= int(start.get("restart_count") or 0):
            return Plan()
        output = run.slurm / f"{environ.get('SLURM_JOB_ID', job_id)}.out"
        # It starts again, and nothing is left to do; past the limit its claim is refused.
        cause = requeued_by_slurm(_tail(output), started_at)
        return Plan(cause, refused=chain_ended(run, attempt.number, job) if cause else "")
    refused = chain_ended(run, attempt.number, job)
    if refused:
        return Plan(cause, refused=refused)
    before = [recorded(read_record(a.end)) for a in run.attempts() if a.number < attempt.number]
    if cause == WALLTIME and not has_progressed(progress, before, started_at):
        since = f" since attempt {attempt.number - 1}" if attempt.number else ""
        return Plan(
            cause, refused=f"no progress{since}: no new checkpoint in out/checkpoints and no new step"
        )
    # Slurm would give the dead node again, and a node that our agents alone saw die is none to it.
    way = "successor" if dead else job.spec.restart.way
    return Plan(cause, way, excluded(run, job, attempt.number))


def _wait_until_fenced(attempt: AttemptFolder, job: JobSpec, fence: dict[str, Any]) -> None:
    """Until no process of this attempt can be left: the others' have ended, the dead nodes fenced themselves."""
    dead = fence.get("nodes") or []
    silent_s = max((float(node.get("silent_s") or 0) for node in dead), default=0.0)
    sure_at = float(fence.get("at") or time.time()) - silent_s + fenced_after_s(job.spec.node.heartbeat_s)
    while time.time() < sure_at:
        time.sleep(min(RETRY_S, max(0.0, sure_at - time.time())))


def _tail(path: Path) -> str:
    """The last words in the batch script's output; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _changed_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _write(act: Callable[[], object], path: Path) -> bool:
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
