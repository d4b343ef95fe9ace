"""What a run's folder says of it: its jobs, its last attempt, that attempt's nodes.

`state.py` judges it, `logs.py` reads the hosts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneplane.kernel.files import read_json
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.kernel.submission import HAND, TP, Submission, read_submissions

SILENT_S = 60.0
"""A heartbeat older than this, and than three of its intervals, tells of no life."""


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
class Records:
    """What a run's folder says of its last attempt and of its jobs. Judging it is pure but for processes here."""

    run: RunFolder
    jobs: list[Submission]
    attempts: list[AttemptFolder]
    claimed: Submission | None  # whose the last attempt is
    start: dict[str, Any]
    end: dict[str, Any]
    nodes: list[NodeState]
    stopped: frozenset[str]  # ids of the jobs that `tp job stop` ended
    profile: str
    silent_s: float

    def starts(self) -> list[Submission]:
        """The jobs that may be the run's present: the last attempt's, and the newest that was begun.

        A start by hand that claimed nothing was refused, and does not speak for the run, unless it waits here.
        """
        begun = [j for j in self.jobs if j.by == TP or j == self.claimed or j.is_alive_here()] or self.jobs
        return [*dict.fromkeys(j for j in (self.claimed, *begun[-1:]) if j is not None)]

    def completed(self) -> bool:
        """Whether the last attempt's own end says that nothing is left to do."""
        return self.end.get("code") == 0 and self.end.get("for_good") is not False

    def is_fresh(self, node: NodeState) -> bool:
        """Whether a node's heartbeat tells that it runs."""
        return node.code is None and node.beat_age_s is not None and node.beat_age_s < self.silent_s


def read_nodes(attempt: AttemptFolder) -> list[NodeState]:
    """Every node's record of an attempt, by rank."""
    found = []
    for path in attempt.path.glob("node-*.json"):
        value = _read(path)
        rank = whole(value.get("rank"))
        if rank is None:
            continue
        found.append(
            NodeState(
                rank=rank,
                host=str(value.get("host", "")),
                state=str(value.get("state", "")),
                code=whole(value.get("code")),
                reason=str(value.get("reason") or ""),
                beat_age_s=_age(attempt.node_beat(rank)),
            )
        )
    return sorted(found, key=lambda n: n.rank)


def read_hosts(attempt: AttemptFolder) -> dict[str, str]:
    """Rank → host of every node of an attempt: as its agent says, before that as the claim does."""
    names = _read(attempt.start).get("hosts")
    hosts = {str(rank): str(name) for rank, name in enumerate(names)} if isinstance(names, list) else {}
    return {**hosts, **{str(node.rank): node.host for node in read_nodes(attempt)}}


def stopped_jobs(run: RunFolder) -> frozenset[str]:
    """Ids of the jobs of a run that `tp job stop` ended."""
    try:
        return frozenset(run.stopped.read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return frozenset()


def read_records(run: RunFolder) -> Records | str:
    """A run's records, or why they cannot be read."""
    try:
        attempts, jobs = run.attempts(), read_submissions(run)
        run.path.stat()
    except OSError as error:
        return f"cannot be read: {error.strerror}: {error.filename}"
    last = attempts[-1] if attempts else None
    start = _read(last.start) if last else {}
    asked = _read(run.job).get("spec")
    asked = asked if isinstance(asked, dict) else {}
    beat_s = number(_of(asked, "node").get("heartbeat_s")) or 0.0
    return Records(
        run=run,
        jobs=jobs,
        attempts=attempts,
        claimed=_claimant(jobs, start),
        start=start,
        end=_read(last.end) if last else {},
        nodes=read_nodes(last) if last else [],
        stopped=stopped_jobs(run),
        profile=str(_of(asked, "resources").get("profile", "")),
        silent_s=max(SILENT_S, 3 * beat_s),
    )


def _claimant(jobs: list[Submission], start: dict[str, Any]) -> Submission | None:
    """The job of an attempt; from the attempt's own record where its submission was not noted."""
    job_id = str(start.get("job_id") or "")
    if not job_id:
        return None
    noted = next((job for job in reversed(jobs) if job.job_id == job_id), None)
    if noted is not None:
        return noted
    at = number(start.get("started_at")) or 0.0
    pid = whole(start.get("pid")) or 0
    return Submission(job_id, HAND, at, str(start.get("host", "")), pid, whole(start.get("pid_start")))


def batch_words(run: RunFolder, job: Submission) -> str:
    """The last line that the batch script itself left of this start."""
    path = run.slurm / ("local.out" if job.is_local else f"{job.job_id}.out")
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if job.is_local and path.stat().st_mtime < job.at - 1:  # the words of an earlier start
                return ""
            file.seek(max(0, size - 4000))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    lines = [line.strip() for line in lines if line.strip()]
    told = [line for line in lines if line.startswith("tuneplane: ")]
    return (told or lines or [""])[-1].removeprefix("tuneplane: ")


def _age(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _of(value: dict[str, Any], key: str) -> dict[str, Any]:
    inner = value.get(key)
    return inner if isinstance(inner, dict) else {}


def whole(value: Any) -> int | None:
    """A record's whole number; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: Any) -> float | None:
    """A record's number; None for anything else."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
