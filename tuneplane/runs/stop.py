"""Ending a run for sure: asked through Slurm or by signal, then looked at until it is gone.

`pause.py` shares how a run's jobs are found again while they may start each other.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tuneplane.kernel.errors import Fault, OperationError, TunePlaneError
from tuneplane.kernel.files import write_atomic
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import Submission
from tuneplane.launch.slurm_commands import FINAL, SlurmJob, query_own, run_slurm
from tuneplane.runs.adopt import jobs_by_folder
from tuneplane.runs.folder import check_own
from tuneplane.runs.records import known_jobs, read_object, stopped_jobs
from tuneplane.runs.starting import is_being_started
from tuneplane.runs.state import RunState, read_state

AGENT_S = 20.0
"""How much longer than the trainer's own grace the agent may take, to write how it ended."""

POLL_S = 0.3

ASK_AGAIN_S = 2.0
"""How soon a job that goes on all the same (it had just been requeued) is cancelled once more."""

LAST_LOOK_S = 1.0
"""How long after its last job's end a run is looked at once more: a script that was killed while its sbatch was
under way leaves a successor that the queue shows a moment later."""

SLURMS_KILL_S = 30.0
"""Slurm's own pause between TERM and KILL. Source: slurm.conf(5), KillWait, its default."""

Told = Callable[[str], None]
"""Called with a sentence for each thing that was done."""


def unheard(sentence: str) -> None:
    """Nobody listens."""


def stop_run(run: RunFolder, wait_s: float = 120.0, told: Told = unheard, wait: bool = True) -> RunState:
    """End every job of a run and wait until it is gone or `wait_s` is over; its state then.

    A note is written first, with which nothing of the run starts again by itself; then its jobs are looked for
    again until none is left, since one may be requeued, or submit its successor, while it is being ended. The
    secrets file goes too. A run that was never submitted, or has ended for good, is left as it is. Raises
    OperationError where Slurm does not answer, or the run is another machine's.

    wait: False returns as soon as all jobs that are there have been asked to end.
    """
    check_own(run)
    before = read_state(run)
    may_go_on = before.state == "PAUSED" or bool(before.pending_restart)
    if before.state in ("PREPARED", "INCOMPLETE"):
        return before
    jobs = known_jobs(run)
    if before.is_final and not may_go_on:
        run.secrets.unlink(missing_ok=True)
        for job in jobs[-1:]:
            _stop_local(run, job, unheard)
        return before
    check_here(run, jobs, before.job_id, "stop")
    deadline = time.monotonic() + wait_s
    noted = stopped_jobs(run)
    write_note(run.stopped, noted | ({job.job_id for job in jobs} - _over(run)))
    try:
        _stop_slurm(run, deadline, told, wait)
        for job in jobs:
            if job.is_local:
                _stop_local(run, job, told)
    except NothingAsked as error:
        write_note(run.stopped, noted)  # it was not stopped
        raise OperationError(*error.faults) from None
    run.paused.unlink(missing_ok=True)
    state = read_state(run)
    if state.is_final:
        run.secrets.unlink(missing_ok=True)
    if may_go_on and before.is_final:
        told(f"it was {before.state}, and now does not go on")
    return state


def _over(run: RunFolder) -> set[str]:
    """Ids of jobs whose attempts have all ended and were followed by another job's: a stop is none of theirs."""
    found = [(str(read_object(a.start).get("job_id") or ""), a.end.exists()) for a in run.attempts()]
    going = {job_id for job_id, ended in found if not ended} | {job_id for job_id, _ in found[-1:]}
    return {job_id for job_id, _ in found} - going


class NothingAsked(OperationError):
    """Slurm refused before anything was asked of it."""


def check_here(run: RunFolder, jobs: Iterable[Submission], present: str, act: str) -> None:
    """Raise OperationError where a run's present job is a local one of another machine."""
    for job in jobs:
        if job.is_local and not job.is_here and job.job_id == present:
            remedy = f"say tp job {act} {run.run_id} there"
            raise OperationError(Fault(f"{run.run_id} runs on {job.host}", "RUN", remedy))


def write_note(path: Path, job_ids: Iterable[str]) -> None:
    """The note `stopped` or `paused`: a line for each job; without any, no note."""
    lines = "".join(f"{job_id}\n" for job_id in sorted(job_ids))
    if lines:
        write_atomic(path, lines, 0o600)
    else:
        path.unlink(missing_ok=True)


@dataclass
class Look:
    """What Slurm has of a run at one moment. `refused`: its words where it did not answer."""

    active: dict[str, SlurmJob]
    refused: str = ""


def look(run: RunFolder, also: Iterable[str] = ()) -> Look:
    """Every job of a run that is not over: those noted by now, those of `also`, those that work in its folder.

    Not one whose attempt ended without a lost node: Slurm waits minutes for that, which has fenced itself.
    An element of an array is known by its own id alone; its array's id would mean its siblings.
    """
    ids = {*also, *(job.job_id for job in known_jobs(run) if not job.is_local)}
    answer = query_own()
    if answer.refused:
        return Look({}, answer.refused)
    here = jobs_by_folder(answer).get(os.path.realpath(run.path), [])
    found = {job.job_id: job for job in here}
    for job_id in ids:
        job = answer.job_of(run.path, job_id)
        if job is not None and job.job_id == job_id and job.state not in FINAL:
            found[job_id] = job
    fenced = _fenced(run) if any(job.state == "COMPLETING" for job in found.values()) else set()
    return Look({i: job for i, job in found.items() if job.state != "COMPLETING" or i not in fenced})


def _fenced(run: RunFolder) -> set[str]:
    """Ids of jobs whose last attempt ended because nodes were lost: it ended once those had fenced themselves."""
    last = {str(read_object(a.start).get("job_id")): a for a in run.attempts()}
    return {job_id for job_id, a in last.items() if a.fence.exists() and a.end.exists()}


def _stop_slurm(run: RunFolder, deadline: float, told: Told, wait: bool) -> None:
    """Cancel what is there until nothing is, and nothing comes any more."""
    if not any(not job.is_local for job in known_jobs(run)):
        return
    asked: dict[str, float] = {}  # job → when it was last cancelled
    kill_at = time.monotonic() + max(SLURMS_KILL_S, _grace_s(run)) + AGENT_S
    quiet_since: float | None = None
    refused = ""
    while True:
        now = time.monotonic()
        seen = look(run, asked)
        if seen.refused and not asked:
            raise NothingAsked(Fault(seen.refused, "Slurm", "try again when its controller answers"))
        refused = seen.refused or refused
        if not seen.refused:
            write_note(run.stopped, stopped_jobs(run) | seen.active.keys())
            due = [
                job
                for job in seen.active.values()
                if job.job_id not in asked
                or (job.state != "COMPLETING" and now - asked[job.job_id] >= ASK_AGAIN_S)
            ]
            refused = _cancel(due, asked, told)
            if refused and not set(asked) & seen.active.keys() and look(run, asked).active:
                raise NothingAsked(Fault(refused, "Slurm", f"tp job status {run.run_id}"))
            if now >= kill_at and seen.active:
                _kill(list(seen.active), told)
                kill_at = now + SLURMS_KILL_S
            if seen.active or is_being_started(run):
                quiet_since = None
            elif quiet_since is None:
                quiet_since = now
            if quiet_since is not None and (not run.attempts() or now - quiet_since >= LAST_LOOK_S):
                return
            if not wait and not due and not refused:
                return
        if now >= deadline:
            break
        time.sleep(POLL_S)
    if refused:
        remedy = f"the note that it is stopped stays; say tp job stop {run.run_id} again"
        raise OperationError(Fault(refused, "Slurm", remedy))


def _cancel(due: list[SlurmJob], asked: dict[str, float], told: Told) -> str:
    """Cancel jobs; Slurm's words where it refused. TERM to the steps, and KILL after Slurm's own KillWait."""
    if not due:
        return ""
    try:
        run_slurm(["scancel", *sorted(job.job_id for job in due)])
    except OperationError as error:
        return error.faults[0].what
    for job in due:
        again = ", which had come back," if job.job_id in asked else ""
        told(f"Slurm job {job.job_id}{again} was cancelled while it was {job.state}")
        asked[job.job_id] = time.monotonic()
    return ""


def _kill(job_ids: list[str], told: Told) -> None:
    with suppress(OperationError):  # already ending: then its nodes are still being cleared
        run_slurm(["scancel", "--signal=KILL", "--full", *sorted(job_ids)])
        told(f"Slurm job {', '.join(sorted(job_ids))} did not end within its grace and was killed")


def _stop_local(run: RunFolder, job: Submission, told: Told) -> None:
    if not job.is_alive_here():
        return _end_leftovers(run, job)
    with suppress(ProcessLookupError):
        os.kill(job.pid, signal.SIGTERM)
    told(f"process {job.pid} was told to end")
    deadline = time.monotonic() + _grace_s(run) + AGENT_S
    while job.is_alive_here():
        if time.monotonic() > deadline:
            told(f"process {job.pid} did not end within its grace and was killed")
            return _kill_local(run, job)
        time.sleep(0.1)


def _kill_local(run: RunFolder, job: Submission) -> None:
    """The agent does not answer: end it, then whatever it had started."""
    with suppress(ProcessLookupError):
        os.kill(job.pid, signal.SIGKILL)
    _end_leftovers(run, job)


def _end_leftovers(run: RunFolder, job: Submission) -> None:
    """End what a local run's agent had started, once that is gone itself: killed, it takes nobody along."""
    from tuneplane.node.leftovers import end_leftovers

    attempts = run.attempts()
    if job.is_here and attempts:
        end_leftovers(run.run_id, attempts[-1].number + 1)


def _grace_s(run: RunFolder) -> float:
    from tuneplane.spec import read

    try:
        return read(run.job).spec.node.stop_grace_s
    except (OSError, TunePlaneError):
        return 0.0
