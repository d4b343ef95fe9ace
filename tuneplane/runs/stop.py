"""Ending a run for sure: asked through Slurm or by signal, then looked at until it is gone."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from tuneplane.kernel.errors import Fault, OperationError, TunePlaneError
from tuneplane.kernel.files import write_atomic
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import Submission, read_submissions
from tuneplane.launch import slurm_commands
from tuneplane.launch.slurm_commands import query_queue, run_slurm
from tuneplane.runs.folder import check_own
from tuneplane.runs.records import stopped_jobs
from tuneplane.runs.state import RunState, read_state

AGENT_S = 20.0
"""How much longer than the trainer's own grace the agent may take, to write how it ended."""

POLL_S = 0.3


def stop_run(run: RunFolder, wait_s: float = 120.0) -> RunState:
    """End every job of a run and wait until it is gone or `wait_s` is over; its state then.

    The secrets file goes with it: what was stopped does not start again by itself. A run that was never
    submitted, or has ended, is left as it is. Raises OperationError where Slurm does not answer, or the run is
    another machine's.
    """
    check_own(run)
    before = read_state(run)
    if before.is_final:
        run.secrets.unlink(missing_ok=True)
        for job in read_submissions(run)[-1:]:
            _stop_local(run, job)
    if before.is_final or before.state == "PREPARED":
        return before
    deadline = time.monotonic() + wait_s
    jobs = read_submissions(run)
    for job in jobs:
        if job.is_local and not job.is_here and job.job_id == before.job_id:
            remedy = f"say tp job stop {run.run_id} there"
            raise OperationError(Fault(f"{run.run_id} runs on {job.host}", "RUN", remedy))
    noted = stopped_jobs(run)
    _note(run, noted | {job.job_id for job in jobs})
    try:
        _stop_slurm(run, [job.job_id for job in jobs if not job.is_local], deadline)
        for job in jobs:
            if job.is_local:
                _stop_local(run, job)
    except OperationError:
        _note(run, noted)  # it was not stopped
        raise
    state = read_state(run)
    if state.is_final:
        run.secrets.unlink(missing_ok=True)
    return state


def _note(run: RunFolder, job_ids: frozenset[str]) -> None:
    if job_ids:
        write_atomic(run.stopped, "".join(f"{job_id}\n" for job_id in sorted(job_ids)), 0o600)
    else:
        run.stopped.unlink(missing_ok=True)


def _stop_slurm(run: RunFolder, job_ids: list[str], deadline: float) -> None:
    active = _active(run, job_ids)
    if active:
        run_slurm(["scancel", *active])
    while active and time.monotonic() < deadline:
        time.sleep(POLL_S)
        active = _active(run, active)


def _active(run: RunFolder, job_ids: list[str]) -> list[str]:
    """Which of these jobs Slurm still has. Raises OperationError where it does not answer."""
    answer = query_queue(job_ids) if job_ids else slurm_commands.Answer()
    if answer.refused:
        raise OperationError(Fault(answer.refused, "Slurm", "try again when its controller answers"))
    found = [answer.job_of(run.path, job_id) for job_id in answer.jobs]
    return [job.job_id for job in found if job is not None and job.state not in slurm_commands.FINAL]


def _stop_local(run: RunFolder, job: Submission) -> None:
    if not job.is_alive_here():
        return _end_leftovers(run, job)
    with suppress(ProcessLookupError):
        os.kill(job.pid, signal.SIGTERM)
    deadline = time.monotonic() + _grace_s(run) + AGENT_S
    while job.is_alive_here():
        if time.monotonic() > deadline:
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
