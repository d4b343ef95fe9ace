"""Attempts: claimed before anything runs, refused while another start of the run still runs.

Called by the batch script on node 0, and by `local.py`. A claim is a folder that appears with its content by
one rename: of two starts at once, one gets it.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.files import write_json
from tuneplane.kernel.process import is_alive, start_ticks
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder, noted_jobs
from tuneplane.kernel.submission import record_submission
from tuneplane.node.address import head_address, pick_port
from tuneplane.node.allocation import place_differences, slurm_job_id
from tuneplane.node.checkpoints import list_checkpoints
from tuneplane.node.command import output_folder
from tuneplane.node.record import read_record
from tuneplane.node.silence import fenced_after_s
from tuneplane.node.start import check_start
from tuneplane.spec import JobSpec

ACTIVE_STATES = frozenset(
    ["RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"]
)
"""Slurm states in which a job's processes may still be there. Source: squeue(1), JOB STATE CODES."""

LOST_STATES = frozenset(["", "NODE_FAIL", "BOOT_FAIL"])
"""Slurm states (and no state at all) that say nothing of the processes: a node cut off may still run them."""

SQUEUE_S = 30.0
"""How long squeue may take; a busy controller answers in seconds."""


BESIDE_S = 0.1
"""Slept beyond what is needed, so that the last look need not be repeated."""


def claim(run: RunFolder, job: JobSpec, hosts: list[str], environ: Mapping[str, str]) -> AttemptFolder | None:
    """Claim the next attempt; None where a restart finds that the run is over. No process of the attempt before
    it is left then. Raises OperationError where a start still runs or something is missing.
    """
    slurm_id = slurm_job_id(environ)
    job_id = slurm_id or f"local-{os.getpid()}"
    restarts = _number(environ.get("SLURM_RESTART_COUNT"))
    nodes = _number(environ.get("SLURM_JOB_NUM_NODES")) or len(hosts)
    earlier = run.attempts()
    follows = followed_cause(earlier[-1], slurm_id, restarts) if earlier else None
    if earlier and follows is not None:
        if read_record(earlier[-1].end).get("for_good"):
            return None
        refuse_restart(run, job, earlier[-1], slurm_id)
    if earlier:
        wait_or_refuse(earlier[-1], job, slurm_id, restarts)
    check_start(run, job)
    if nodes > len(hosts):
        raise OperationError(
            Fault(
                f"the job has {nodes} nodes, and only {len(hosts)} of their names are known",
                "SLURM_JOB_NODELIST",
                "`scontrol show hostnames` must work on the nodes: set `path` of the cluster profile",
            )
        )
    if slurm_id:
        for told in place_differences(job, nodes, environ.get("SLURM_JOB_PARTITION", "")):
            print(f"tuneplane: warning: {told}", file=sys.stderr)
    address = head_address(hosts)
    # The batch script outlives this process, which answers it and ends; a local run stays this process.
    pid = os.getppid() if slurm_id else os.getpid()
    start = {
        "job_id": job_id,
        "slurm_job_id": slurm_id,
        "restart_count": restarts,
        "hosts": hosts,
        "host": os.uname().nodename,
        "pid": pid,
        "pid_start": start_ticks(pid),
        "address": address,
        "port": pick_port(_number(environ.get("SLURM_JOB_ID")) or os.getpid(), address),
        "automatic": follows is not None,
        "follows": follows or "",
        "started_at": time.time(),
        "claim": os.urandom(8).hex(),
        "checkpoints": _checkpoints(job),
    }
    record_submission(run, job_id, "hand", pid)
    attempt = run.attempt(earlier[-1].number + 1 if earlier else 0)
    _claim_folder(run, attempt, start, job.spec.hyperparams)
    if earlier and follows is not None and not earlier[-1].end.exists():
        wait_until_fenced(earlier[-1], job)  # Slurm ended it where it could: a node cut off may still run it
        _note_checkpoints(attempt, start, job)  # and have saved one since, or removed one that was noted
    return attempt


def _checkpoints(job: JobSpec) -> list[dict[str, Any]]:
    return list_checkpoints(output_folder(job)) if job.spec.launch != "each-node" else []


def _note_checkpoints(attempt: AttemptFolder, start: dict[str, Any], job: JobSpec) -> None:
    """Note anew what there is to go on from; no node of the attempt has been started."""
    found = _checkpoints(job)
    if found != start["checkpoints"]:
        write_json(attempt.start, {**start, "checkpoints": found})


def followed_cause(attempt: AttemptFolder, slurm_id: str, restarts: int) -> str | None:
    """Why this job starts the run again after `attempt`; None where somebody does so by `tp` or by hand.

    Empty where Slurm requeued it and our own records do not say why.
    """
    start, intent = read_record(attempt.start), read_record(attempt.restart)
    cause = str(intent.get("cause") or read_record(attempt.end).get("cause") or "")
    if slurm_id and start.get("slurm_job_id") == slurm_id:
        return cause if restarts > _number(start.get("restart_count")) else None
    if not intent:
        return None
    done = read_record(attempt.restarted)  # missing: this job starts before that could be noted
    return cause if done.get("job_id", slurm_id) == slurm_id else None


def refuse_restart(run: RunFolder, job: JobSpec, attempt: AttemptFolder, slurm_id: str) -> None:
    """Raise OperationError where the run must not go on by itself: Slurm requeues without asking us."""
    last = str(read_record(attempt.start).get("job_id"))
    for note, word in ((run.stopped, "stopped by tp job stop"), (run.paused, "paused by tp job pause")):
        if {slurm_id, last} & noted_jobs(note):
            raise OperationError(
                Fault(f"this run was {word}", str(note), f"tp job resume {run.run_id} starts it again")
            )
    why = chain_ended(run, attempt.number, job)
    if why:
        what, where = f"no restart after it: {why}", f"attempt {attempt.number}"
        raise OperationError(Fault(what, where, f"tp job resume {run.run_id} starts it again"))


def chain_length(run: RunFolder, before: int) -> int:
    """How many attempts up to and with `before` started by themselves, one after the other."""
    length = 0
    for attempt in reversed(run.attempts()):
        if attempt.number > before:
            continue
        if not read_record(attempt.start).get("automatic"):
            break
        length += 1
    return length


def chain_ended(run: RunFolder, number: int, job: JobSpec) -> str:
    """Why no attempt may follow `number` by itself; empty where one may."""
    most = job.spec.restart.max_restarts
    if chain_length(run, number) < most:
        return ""
    return f"max_restarts ({most}) is reached" if most else "restarts are off (max_restarts is 0)"


def wait_until_fenced(attempt: AttemptFolder, job: JobSpec) -> None:
    """Wait until no node of a former attempt can have a process of it any more.

    They see the newer attempt at their next heartbeat. Raises OperationError where one goes on beating.
    """
    fenced_s = fenced_after_s(job.spec.node.heartbeat_s)
    deadline = time.monotonic() + 2 * fenced_s
    while (age_s := _silence_s(attempt)) < fenced_s and not _all_ended(attempt):
        if time.monotonic() > deadline:
            raise still_running(attempt, f"its last sign of life is {age_s:.0f} s old")
        time.sleep(min(1.0, job.spec.node.heartbeat_s))


def _all_ended(attempt: AttemptFolder) -> bool:
    hosts = read_record(attempt.start).get("hosts") or []
    return all(read_record(attempt.node_record(rank)).get("state") == "ended" for rank in range(len(hosts)))


def _claim_folder(
    run: RunFolder, attempt: AttemptFolder, start: dict[str, Any], params: dict[str, Any]
) -> None:
    """Make the attempt's folder appear whole, or raise OperationError and leave nothing."""
    prepared = run.attempts_folder / f".{attempt.number}.{start['claim']}"
    try:
        prepared.mkdir()  # as open as the run folder: the umask says so
        write_json(prepared / "start.json", start)
        write_json(prepared / "params.json", params)
        prepared.rename(attempt.path)  # fails where the folder is there: it is never empty
    except (OSError, ValueError) as error:  # ValueError: a parameter that JSON has no word for
        shutil.rmtree(prepared, ignore_errors=True)
        found = read_record(attempt.start)
        if found.get("claim") == start["claim"]:  # a server that lost its first answer to the rename
            return
        if found:
            raise still_running(attempt, "another start of this run came first") from None
        raise OperationError(
            Fault(
                f"attempt {attempt.number} could not be claimed: {getattr(error, 'strerror', None) or error}",
                str(run.attempts_folder),
                "free space there (disk, quota), or make it writable, and start the run again",
            )
        ) from None


def wait_or_refuse(attempt: AttemptFolder, job: JobSpec, slurm_id: str = "", restarts: int = 0) -> None:
    """Return once the last attempt is surely over. Raises OperationError where it is alive.

    slurm_id, restarts: of the job that is about to start. Evidence in this order: the attempt's own end, its
    process on this machine, the same Slurm job started anew, Slurm's word, its heartbeats: where nobody else
    knows, silence is waited for, and a new sign of life refuses the start.
    """
    if attempt.end.exists():
        return
    start = read_record(attempt.start)
    pid, here = _number(start.get("pid")), start.get("host") == os.uname().nodename
    former = start.get("slurm_job_id")
    if here and is_alive(pid, start.get("pid_start")):
        raise still_running(attempt, f"Slurm job {former} runs it" if former else f"process {pid} runs it")
    if not former:
        if here:
            return
    elif former == slurm_id:
        if restarts > _number(start.get("restart_count")):  # requeued: Slurm ended the former start itself
            return
    else:
        state = _slurm_state(str(former))
        if state in ACTIVE_STATES:
            raise still_running(attempt, f"Slurm job {former} is {state}")
        if state is not None and state not in LOST_STATES:
            return
    _wait_for_silence(attempt, fenced_after_s(job.spec.node.heartbeat_s), job.spec.node.heartbeat_s)


def _wait_for_silence(attempt: AttemptFolder, fenced_s: float, heartbeat_s: float) -> None:
    """Until a lost attempt has been silent for so long that it has no process any more, on any node."""
    age_s = _silence_s(attempt)
    if age_s < fenced_s:
        told = f"attempt {attempt.number} is lost, and its last sign of life is {age_s:.0f} s old"
        print(
            f"tuneplane: {told}: waiting {fenced_s - age_s:.0f} s until it surely has ended", file=sys.stderr
        )
    while age_s < fenced_s:
        slept_s = min(heartbeat_s, fenced_s - age_s + BESIDE_S)
        time.sleep(slept_s)
        before_s, age_s = age_s, _silence_s(attempt)
        if age_s < before_s + slept_s / 2:
            raise still_running(attempt, f"its last sign of life is {age_s:.0f} s old")


def still_running(attempt: AttemptFolder, why: str) -> OperationError:
    """The refusal of a second start."""
    run = attempt.path.parent.parent
    what = f"attempt {attempt.number} of this run has not ended: {why}"
    return OperationError(Fault(what, str(run), f"wait for it, or end it with: tp job stop {run.name}"))


def _slurm_state(job_id: str) -> str | None:
    """A job's state by squeue; "" where Slurm does not know it any more, None where Slurm cannot be asked."""
    import subprocess

    argv = ["squeue", "--all", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T"]
    try:
        result = subprocess.run(argv, capture_output=True, timeout=SQUEUE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if result.returncode == 0:
        return (result.stdout.decode("ascii", "replace").split() or [""])[0]
    return "" if b"Invalid job id" in result.stderr else None


def _silence_s(attempt: AttemptFolder) -> float:
    """Seconds since the attempt's last sign of life: its claim, or a heartbeat of a node that has not ended.

    By the storage's own clock: hosts may disagree on the time.
    """
    signs = [attempt.start]
    signs += [
        b for b in attempt.path.glob("node-*.beat") if read_record(b.with_suffix(".json")).get("code") is None
    ]
    touched = attempt.path.parent / f".now.{os.urandom(4).hex()}"
    touched.touch()
    try:
        now = touched.stat().st_mtime
    finally:
        touched.unlink()
    return now - max((_modified(sign) for sign in signs), default=0.0)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _number(text: object) -> int:
    try:
        return int(str(text))
    except ValueError:
        return 0
