"""How the run is that an operation waits for: by that run's own records, Slurm's queue where they are silent.

`operation.py` asks on node 0 before an attempt is claimed; Slurm's exit codes are not looked at.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuneplane.kernel.errors import OperationError
from tuneplane.kernel.runfolder import RunFolder, noted_jobs
from tuneplane.kernel.submission import Submission, read_submissions
from tuneplane.node.queue import OVER, QueuedJob, read_queue
from tuneplane.node.record import read_record
from tuneplane.node.restart import NODE_FAILURE, PREEMPTION, WALLTIME

COMPLETED, GOES_ON = "COMPLETED", "GOES_ON"

SLURMS = {WALLTIME: "TIMEOUT", PREEMPTION: "PREEMPTED", NODE_FAILURE: "NODE_FAIL"}
"""Causes in Slurm's own words, as `tp job status` has them."""

SETTLE_S = 5.0
"""How long a record that should be there is looked for: another node's write shows up late on shared storage."""

LOOK_AGAIN_S = 1.0

SLURM_AWAY_S = 60.0
"""How long a Slurm that does not answer is asked again: its controller may just be restarted."""

CLEARED = "cleared.json"
"""What `tp job gc` leaves of a run's records. Source: runs/records.py."""


@dataclass(frozen=True)
class Standing:
    """state: COMPLETED, GOES_ON, or what the run ended as. job_id: its newest job, where it goes on."""

    state: str
    job_id: str = ""


@dataclass(frozen=True)
class Evidence:
    """What the run's folder says, and which of its jobs are there. alive: local ones with a process here."""

    end: dict[str, Any] = field(default_factory=dict)  # of the last attempt
    start: dict[str, Any] = field(default_factory=dict)
    restarted: dict[str, Any] = field(default_factory=dict)  # the job that carries its restart out
    cleared: dict[str, Any] = field(default_factory=dict)
    not_run: dict[str, Any] = field(default_factory=dict)  # of an operation that another one waits for
    jobs: tuple[str, ...] = ()  # ids, oldest first
    stopped: frozenset[str] = frozenset()
    paused: frozenset[str] = frozenset()
    alive: tuple[str, ...] = ()
    queue: tuple[QueuedJob, ...] = ()


def standing(evidence: Evidence) -> Standing:
    """How the run is. Pure. A run whose last attempt says that it is complete is that, whatever else is queued."""
    e = evidence
    if e.cleared:
        return Standing(str(e.cleared.get("state") or "LOST"))
    if is_complete(e.end):
        return Standing(COMPLETED)
    there = [job for job in e.queue if job.state not in OVER and _waits_or_runs(job, e)]
    if there:
        return Standing(GOES_ON, there[-1].job_id)
    claimed = str(e.start.get("job_id") or "")
    going = [job_id for job_id in e.alive if not (e.end and job_id == claimed)]
    if going:
        return Standing(GOES_ON, going[-1])
    newest = e.jobs[-1] if e.jobs else ""
    if not newest:
        return Standing("NOT_SUBMITTED")
    if e.not_run and e.not_run.get("job_id") == newest:
        return Standing("NOT_RUN")
    return Standing(_ended(e, claimed, newest))


def is_complete(end: Mapping[str, Any]) -> bool:
    """Whether an attempt's end record says that nothing is left to do."""
    return bool(end) and end.get("code") == 0 and end.get("for_good") is not False


def _waits_or_runs(job: QueuedJob, e: Evidence) -> bool:
    """A job that Slurm still clears away is over, unless it was requeued."""
    if job.state != "COMPLETING":
        return True
    return e.restarted.get("way") == "requeue" and str(e.restarted.get("job_id")) in job.names


def _ended(e: Evidence, claimed: str, newest: str) -> str:
    """What a run that does not go on ended as."""
    by_slurm = next((job.state for job in e.queue if newest in job.names and job.state in OVER), "")
    if e.end and claimed == newest:
        if e.end.get("code") and e.end.get("for_good"):
            return "FAILED"
        noted = "CANCELLED" if newest in e.stopped else "PAUSED" if newest in e.paused else ""
        cause = SLURMS.get(str(e.end.get("cause")), "")
        return noted or cause or ("FAILED" if e.end.get("code") else "CANCELLED")
    if newest in e.stopped:
        return "CANCELLED"
    if newest in e.paused:
        return "PAUSED"
    return by_slurm if by_slurm and by_slurm != COMPLETED else "LOST"


def read_standing(run: RunFolder, environ: Mapping[str, str]) -> Standing:
    """How the run is now. Raises OperationError where Slurm would have to tell and does not answer for a while."""
    started = time.monotonic()
    while True:
        try:
            found = standing(read_evidence(run, environ))
        except OperationError:
            if time.monotonic() > started + SLURM_AWAY_S:
                raise
        else:
            if found.state != "LOST" or time.monotonic() > started + SETTLE_S:
                return found
        time.sleep(LOOK_AGAIN_S)


def read_evidence(run: RunFolder, environ: Mapping[str, str]) -> Evidence:
    """What there is of a run. Slurm is asked where its records alone do not say that it is complete."""
    last = run.attempts()[-1:]
    end = read_record(last[0].end) if last else {}
    jobs = read_submissions(run)
    asks = not is_complete(end) and any(not job.is_local for job in jobs)
    return Evidence(
        end=end,
        start=read_record(last[0].start) if last else {},
        restarted=read_record(last[0].restarted) if last else {},
        cleared=read_record(run.path / CLEARED) if not run.script.exists() else {},
        not_run=read_record(run.not_run),
        jobs=tuple(_ids(jobs, read_record(last[0].restarted) if last else {})),
        stopped=noted_jobs(run.stopped),
        paused=noted_jobs(run.paused),
        alive=tuple(job.job_id for job in jobs if job.is_alive_here()),
        queue=tuple(read_queue(run.path, environ, ended=True)) if asks else (),
    )


def _ids(jobs: list[Submission], restarted: Mapping[str, Any]) -> list[str]:
    """Every job of the run, oldest first, a successor among them that could not be noted."""
    ids = [job.job_id for job in jobs]
    successor = str(restarted.get("job_id") or "")
    return ids if not successor or successor in ids else [*ids, successor]
