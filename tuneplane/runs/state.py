"""How a run is: our own records decide, Slurm's word is evidence (design: squeue forgets, sacct may be off).

One squeue and at most one sacct call for any number of runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tuneplane.kernel.files import read_json
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.kernel.submission import Submission, read_submissions
from tuneplane.launch.slurm_commands import SlurmJob, query_jobs

FINAL = frozenset(
    {
        *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"),
        *("BOOT_FAIL", "DEADLINE", "REVOKED", "LOST", "NOT_SUBMITTED"),
    }
)
"""States that a run does not leave by itself."""

ENDED_FROM_OUTSIDE = FINAL - {"COMPLETED", "FAILED", "LOST", "NOT_SUBMITTED"}


@dataclass(frozen=True)
class NodeState:
    """One node of an attempt, as its agent recorded it."""

    rank: int
    host: str
    state: str
    code: int | None
    reason: str
    beat_age_s: float | None


@dataclass(frozen=True)
class RunState:
    """What is known of a run. `state` is one of Slurm's words, or PREPARED, NOT_SUBMITTED, LOST."""

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


def read_states(runs: Iterable[RunFolder], *, ask_accounting: bool = True) -> list[RunState]:
    """The states of runs, in their order."""
    folders = list(runs)
    submitted = [read_submissions(run) for run in folders]
    ids = [jobs[-1].job_id for jobs in submitted if jobs and not jobs[-1].is_local]
    known = query_jobs(ids, ask_accounting=ask_accounting) if ids else {}
    return [_judge(run, jobs, known) for run, jobs in zip(folders, submitted, strict=True)]


def read_state(run: RunFolder) -> RunState:
    """The state of one run."""
    return read_states([run])[0]


def _judge(run: RunFolder, jobs: list[Submission], known: dict[str, SlurmJob]) -> RunState:
    attempts = run.attempts()
    last = attempts[-1] if attempts else None
    start = _read(last.start) if last else {}
    end = _read(last.end) if last else {}
    nodes = read_nodes(last) if last else []
    job = jobs[-1] if jobs else None
    # The last job may still wait while the last attempt is an earlier job's.
    current = bool(job and start.get("job_id") == job.job_id) or not job
    slurm = known.get(job.job_id) if job else None
    state, code, reason = _state(run, job, slurm, end if current else {}, nodes if current else [], current)
    return RunState(
        run_id=run.run_id,
        experiment=run.path.parent.name,
        state=state,
        code=code,
        reason=reason,
        job_id=job.job_id if job else "",
        attempt=last.number if last else None,
        attempts=len(attempts),
        profile=_profile(run),
        nodes=nodes,
        submitted_at=job.at if job else None,
        started_at=start.get("started_at"),
        ended_at=end.get("ended_at") if current else None,
        folder=str(run.path),
    )


def _state(
    run: RunFolder,
    job: Submission | None,
    slurm: SlurmJob | None,
    end: dict[str, Any],
    nodes: list[NodeState],
    claimed: bool,
) -> tuple[str, int | None, str]:
    """State, exit code and reason of a run's last start."""
    if job is None:
        if run.submit_error.exists():
            return "NOT_SUBMITTED", None, run.submit_error.read_text(errors="replace").strip()
        return "PREPARED", None, "rendered, not submitted"
    if end:
        code = int(end.get("code", 1))
        if slurm and slurm.state in ENDED_FROM_OUTSIDE:
            return slurm.state, code, _why(end, slurm)
        if stopped_after(run, job) or (end.get("stop_requested") and not end.get("for_good", True)):
            return "CANCELLED", code, _why(end, slurm)
        return ("COMPLETED" if code == 0 else "FAILED"), code, _why(end, slurm)
    if slurm and slurm.state not in FINAL:
        return slurm.state, None, slurm.reason
    if job.is_local and job.is_alive_here():
        return (
            ("RUNNING" if claimed else "PENDING"),
            None,
            "" if claimed else "waits for its share of this machine",
        )
    if slurm:
        return slurm.state, slurm.code, slurm.reason or _batch_words(run, job)
    if stopped_after(run, job):
        return "CANCELLED", None, "stopped by tp job stop"
    ended = [n for n in nodes if n.code is not None]
    if nodes and len(ended) == len(nodes):
        code = next((n.code for n in ended if n.code), 0)
        return ("COMPLETED" if code == 0 else "FAILED"), code, next((n.reason for n in ended if n.code), "")
    if any(n.beat_age_s is not None and n.beat_age_s < 60 for n in nodes):
        return "RUNNING", None, ""
    words = _batch_words(run, job)
    return "LOST", None, words or "it left no record of its end, and Slurm does not know it any more"


def read_nodes(attempt: AttemptFolder) -> list[NodeState]:
    """Every node's record of an attempt, by rank."""
    found = []
    for path in attempt.path.glob("node-*.json"):
        value = _read(path)
        if "rank" not in value:
            continue
        rank = int(value["rank"])
        found.append(
            NodeState(
                rank=rank,
                host=str(value.get("host", "")),
                state=str(value.get("state", "")),
                code=value.get("code"),
                reason=str(value.get("reason", "")),
                beat_age_s=_age(attempt.node_beat(rank)),
            )
        )
    return sorted(found, key=lambda n: n.rank)


def stopped_after(run: RunFolder, job: Submission) -> bool:
    """Whether `tp job stop` was said of this start, not of an earlier one."""
    try:
        return run.stopped.stat().st_mtime >= job.at
    except OSError:
        return False


def _why(end: dict[str, Any], slurm: SlurmJob | None) -> str:
    if end.get("first_failing_node") is not None:
        return f"{end.get('reason')} on {end['first_failing_node']}"
    if slurm and slurm.state in ENDED_FROM_OUTSIDE:
        return slurm.reason
    return ""


def _batch_words(run: RunFolder, job: Submission) -> str:
    """The last line that the batch script itself left, where it ended before any attempt."""
    path = run.slurm / ("local.out" if job.is_local else f"{job.job_id}.out")
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 2000))
            lines = file.read().decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return ""
    told = [line for line in lines if line.startswith("tuneplane: ")]
    return (told or lines or [""])[-1].removeprefix("tuneplane: ")


def _profile(run: RunFolder) -> str:
    job = _read(run.job)
    try:
        return str(job["spec"]["resources"]["profile"])
    except (KeyError, TypeError):
        return ""


def _age(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
