"""Pausing a run: a job that waits is held, one that runs is asked to save and end, until neither goes on.

`tp job resume` is `tuneplane.start.resume`.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field

from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.kernel.files import read_json
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.kernel.submission import Submission
from tuneplane.launch.slurm_commands import SlurmJob, run_slurm
from tuneplane.runs.folder import check_own
from tuneplane.runs.records import known_jobs, paused_jobs, stopped_jobs
from tuneplane.runs.state import HELD_BY_USER, WAITING, RunState, read_state
from tuneplane.runs.stop import POLL_S, NothingAsked, Told, check_here, look, unheard, write_note

WAIT_S = 600.0
"""How long `tp job pause` waits for a run to save: a large checkpoint takes minutes."""

ASK_S = 30.0
"""How long a job that has just begun may take until it can be asked, with --no-wait too."""

HOLDS = 5
"""How often Slurm may refuse to hold a job that waits: it may start, or begin to wait anew, at that moment."""


def pause_run(run: RunFolder, wait_s: float = WAIT_S, told: Told = unheard, wait: bool = True) -> RunState:
    """Hold a run that waits, or ask one that runs to save and end; its state once that is done or `wait_s` over.

    A note is written first, with which the run does not start again by itself. Raises UsageError where there
    is nothing to pause, OperationError where Slurm refuses.
    """
    check_own(run)
    before = read_state(run)
    if before.is_final or before.state in ("PREPARED", "INCOMPLETE"):
        raise UsageError(_nothing_to_pause(run, before))
    if before.job_id in stopped_jobs(run):
        raise UsageError(Fault(f"{run.run_id} is being stopped", "RUN", f"tp job status {run.run_id}"))
    jobs = known_jobs(run)
    check_here(run, jobs, before.job_id, "pause")
    noted = paused_jobs(run)
    pausing = _Pausing(run, time.monotonic(), wait_s, told, wait)
    write_note(run.paused, noted | {before.job_id})
    try:
        if before.job_id.startswith("local-"):
            pausing.local(next(job for job in reversed(jobs) if job.job_id == before.job_id))
        else:
            pausing.slurm()
    except NothingAsked as error:
        write_note(run.paused, noted)
        raise OperationError(*error.faults) from None
    return read_state(run)


def _nothing_to_pause(run: RunFolder, state: RunState) -> Fault:
    if state.state == "PAUSED":
        return Fault(f"{run.run_id} is paused already", "RUN", f"tp job resume {run.run_id} goes on")
    if state.pending_restart:
        return Fault(f"{run.run_id} does not run: {state.reason}", "RUN", f"tp job stop {run.run_id} ends it")
    return Fault(f"{run.run_id} is {state.state}, so there is nothing to pause", "RUN", "tp job ls")


@dataclass
class _Pausing:
    """One pause of a run, and what was asked so far."""

    run: RunFolder
    begun: float
    wait_s: float
    told: Told
    wait: bool
    saving: set[tuple[str, int]] = field(default_factory=set)  # job and attempt
    held: set[str] = field(default_factory=set)
    holds: int = 0
    refused: str = ""

    def slurm(self) -> None:
        """Hold or ask every job of the run, those too that it starts meanwhile."""
        while True:
            seen = look(self.run, paused_jobs(self.run))
            if seen.refused and not (self.saving or self.held):
                raise NothingAsked(Fault(seen.refused, "Slurm", "try again when its controller answers"))
            if not seen.refused:
                write_note(self.run.paused, paused_jobs(self.run) | seen.active.keys())
                waits = [self._pause(job) for job in seen.active.values()]
                if all(done is False for done in waits):
                    return
                if not self.wait and all(done is not None for done in waits):
                    return
            if self._is_late():
                if not (self.saving or self.held):
                    what = f"the script of {self.run.run_id} has not begun by now, so it could not be asked"
                    raise NothingAsked(Fault(what, "Slurm", f"say tp job pause {self.run.run_id} again"))
                return
            time.sleep(POLL_S)

    def _is_late(self) -> bool:
        waited = time.monotonic() - self.begun
        return waited > (self.wait_s if self.wait else ASK_S)

    def _pause(self, job: SlurmJob) -> bool | None:
        """False: it is held. True: it is asked, or ends. None: it is to be looked at again."""
        if job.state in WAITING:
            return self._hold(job)
        if job.state == "COMPLETING":
            return True
        attempt = _attempt_of(self.run, job.job_id)
        if attempt is None:  # its script has not come so far; a signal would end it without a word
            return None
        key = (job.job_id, attempt.number)
        if key not in self.saving:
            self.saving.add(key)
            with suppress(OSError):  # a full disk: the batch script and the agents try it as well
                attempt.stop_marker.touch()
            with suppress(OperationError):  # it has just ended
                run_slurm(["scancel", "--signal=USR2", "--batch", job.job_id])
            self.told(f"attempt {attempt.number} (Slurm job {job.job_id}) was asked to save and end")
        return True

    def _hold(self, job: SlurmJob) -> bool | None:
        if job.reason == HELD_BY_USER:
            if job.job_id not in self.held:
                self.held.add(job.job_id)
                self.told(f"Slurm job {job.job_id} is held")
            return False
        try:
            run_slurm(["scontrol", "hold", job.job_id])
        except OperationError as error:
            self.holds += 1
            if self.holds > HOLDS:
                raise NothingAsked(Fault(error.faults[0].what, "Slurm", "tp job status tells")) from None
        return None

    def local(self, job: Submission) -> None:
        """USR2 to the agent, which leaves the stop marker; a run that still waits for its share ends by it."""
        attempt = _attempt_of(self.run, job.job_id)
        if attempt is not None:
            with suppress(OSError):
                attempt.stop_marker.touch()
        with suppress(ProcessLookupError):
            if job.is_alive_here():
                os.kill(job.pid, signal.SIGUSR2)
        self.told(
            f"attempt {attempt.number} (process {job.pid}) was asked to save and end"
            if attempt
            else f"process {job.pid}, which waited for its share of this machine, was ended"
        )
        while self.wait and job.is_alive_here() and not self._is_late():
            time.sleep(POLL_S)


def _attempt_of(run: RunFolder, job_id: str) -> AttemptFolder | None:
    """The attempt that a job runs: the last one, where it is this job's and has not ended."""
    for attempt in run.attempts()[-1:]:
        with suppress(OSError, ValueError):
            start = read_json(attempt.start)
            if isinstance(start, dict) and start.get("job_id") == job_id and not attempt.end.exists():
                return attempt
    return None
