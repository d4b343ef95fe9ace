"""How a run is: our own records decide, Slurm's word is evidence (squeue forgets, sacct may be off).

`read_states` asks squeue once, and sacct once for what squeue forgot, for any number of runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import Submission
from tuneplane.launch import slurm_commands
from tuneplane.launch.slurm_commands import Answer, SlurmJob, query_accounting, query_queue
from tuneplane.runs.adopt import note_unknown_jobs
from tuneplane.runs.records import NodeState, Records, batch_words, number, read_records, whole

FINAL = slurm_commands.FINAL | {"LOST", "NOT_SUBMITTED"}
"""States that a run does not leave by itself."""

FROM_OUTSIDE = slurm_commands.FINAL - {"COMPLETED", "FAILED", "CANCELLED"}
"""Slurm's states that say what ended a job; our own end record cannot know it."""

WAITING = frozenset(
    ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
)
"""Slurm's states of a job that starts, or starts anew: an end record is then of its former start."""

STOPPED = "stopped by tp job stop"


@dataclass(frozen=True)
class RunState:
    """What is known of a run. `state` is one of Slurm's words, or PREPARED, NOT_SUBMITTED, LOST, UNKNOWN.

    LOST: it left no record of its end, and nothing knows it any more. UNKNOWN: who could know does not answer.
    nodes: of the start that the state tells of; empty while that start waits.
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
    note_unknown_jobs(folders)
    records = [read_records(run) for run in folders]
    known = [r for r in records if isinstance(r, Records)]
    ids = sorted({job.job_id for r in known for job in r.starts() if not job.is_local})
    queue = query_queue(ids) if ids else Answer()
    unsettled = sorted({job_id for r in known for job_id in unsettled_jobs(r, queue)})
    books = query_accounting(unsettled) if unsettled else Answer()
    return [
        judge(r, queue, books)
        if isinstance(r, Records)
        else RunState(run.run_id, run.path.parent.name, "UNKNOWN", reason=r, folder=str(run.path))
        for run, r in zip(folders, records, strict=True)
    ]


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
    run, job = records.run, present_job(records, queue)
    current = job is not None and job == records.claimed
    if job is None:
        verdict = _never_submitted(run)
    else:
        refused = "" if job.is_local else queue.refused or books.refused
        verdict = _verdict(records, job, _evidence(run, job, queue, books), current, refused)
    began = current and verdict.state not in WAITING
    return RunState(
        run_id=run.run_id,
        experiment=run.path.parent.name,
        state=verdict.state,
        code=verdict.code,
        reason=verdict.reason,
        job_id=job.job_id if job else "",
        attempt=records.attempts[-1].number if records.attempts else None,
        attempts=len(records.attempts),
        profile=records.profile,
        nodes=records.nodes if began else [],
        submitted_at=job.at if job else None,
        started_at=number(records.start.get("started_at")) if began else None,
        ended_at=number(records.end.get("ended_at")) if began else None,
        folder=str(run.path),
    )


def _verdict(
    records: Records, job: Submission, slurm: SlurmJob | None, current: bool, refused: str
) -> Verdict:
    """current: the last attempt is this job's, so that its records tell of this job."""
    if slurm and slurm.state in WAITING:
        return Verdict(slurm.state, None, slurm.reason)
    if current and records.end:
        return _ended(records, job, slurm)
    if slurm and slurm.state not in FINAL:
        return Verdict(slurm.state, None, slurm.reason)
    if job.is_alive_here():
        waits = Verdict("PENDING", None, "waits for its share of this machine")
        return Verdict("RUNNING") if current else waits
    if slurm:
        return _ended_without_record(records, job, slurm)
    if job.job_id in records.stopped:
        return Verdict("CANCELLED", None, STOPPED)
    nodes = records.nodes if current else []
    if nodes and all(n.code is not None for n in nodes):
        failed = next((n for n in nodes if n.code), None)
        return Verdict("FAILED", failed.code, failed.reason) if failed else Verdict("COMPLETED", 0)
    if any(records.is_fresh(n) for n in nodes):
        return Verdict("RUNNING", None, refused)
    if job.is_local and not job.is_here and not current:
        return Verdict("PENDING", None, f"waits on {job.host}, as far as this machine sees")
    if refused:
        return Verdict("UNKNOWN", None, refused)
    lost = "its process is gone" if job.is_local else "Slurm does not know it any more"
    words = batch_words(records.run, job)
    return Verdict("LOST", None, words or f"it left no record of its end, and {lost}")


def _never_submitted(run: RunFolder) -> Verdict:
    try:
        told = run.submit_error.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Verdict("PREPARED", None, "rendered, not submitted")
    return Verdict("NOT_SUBMITTED", None, " ".join(told.split()))


def _ended(records: Records, job: Submission, slurm: SlurmJob | None) -> Verdict:
    """By our own end record; Slurm's word tells what ended it from outside."""
    code = whole(records.end.get("code"))
    if records.completed():
        return Verdict("COMPLETED", 0)
    node, reason = records.end.get("first_failing_node"), str(records.end.get("reason") or "")
    told = f"{reason} on {node}" if node and reason else reason
    if slurm and slurm.state in FROM_OUTSIDE:
        return Verdict(slurm.state, code, told or slurm.reason)
    if records.end.get("for_good"):  # the failure of its own came first
        return Verdict("FAILED", code, told)
    if job.job_id in records.stopped:
        return Verdict("CANCELLED", code, STOPPED)
    if slurm and slurm.state not in FINAL:  # what ended it is Slurm's to say, a moment later
        return Verdict(slurm.state, None, slurm.reason)
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
    code = 0 if slurm.state == "COMPLETED" else slurm.code
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


def _evidence(run: RunFolder, job: Submission, queue: Answer, books: Answer) -> SlurmJob | None:
    """Slurm's word of a job. A state that is not final counts from squeue alone: sacct is told of ends late."""
    booked = books.job_of(run.path, job.job_id)
    return booked if booked is not None and booked.state in FINAL else queue.job_of(run.path, job.job_id)
