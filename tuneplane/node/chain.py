"""Whether a run goes on after an attempt that did not settle it, and its next start.

`outcome.py` calls it as an attempt ends, and the agent of another node where node 0 is dead.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tuneplane.kernel.errors import OperationError, TunePlaneError
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder, noted_jobs
from tuneplane.node.allocation import slurm_job_id
from tuneplane.node.attempt import chain_ended
from tuneplane.node.outcome import ENDED_ELSEWHERE, end, write_for_a_while
from tuneplane.node.progress import Progress, has_progressed, read_progress, recorded
from tuneplane.node.record import read_record
from tuneplane.node.restart import (
    WALLTIME,
    Plan,
    SlurmWord,
    ask_slurm,
    carry_out,
    cause_of,
    excluded,
    note_intent,
    requeued_by_slurm,
    run_slurm,
)
from tuneplane.node.silence import fenced_after_s
from tuneplane.spec import JobSpec, read

TAIL_BYTES = 1 << 16
"""What is read of the batch script's output: Slurm says why it ends a job as it does so."""


def plan_next(
    run: RunFolder, attempt: AttemptFolder, fence: dict[str, Any], environ: Mapping[str, str]
) -> dict[str, Any]:
    """Decide, and note the intent where the run goes on: what the end record says of it.

    Returns once no process of the attempt can be left.
    """
    job = read(run.job)
    if fence:
        _wait_until_fenced(job, fence)
    progress = read_progress(run, job, attempt.number)
    plan = _make_plan(run, attempt, job, progress, bool(fence), environ)
    if plan.way:
        write_for_a_while(lambda: note_intent(attempt, plan), attempt.restart)
    return {
        "cause": plan.cause,
        "to_be_continued": bool(plan.way),
        "not_restarted": plan.refused,
        "progress": progress.as_dict(),
    }


def go_on(run: RunFolder, attempt: AttemptFolder, environ: Mapping[str, str]) -> None:
    """Carry out the intent, once; what Slurm refuses is told here and kept beside it."""
    if not carry_out(run, attempt, read(run.job), _job_id(attempt, environ), environ):
        told = attempt.restart_error.read_text(encoding="utf-8", errors="replace").strip()
        print(f"tuneplane: the run does not go on by itself: {told}", file=sys.stderr)


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


def _make_plan(
    run: RunFolder,
    attempt: AttemptFolder,
    job: JobSpec,
    progress: Progress,
    dead: bool,
    environ: Mapping[str, str],
) -> Plan:
    """How this run goes on. Asks Slurm where the records alone do not tell the cause."""
    slurm, job_id = job.spec.slurm, _job_id(attempt, environ)
    if slurm is None or run.attempts()[-1:] != [attempt]:  # another one may have begun meanwhile
        return Plan()
    if job_id in noted_jobs(run.stopped) | noted_jobs(run.paused):
        return Plan()
    start = read_record(attempt.start)
    started_at = float(start.get("started_at") or 0)
    word = SlurmWord() if dead else ask_slurm(job_id, environ)
    cause = cause_of(
        dead=dead,
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


def _job_id(attempt: AttemptFolder, environ: Mapping[str, str]) -> str:
    return str(read_record(attempt.start).get("job_id") or slurm_job_id(environ))


def _wait_until_fenced(job: JobSpec, fence: dict[str, Any]) -> None:
    """Until no process of this attempt can be left: the others' have ended, the dead nodes fenced themselves."""
    dead = fence.get("nodes") or []
    silent_s = max((float(node.get("silent_s") or 0) for node in dead), default=0.0)
    fenced_s = fenced_after_s(job.spec.node.heartbeat_s)
    since_s = time.time() - float(fence.get("at") or time.time()) + silent_s
    time.sleep(min(max(0.0, fenced_s - since_s), fenced_s))  # a clock that was set back prolongs nothing


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
