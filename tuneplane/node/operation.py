"""Whether an operation (export, eval) may start: what has become of the run that it waits for decides.

The batch script's claim asks on node 0 before any image is started, `local.py` before it takes a share of the
machine. An operation whose run goes on in another job is handed on to a job that waits for that one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.files import write_json
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import TP, read_submissions, record_submission
from tuneplane.node.allocation import slurm_job_id
from tuneplane.node.queue import OVER, read_queue
from tuneplane.node.restart import run_slurm
from tuneplane.node.subject import COMPLETED, GOES_ON, read_standing
from tuneplane.spec import JobSpec

HERE_S = 1.0
"""Between two looks at a run of this machine; of one on Slurm `SLURM_S`."""

SLURM_S = 15.0


def awaited_run(job: JobSpec) -> RunFolder | None:
    """The run that must be complete before this one starts; None of a run that trains."""
    subject = job.spec.subject
    return None if subject is None else RunFolder(Path(subject.awaited or subject.folder))


def admit(run: RunFolder, job: JobSpec, environ: Mapping[str, str]) -> bool:
    """Whether this start of a run goes on. False: it is handed on to another job, which waits.

    Raises OperationError where it is not to run at all, which is noted, or could not be handed on.
    """
    awaited = awaited_run(job)
    if awaited is None:
        return True
    own_id = slurm_job_id(environ)
    found = read_standing(awaited, environ)
    if found.state == COMPLETED:
        return True
    if found.state != GOES_ON:
        raise not_run(run, awaited, found.state, own_id)
    hand_on(run, awaited, found.job_id, own_id, environ)
    return False


def not_run(run: RunFolder, awaited: RunFolder, state: str, own_id: str) -> OperationError:
    """Note that the operation is not run, and why; its secrets go with it."""
    reason = f"not run: {awaited.run_id} is {state}"
    values = {"job_id": own_id, "state": state, "reason": reason, "at": time.time()}
    with suppress(OSError):  # its output says so all the same
        write_json(run.not_run, values)
        run.secrets.unlink(missing_ok=True)
    remedy = f"once that is COMPLETED: tp job retry {run.run_id}"
    return OperationError(Fault(reason, "", remedy))


def hand_on(run: RunFolder, awaited: RunFolder, after: str, own_id: str, environ: Mapping[str, str]) -> None:
    """A new job of the very same script, behind the job in which the run goes on. Raises OperationError.

    The intent is noted first: killed half-way, the run is seen to have lost its place.
    """
    values = {"job_id": own_id, "after": after, "at": time.time()}
    try:
        write_json(run.handed_on, {**values, "to": ""})
        others = [j for j in read_queue(run.path, environ) if own_id not in j.names and j.state not in OVER]
        waiting = [j for j in others if j.state != "COMPLETING"]
        to = waiting[-1].job_id if waiting else _submit(run, after, environ)
        if all(job.job_id != to for job in read_submissions(run)):
            record_submission(run, to, TP)
        write_json(run.handed_on, {**values, "to": to})
    except (OSError, OperationError) as error:
        words = error.faults[0].what if isinstance(error, OperationError) else str(error)
        what = f"{awaited.run_id} goes on in job {after}, and this run could not be handed on: {words}"
        raise OperationError(Fault(what, "", f"tp job retry {run.run_id}")) from None
    print(f"tuneplane: {awaited.run_id} goes on in job {after}: handed on to job {to}", file=sys.stderr)


def _submit(run: RunFolder, after: str, environ: Mapping[str, str]) -> str:
    argv = ["sbatch", "--parsable", f"--dependency=afterany:{after}", str(run.script)]
    return run_slurm(argv, environ).strip().split(";")[0]


def wait_here(run: RunFolder, job: JobSpec, job_id: str, environ: Mapping[str, str]) -> None:
    """On this machine: return once the run that is waited for is complete, holding nothing meanwhile.

    Raises OperationError where it ended otherwise.
    """
    awaited = awaited_run(job)
    if awaited is None:
        return
    pause_s = HERE_S if all(job.is_local for job in read_submissions(awaited)) else SLURM_S
    while (found := read_standing(awaited, environ)).state != COMPLETED:
        if found.state != GOES_ON:
            raise not_run(run, awaited, found.state, job_id)
        time.sleep(pause_s)
