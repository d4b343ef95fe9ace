"""Whether and how a run starts again by itself: the cause decides, an intent is noted first, then carried out.

`outcome.py` asks as an attempt ends; `tp job resume` carries out an intent that was lost.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.files import create_once, json_text, write_atomic, write_json
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.kernel.submission import TP, record_submission
from tuneplane.node.queue import read_queue
from tuneplane.node.record import read_record
from tuneplane.spec import JobSpec

WALLTIME, PREEMPTION, NODE_FAILURE = "walltime", "preemption", "node_failure"
"""Causes after which a run goes on."""

COMMAND_S = 60.0
"""How long one of Slurm's commands may take."""

EARLY_S = 90.0
"""Slurm warns up to 30 s early, and knows its limits to the minute."""

CONTROLLER_S = 60.0
"""How long a controller that is just being restarted is waited for."""

ASK_AGAIN_S = 3.0

LASTING = re.compile(r"Invalid job id|No such file|Permission denied", re.IGNORECASE)
"""Words of a failure that asking again does not mend."""

LATE_S = 5.0
"""Slurm ends a job after its limit, not before it."""

TIME_LIMIT = re.compile(r"(?:(\d+)-)?(\d+):(\d+):(\d+)")

SLURMSTEPD = re.compile(r"CANCELLED AT (\S+) DUE TO (PREEMPTION|NODE FAILURE)")
"""Its words where Slurm ends a job, for a cause after which a run goes on. Source: slurmstepd's req.c."""

KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER")
"""Slurm's variables that its commands are given; all others would change what is submitted."""

REQUEUE_REFUSED = re.compile(r"disabled|not requeue|cannot be requeued", re.IGNORECASE)
"""Words of a Slurm that never requeues this job, so that a successor must do."""

TOO_FEW_NODES = re.compile(r"node configuration is not available", re.IGNORECASE)
"""Words of a Slurm that has too few nodes besides those to be avoided. Source: ESLURM_REQUESTED_NODE_CONFIG_
UNAVAILABLE in slurm_errno.c."""

NOT_WAITING = frozenset(("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING"))


@dataclass(frozen=True)
class SlurmWord:
    """What Slurm says of the job as its attempt ends. limit_at: when its time is over, seconds since the epoch.
    restarts: how often it was requeued, this end included where it is Slurm that starts the job again.
    """

    state: str = ""
    preempted: bool = False
    limit_at: float | None = None
    restarts: int = 0


@dataclass(frozen=True)
class Plan:
    """cause: why the attempt ended, of those after which a run goes on, or empty. refused: why it does not."""

    cause: str = ""
    way: str = ""
    exclude: list[str] = field(default_factory=list)
    refused: str = ""


def cause_of(
    *,
    dead: bool,
    asked_at: float | None,
    word: SlurmWord,
    warned_s: int,
    now: float,
) -> str:
    """Why an attempt ended, of the causes after which a run goes on; empty for every other. Pure.

    asked_at: when the stop marker came. warned_s: how long before its limit Slurm warns. What a user stopped
    by hand (`scancel`, a signal) does not go on.
    """
    if dead:
        return NODE_FAILURE
    if word.preempted or word.state == "PREEMPTED":
        return PREEMPTION
    if word.state in ("NODE_FAIL", "BOOT_FAIL"):
        return NODE_FAILURE
    if word.state == "TIMEOUT":
        return WALLTIME
    if word.state == "CANCELLED" or asked_at is None or word.limit_at is None:
        return ""
    if word.state == "COMPLETING":  # ended from outside, and Slurm does not say yet by what
        return WALLTIME if now >= word.limit_at - LATE_S else ""
    return WALLTIME if word.limit_at - asked_at <= warned_s + EARLY_S else ""


def ask_slurm(job_id: str, environ: Mapping[str, str]) -> SlurmWord:
    """Slurm's word of a job; an empty one where its controller does not answer for a while."""
    deadline = time.monotonic() + CONTROLLER_S
    while True:
        try:
            return read_word(run_slurm(["scontrol", "--oneliner", "show", "job", job_id], environ))
        except OperationError as error:
            lasting = any(LASTING.search(fault.what) for fault in error.faults)
            if lasting or time.monotonic() > deadline:
                return SlurmWord()
        time.sleep(ASK_AGAIN_S)


def read_word(text: str) -> SlurmWord:
    """The word in scontrol's own text form, its times as seconds (`SLURM_TIME_FORMAT=%s`)."""
    found = dict(re.findall(r"(?:^|\s)(JobState|PreemptTime|StartTime|TimeLimit|Restarts)=(\S+)", text))
    limit, started = TIME_LIMIT.fullmatch(found.get("TimeLimit", "")), found.get("StartTime", "")
    limit_at = None
    if limit and started.isdecimal():
        days, hours, minutes, seconds = (int(part or 0) for part in limit.groups())
        limit_at = int(started) + ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds
    return SlurmWord(
        state=found.get("JobState", ""),
        preempted=found.get("PreemptTime", "None") not in ("None", "Unknown", "0"),
        limit_at=limit_at,
        restarts=int(found["Restarts"]) if found.get("Restarts", "").isdecimal() else 0,
    )


def requeued_by_slurm(output: str, since: float) -> str:
    """Why Slurm requeued a job, by what slurmstepd wrote into its output since then; empty for any other why.

    Its controller forgets it: a requeued job has no PreemptTime.
    """
    begun = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))
    for at, why in SLURMSTEPD.findall(output):
        if at >= begun:
            return PREEMPTION if why == "PREEMPTION" else NODE_FAILURE
    return ""


def note_intent(attempt: AttemptFolder, plan: Plan) -> None:
    """Note that the run is to start again, before anything is done about it. Raises OSError."""
    values = {"cause": plan.cause, "way": plan.way, "exclude": plan.exclude, "at": time.time()}
    create_once(attempt.restart, json_text(values))


def carry_out(
    run: RunFolder, attempt: AttemptFolder, job: JobSpec, job_id: str, environ: Mapping[str, str]
) -> bool:
    """Do what the attempt's intent says, once; whether it is done. What Slurm refuses is noted beside it.

    job_id: the job that ran the attempt.
    """
    intent = read_record(attempt.restart)
    if not intent or attempt.restarted.exists():
        return bool(intent)
    try:
        found = _queued(run, attempt, job_id, environ)
        way = str(intent.get("way"))
        if not found and way == "requeue":
            found = _requeue(job_id, environ)
        if not found:
            way = "successor"
            found = _submit(run, job, _names(intent.get("exclude")), dead_nodes(attempt), environ)
        if found != job_id:
            record_submission(run, found, TP)
        write_json(attempt.restarted, {"way": way, "job_id": found, "at": time.time()})
    except OperationError as error:
        write_atomic(attempt.restart_error, "".join(f"{fault.what}\n" for fault in error.faults), 0o600)
        return False
    return True


def excluded(run: RunFolder, job: JobSpec, attempt: int) -> list[str]:
    """Nodes that a successor avoids: those that were found dead in any attempt up to this one."""
    earlier = [a for a in run.attempts() if a.number <= attempt]
    return list(dict.fromkeys(host for a in earlier for host in dead_nodes(a)))


def dead_nodes(attempt: AttemptFolder) -> list[str]:
    """Nodes that were found dead in this attempt."""
    return [str(node.get("host")) for node in read_record(attempt.fence).get("nodes") or []]


def _names(found: object) -> list[str]:
    return [str(name) for name in found] if isinstance(found, list) else []


def _queued(run: RunFolder, attempt: AttemptFolder, job_id: str, environ: Mapping[str, str]) -> str:
    """A job of this run that waits or runs besides `job_id`, or `job_id` itself where it waits anew."""
    # For minutes Slurm still shows the job of an attempt that lost a node: it waits for that node.
    former = {str(read_record(a.start).get("job_id")) for a in run.attempts() if a.number < attempt.number}
    for job in read_queue(run.path, environ):
        if job.state == "COMPLETING" and job.names & former - {job_id}:
            continue
        if job_id not in job.names:
            return job.job_id
        if job.state not in NOT_WAITING:
            return job_id
    return ""


def _requeue(job_id: str, environ: Mapping[str, str]) -> str:
    """The job, requeued; empty where this Slurm never does it. Raises OperationError for every other no."""
    try:
        run_slurm(["scontrol", "requeue", job_id], environ)
    except OperationError as error:
        if any(REQUEUE_REFUSED.search(fault.what) for fault in error.faults):
            return ""
        raise
    return job_id


def _submit(
    run: RunFolder, job: JobSpec, exclude: list[str], latest: list[str], environ: Mapping[str, str]
) -> str:
    """A successor by the very same script; its id. latest: what alone is avoided where the rest is too few."""
    try:
        return _sbatch(run, job, exclude, environ)
    except OperationError as error:
        if exclude == latest or not any(TOO_FEW_NODES.search(fault.what) for fault in error.faults):
            raise
        return _sbatch(run, job, latest, environ)


def _sbatch(run: RunFolder, job: JobSpec, exclude: list[str], environ: Mapping[str, str]) -> str:
    asked = job.spec.slurm.exclude if job.spec.slurm else None
    avoid = [*([asked] if asked else []), *exclude]
    options = [f"--exclude={','.join(avoid)}"] if exclude else []
    text = run_slurm(["sbatch", "--parsable", *options, str(run.script)], environ)
    return text.strip().split(";")[0]


def slurm_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of one of Slurm's commands: without the job's own variables, which are options to them."""
    kept = {name: value for name, value in environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    return {**kept, **{name: environ[name] for name in KEPT if name in environ}}


def run_slurm(argv: list[str], environ: Mapping[str, str]) -> str:
    """What one of Slurm's commands printed. Raises OperationError with its own words."""
    kept = {**slurm_environment(environ), "SLURM_TIME_FORMAT": "%s"}
    command = " ".join(argv[:2])
    try:
        done = subprocess.run(
            argv,
            env=kept,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_S,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise OperationError(Fault(f"{command}: no answer within {COMMAND_S:.0f} s", "Slurm")) from None
    except OSError as error:
        raise OperationError(Fault(f"{command}: {error.strerror}", os.uname().nodename)) from None
    if done.returncode != 0:
        words = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise OperationError(Fault(f"{command}: {words}", "Slurm"))
    return done.stdout
