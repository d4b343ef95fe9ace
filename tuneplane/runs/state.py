"""How a run is: our own records decide, Slurm's word is evidence (squeue forgets, sacct may be off).

`read_states` asks squeue once, and sacct once for what squeue forgot, for any number of runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import Submission
from tuneplane.launch import slurm_commands
from tuneplane.launch.slurm_commands import Answer, SlurmJob, query_accounting, query_queue
from tuneplane.runs.adopt import note_unknown_jobs
from tuneplane.runs.causes import SLURMS, on_node, words
from tuneplane.runs.records import NodeState, Records, batch_words, number, read_records, settle, whole

FINAL = slurm_commands.FINAL | {"LOST", "NOT_SUBMITTED", "PAUSED", "NOT_RUN"}
"""States that a run does not leave by itself."""

FROM_OUTSIDE = slurm_commands.FINAL - {"COMPLETED", "FAILED", "CANCELLED"}
"""Slurm's states that say what ended a job; our own end record cannot know it."""

WAITING = frozenset(
    ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
)
"""Slurm's states of a job that starts, or starts anew: an end record is then of its former start."""

STOPPED = "stopped by tp job stop"
HELD = "held by tp job pause"
SAVING = "asked by tp job pause to save and end"

HELD_BY_USER = "JobHeldUser"
"""Slurm's reason of a job that `scontrol hold` keeps waiting. Source: squeue(1), JOB REASON CODES."""

DEPENDENCY = "Dependency"
"""Slurm's reason of a job that waits for another one."""

SETTLE_S = 600.0
"""How long after the last thing that we know of a job Slurm is asked again and again, whatever it says."""

CLEARED_WORDS = "tp job gc left its outputs alone"

NOT_BEGUN_CODE = 140
"""128 + USR2: `tp job pause` came before the job's script or agent could note the signal."""

NOT_NOTED_CODE = 75
"""A run that saved, to be continued, and that could not be noted. Source: `node/outcome.py`, NOT_NOTED."""


@dataclass(frozen=True)
class RunState:
    """What is known of a run. `state` is one of Slurm's words, or one of these:

    PREPARED: rendered, not submitted. INCOMPLETE: its folder is being made, or was left half-made.
    NOT_SUBMITTED: Slurm refused it. NOT_RUN: an operation whose run did not complete. PAUSED: it saved and ended
    because of `tp job pause`.
    LOST: it left no record of its end, and nothing knows it any more. UNKNOWN: who could know does not answer.

    nodes: of the start that the state tells of; empty while that start waits.
    follows: the cause of the restart that began the last attempt. cause: what ended it from outside.
    not_restarted: why the run did not start again. pending_restart: the cause of a restart that was decided
    and, though no job is left to do it, not carried out.
    """

    run_id: str
    experiment: str
    state: str
    code: int | None = None
    reason: str = ""
    job_id: str = ""
    attempt: int | None = None
    attempts: int = 0
    profile: str = ""
    nodes: list[NodeState] = field(default_factory=list)
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    folder: str = ""
    follows: str = ""
    cause: str = ""
    not_restarted: str = ""
    pending_restart: str = ""
    cleared: bool = False  # by `tp job gc`: its output folder alone is left
    rerun_of: str = ""
    operation: str = "train"
    subject: str = ""  # of an operation (export, eval): id of the run that it works on

    @property
    def is_final(self) -> bool:
        return self.state in FINAL

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Verdict:
    """The heart of a run's state."""

    state: str
    code: int | None = None
    reason: str = ""


def read_states(runs: Iterable[RunFolder]) -> list[RunState]:
    """The states of runs, in their order. Never raises: a folder that cannot be read is told as UNKNOWN."""
    folders = list(runs)
    own = note_unknown_jobs(folders)
    records = [read_records(run) for run in folders]
    known = [r for r in records if isinstance(r, Records) and not r.cleared]
    asking = [r for r in known if not r.is_settled()]
    ids = sorted({job.job_id for r in asking for job in r.starts() if not job.is_local})
    # Of this user's runs, all jobs are this user's; those of others have been asked for by their ids.
    mine = own is not None and not own.refused and all(_is_mine(r.run) for r in asking)
    queue = own if mine and own is not None else query_queue(ids) if ids else Answer()
    unsettled = sorted({job_id for r in asking for job_id in unsettled_jobs(r, queue)})
    books = query_accounting(unsettled) if unsettled else Answer()
    states = []
    for run, r in zip(folders, records, strict=True):
        if isinstance(r, Records):
            states.append(judge(r, queue, books))
            _settle(r, states[-1], queue, books)
        else:
            name, folder = run.path.parent.name, str(run.path)
            states.append(RunState(run.run_id, name, "UNKNOWN", reason=r, folder=folder))
    return states


def _is_mine(run: RunFolder) -> bool:
    try:
        return run.path.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _settle(records: Records, state: RunState, queue: Answer, books: Answer) -> None:
    """Where Slurm has forgotten the run's last job, keep what it said last: it can say nothing else any more."""
    job = present_job(records, queue)
    if job is None or job.is_local or records.cleared or records.is_settled():
        return
    if queue.refused or books.refused or queue.job_of(records.run.path, job.job_id) is not None:
        return
    booked = books.job_of(records.run.path, job.job_id)
    unsure = booked is not None and booked.state not in slurm_commands.FINAL
    moved_at = max(state.submitted_at or 0.0, state.started_at or 0.0, state.ended_at or 0.0)
    if time.time() - moved_at < SETTLE_S:
        return
    if state.is_final and state.state != "LOST" and not state.pending_restart and not unsure:
        settle(records, booked or SlurmJob(job.job_id, ""))


def read_state(run: RunFolder) -> RunState:
    """The state of one run."""
    return read_states([run])[0]


def unsettled_jobs(records: Records, queue: Answer) -> list[str]:
    """Slurm jobs of which sacct may know more than squeue and our own records."""
    job = present_job(records, queue)
    if job is None or job.is_local or queue.refused:
        return []
    ended = job == records.claimed and bool(records.end)
    if ended and records.completed():
        return []
    known = queue.job_of(records.run.path, job.job_id)
    return [job.job_id] if known is None or (known.state == "FAILED" and not ended) else []


def present_job(records: Records, queue: Answer) -> Submission | None:
    """The job whose state is the run's: the last attempt's while that runs, else the newest."""
    claimed, starts = records.claimed, records.starts()
    if claimed is not None and not records.end and _is_active(records, claimed, queue):
        return claimed
    return starts[-1] if starts else None


def judge(records: Records, queue: Answer, books: Answer) -> RunState:
    """A run's state, by its records and by what squeue and sacct answered."""
    if records.cleared:
        return _cleared(records)
    run, job = records.run, present_job(records, queue)
    current = job is not None and job == records.claimed
    if job is None:
        verdict = _never_submitted(records)
    else:
        refused = "" if job.is_local else queue.refused or books.refused
        verdict = _verdict(records, job, _evidence(records, job, queue, books), current, refused)
    began = current and verdict.state not in WAITING
    final = verdict.state in FINAL
    lost = records.pending_restart() if final and verdict.state != "COMPLETED" else ""
    not_restarted = str(records.end.get("not_restarted") or "") if began and final else ""
    return RunState(
        run_id=run.run_id,
        experiment=run.path.parent.name,
        state=verdict.state,
        code=verdict.code,
        reason=_whole_reason(records, verdict.reason, not_restarted, lost),
        job_id=job.job_id if job else "",
        attempt=records.attempts[-1].number if records.attempts else None,
        attempts=len(records.attempts),
        profile=records.profile,
        nodes=[_at_the_end(n) if final else n for n in records.nodes] if began else [],
        submitted_at=job.at if job else None,
        started_at=number(records.start.get("started_at")) if began else None,
        ended_at=number(records.end.get("ended_at")) if began else None,
        folder=str(run.path),
        follows=str(records.start.get("follows") or "") if began else "",
        cause=records.cause() if began and final else "",
        not_restarted=not_restarted,
        pending_restart=lost,
        rerun_of=records.rerun_of,
        operation=records.operation,
        subject=records.subject,
    )


def _at_the_end(node: NodeState) -> NodeState:
    """A node of a run that is over: its agent was killed where its record still says that it runs."""
    if node.state == "ended":
        return node
    return replace(node, state="lost" if node.code is None else "ended")


def _whole_reason(records: Records, reason: str, not_restarted: str, lost: str) -> str:
    """A verdict's reason, and why the run did not go on."""
    parts = [reason]
    if not_restarted:
        parts.append(f"not restarted: {not_restarted}")
    if lost:
        why = f" ({records.restart_error})" if records.restart_error else ""
        run_id = records.run.run_id
        parts.append(f"its restart was not carried out{why}: tp job resume {run_id} does it")
    return "; ".join(part for part in parts if part)


def _cleared(records: Records) -> RunState:
    """As `tp job gc` found it."""
    kept = records.cleared
    reason = str(kept.get("reason") or "")
    return RunState(
        run_id=records.run.run_id,
        experiment=records.run.path.parent.name,
        state=str(kept.get("state") or "UNKNOWN"),
        code=whole(kept.get("code")),
        reason="; ".join(part for part in (CLEARED_WORDS, reason) if part),
        job_id=str(kept.get("job_id") or ""),
        attempt=whole(kept.get("attempt")),
        attempts=whole(kept.get("attempts")) or 0,
        profile=records.profile,
        submitted_at=number(kept.get("submitted_at")),
        started_at=number(kept.get("started_at")),
        ended_at=number(kept.get("ended_at")),
        folder=str(records.run.path),
        cleared=True,
        rerun_of=records.rerun_of,
        operation=records.operation,
        subject=records.subject,
    )


def _verdict(
    records: Records, job: Submission, slurm: SlurmJob | None, current: bool, refused: str
) -> Verdict:
    """current: the last attempt is this job's, so that its records tell of this job."""
    if slurm and slurm.state in WAITING:
        return Verdict(slurm.state, None, _why_waiting(records, job, slurm))
    if current and records.end:
        if refused and not slurm and (records.restarted or records.pending_restart()):
            return Verdict("UNKNOWN", None, refused)  # it may be waiting for its next attempt
        return _ended(records, job, slurm)
    if records.not_run.get("job_id") == job.job_id and not current and not job.is_alive_here():
        return Verdict("NOT_RUN", None, str(records.not_run.get("reason") or ""))
    running = _how_running(records, job, current)
    if slurm and slurm.state not in FINAL:
        return Verdict(slurm.state, None, slurm.reason or running)
    if job.is_alive_here():
        share = "its share of this machine"
        until = f"{records.awaited} to complete, then for {share}" if records.awaited else share
        waits = Verdict("PENDING", None, f"waits for {until}")
        return Verdict("RUNNING", None, running) if current else waits
    if slurm:
        return _ended_without_record(records, job, slurm)
    if job.job_id in records.stopped:
        return Verdict("CANCELLED", None, STOPPED)
    if job.job_id in records.paused and job.is_here and not current:
        return _not_begun(records)
    nodes = records.nodes if current else []
    if nodes and all(n.code is not None for n in nodes):
        failed = next((n for n in nodes if n.code), None)
        return Verdict("FAILED", failed.code, failed.reason) if failed else Verdict("COMPLETED", 0)
    if any(records.is_fresh(n) for n in nodes):
        return Verdict("RUNNING", None, refused or running)
    if job.is_local and not job.is_here and not current:
        return Verdict("PENDING", None, f"waits on {job.host}, as far as this machine sees")
    if refused:
        return Verdict("UNKNOWN", None, refused)
    lost = "its process is gone" if job.is_local else "Slurm does not know it any more"
    words = batch_words(records.run, job)
    return Verdict("LOST", None, words or f"it left no record of its end, and {lost}")


def _why_waiting(records: Records, job: Submission, slurm: SlurmJob) -> str:
    """Slurm's reason, or ours where we know it better."""
    if slurm.reason == HELD_BY_USER and job.job_id in records.paused:
        return HELD
    if records.awaited and slurm.reason == DEPENDENCY:
        return f"waits for {records.awaited} to complete ({DEPENDENCY})"
    cause = records.cause()
    if not records.attempts or not cause or not records.waits_for(job):
        return slurm.reason
    last = records.attempts[-1].number
    said = f" ({slurm.reason})" if slurm.reason else ""
    return f"attempt {last + 1} waits: attempt {last} {words(cause)}{said}"


def _how_running(records: Records, job: Submission, current: bool) -> str:
    """What there is to say of a job that runs."""
    if job.job_id in records.paused:
        return SAVING
    follows = str(records.start.get("follows") or "") if current else ""
    return f"goes on after attempt {records.attempts[-1].number - 1} {words(follows)}" if follows else ""


def _not_begun(records: Records) -> Verdict:
    run_id = records.run.run_id
    return Verdict("PAUSED", None, f"paused before it had begun; tp job resume {run_id} starts it")


def _never_submitted(records: Records) -> Verdict:
    run = records.run
    try:
        told = run.submit_error.read_text(encoding="utf-8", errors="replace")
    except OSError:
        if records.is_whole:
            return Verdict("PREPARED", None, "rendered, not submitted")
        return Verdict("INCOMPLETE", None, "it is being made, or was left half-made by a tp that was killed")
    return Verdict("NOT_SUBMITTED", None, " ".join(told.split()))


def _ended(records: Records, job: Submission, slurm: SlurmJob | None) -> Verdict:
    """By our own end record; Slurm's word tells what ended it from outside."""
    code = whole(records.end.get("code"))
    if records.completed():
        return Verdict("COMPLETED", 0)
    told = on_node(str(records.end.get("reason") or ""), str(records.end.get("first_failing_node") or ""))
    there = slurm is not None and slurm.state not in FINAL
    if job.job_id in records.paused and not records.end.get("for_good") and not there:
        how = "it saved and ended" if code == 0 else told or "it ended"
        return Verdict("PAUSED", code, f"{how}; tp job resume {records.run.run_id} goes on")
    if slurm and slurm.state in FROM_OUTSIDE:
        return Verdict(slurm.state, code, told or slurm.reason)
    if records.end.get("for_good"):  # the failure of its own came first
        return Verdict("FAILED", code, told)
    if job.job_id in records.stopped:
        return Verdict("CANCELLED", code, STOPPED)
    if slurm and there:  # what ended it is Slurm's to say, a moment later
        return Verdict(slurm.state, None, slurm.reason)
    if slurm and slurm.state in ("CANCELLED", "FAILED") and records.went_on(job):
        return _ended_without_record(records, job, slurm)  # while it waited anew, or before its next claim
    by_us = str(records.end.get("cause") or "")
    if by_us in SLURMS:
        return Verdict(SLURMS[by_us], code, told or f"it {words(by_us)}")
    if slurm and slurm.state == "CANCELLED":
        return Verdict("CANCELLED", code, slurm.reason or told)
    if not records.end.get("stop_requested"):
        return Verdict("FAILED", code, told)
    saved = f"it was asked to save and end, and did: tp job retry {records.run.run_id} starts it again"
    return Verdict("CANCELLED", code, saved if code == 0 else told or "it was asked to end")


def _ended_without_record(records: Records, job: Submission, slurm: SlurmJob) -> Verdict:
    """By Slurm's word alone: the script was killed, or ended before it claimed an attempt."""
    if slurm.state == "CANCELLED" and job.job_id in records.stopped:
        return Verdict("CANCELLED", slurm.code, STOPPED)
    unasked = slurm.state == "FAILED" and slurm.code in (None, NOT_BEGUN_CODE)
    if job.job_id in records.paused and job != records.claimed and unasked:
        return _not_begun(records)
    code = 0 if slurm.state == "COMPLETED" else slurm.code
    saved = job == records.claimed and records.nodes and all(node.code == 0 for node in records.nodes)
    if slurm.state == "FAILED" and saved and code in (None, NOT_NOTED_CODE):
        told = f"it saved and ended, which could not be noted; tp job resume {records.run.run_id} goes on"
        return Verdict("FAILED", code, told)
    words = batch_words(records.run, job)
    first, second = (words, slurm.reason) if slurm.state == "FAILED" else (slurm.reason, words)
    return Verdict(slurm.state, code, first or second)


def _is_active(records: Records, job: Submission, queue: Answer) -> bool:
    if job.is_here:
        return job.is_alive_here()
    known = queue.job_of(records.run.path, job.job_id)
    if known is not None:
        return known.state not in FINAL
    return (job.is_local or bool(queue.refused)) and any(records.is_fresh(n) for n in records.nodes)


def _evidence(records: Records, job: Submission, queue: Answer, books: Answer) -> SlurmJob | None:
    """Slurm's word of a job. A state that is not final counts from squeue alone: sacct is told of ends late."""
    if records.settled is not None and records.settled.job_id == job.job_id and records.is_settled():
        return records.settled if records.settled.state else None
    run = records.run
    booked = books.job_of(run.path, job.job_id)
    return booked if booked is not None and booked.state in FINAL else queue.job_of(run.path, job.job_id)
