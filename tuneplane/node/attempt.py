"""Attempts: claimed before anything runs, ended once. Called by the batch script on node 0.

A claim is a folder that appears with its content by one rename: of two starts at once, one gets it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.files import read_json, write_json
from tuneplane.kernel.process import is_alive, start_ticks
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.kernel.submission import record_submission
from tuneplane.node.address import head_address, pick_port
from tuneplane.node.allocation import slurm_job_id
from tuneplane.spec import JobSpec

ACTIVE_STATES = frozenset(
    ["RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"]
)
"""Slurm states in which a job's processes may still be there. Source: squeue(1), JOB STATE CODES."""

BEATS_UNTIL_SILENT = 3


def claim(run: RunFolder, job: JobSpec, hosts: list[str], environ: Mapping[str, str]) -> AttemptFolder:
    """Claim the next attempt. Raises OperationError where a start still runs or something is missing."""
    job_id = slurm_job_id(environ) or f"local-{os.getpid()}"
    record_submission(run, job_id, "hand", os.getpid())
    check_start(run, job)
    earlier = run.attempts()
    if earlier:
        refuse_if_running(earlier[-1], job_id, job)
    number = earlier[-1].number + 1 if earlier else 0
    seed = int(environ.get("SLURM_JOB_ID", "0")) or os.getpid()
    start = {
        "slurm_job_id": slurm_job_id(environ),
        "restart_count": int(environ.get("SLURM_RESTART_COUNT", "0")),
        "job_id": job_id,
        "hosts": hosts,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_start": start_ticks(os.getpid()),
        "address": head_address(hosts),
        "port": pick_port(seed),
        "started_at": time.time(),
    }
    attempt = run.attempt(number)
    prepared = run.attempts_folder / f".{number}.{secrets.token_hex(4)}"
    prepared.mkdir(mode=0o700)
    try:
        write_json(prepared / "start.json", start)
        write_json(prepared / "params.json", job.spec.hyperparams)
        prepared.rename(attempt.path)  # fails where the folder is there: it is never empty
    except OSError as error:
        shutil.rmtree(prepared, ignore_errors=True)
        if attempt.path.exists():
            raise _still_running(attempt, "another start of this run came first") from None
        raise OperationError(
            Fault(f"attempt {number} could not be claimed: {error}", str(run.path))
        ) from None
    return attempt


def check_start(run: RunFolder, job: JobSpec) -> None:
    """What must be there before an attempt: the shared storage itself, and the secrets. All faults at once."""
    faults = []
    try:
        seen = run.canary.read_text()
    except OSError:
        seen = ""
    if seen.strip() != job.metadata.run_id:
        faults.append(
            Fault(
                f"the canary file {run.canary} is not there or not this run's",
                f"node {socket.gethostname()}",
                "the storage root is not shared with this node: choose another, or tell the administrators",
            )
        )
    if (job.spec.node.secrets or job.spec.reporting.enabled) and not run.secrets.is_file():
        faults.append(
            Fault(
                f"secrets.env is gone: run {job.metadata.run_id} has ended for good",
                str(run.path),
                f"tp job retry {job.metadata.run_id}",
            )
        )
    if faults:
        raise OperationError(*faults)


def refuse_if_running(attempt: AttemptFolder, job_id: str, job: JobSpec) -> None:
    """Raise OperationError where the last attempt may still be alive.

    Evidence in this order: its own end, the same Slurm job started anew, Slurm's word, this machine's
    processes, the age of its heartbeats.
    """
    if attempt.end.exists():
        return
    start = _read(attempt.start)
    if start.get("slurm_job_id"):
        if start["slurm_job_id"] == job_id:  # requeued: Slurm ended the former start itself
            return
        state = _slurm_state(start["slurm_job_id"])
        if state is not None:
            if state in ACTIVE_STATES:
                raise _still_running(attempt, f"Slurm job {start['slurm_job_id']} is {state}")
            return
    elif start.get("host") == socket.gethostname():
        if is_alive(int(start.get("pid", 0)), start.get("pid_start")):
            raise _still_running(attempt, f"process {start['pid']} runs it")
        return
    newest = _newest_beat(attempt)
    if newest is not None and time.time() - newest < BEATS_UNTIL_SILENT * job.spec.node.heartbeat_s:
        raise _still_running(attempt, f"its heartbeat is {time.time() - newest:.0f} s old")


def end(run: RunFolder, job: JobSpec, number: int, srun_code: int) -> int:
    """Write how the attempt ended and return its exit code: the first failing node's, else srun's.

    srun's own code is the highest of all tasks, so a victim's 137 would hide the culprit's 1.
    """
    attempt = run.attempt(number)
    nodes = [_read(path) for path in sorted(attempt.path.glob("node-*.json"))]
    failed = [n for n in nodes if n.get("code") not in (0, None)]
    own = [n for n in failed if not n.get("told_to_stop")]
    first = min(own or failed, key=lambda n: float(n.get("ended_at") or 0), default=None)
    code = int(first["code"]) if first else srun_code
    stopped = attempt.stop_marker.exists() or any(n.get("told_to_stop") for n in nodes)
    for_good = bool(own) or (code == 0 and not stopped)
    write_json(
        attempt.end,
        {
            "code": code,
            "srun_code": srun_code,
            "first_failing_node": first.get("host") if first else None,
            "first_failing_rank": first.get("rank") if first else None,
            "reason": first.get("reason") if first else None,
            "stop_requested": stopped,
            "for_good": for_good,
            "ended_at": time.time(),
        },
    )
    if for_good:  # C11; what was stopped from outside may start again
        run.secrets.unlink(missing_ok=True)
    return code


def _still_running(attempt: AttemptFolder, why: str) -> OperationError:
    return OperationError(
        Fault(
            f"attempt {attempt.number} of this run has not ended: {why}",
            str(attempt.path.parent.parent),
            "wait for it, or end it with: tp job stop " + attempt.path.parent.parent.name,
        )
    )


def _slurm_state(job_id: str) -> str | None:
    """A job's state by squeue; "" where Slurm does not know it any more, None where Slurm cannot be asked."""
    argv = ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T"]
    try:
        result = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if result.returncode == 0:
        return result.stdout.split()[0] if result.stdout.split() else ""
    return "" if "Invalid job id" in result.stderr else None


def _newest_beat(attempt: AttemptFolder) -> float | None:
    times = [path.stat().st_mtime for path in attempt.path.glob("node-*.beat")]
    return max(times, default=None)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
