"""What a run's folder says of it: its jobs, its last attempt, that attempt's nodes.

`state.py` judges it, `logs.py` reads the hosts.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tuneplane.kernel.files import json_text, read_json, write_json
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder, noted_jobs
from tuneplane.kernel.submission import HAND, TP, Submission, read_submissions
from tuneplane.launch.slurm_commands import SlurmJob

SILENT_S = 60.0
"""A heartbeat older than this, and than three of its intervals, tells of no life."""

SETTLED = "settled.json"
"""In the run's `slurm` folder: Slurm's last word of the newest job, written by `tp` once that is forgotten."""

CLEARED = "cleared.json"
"""In the run folder: how the run ended, written by `tp job gc` before it removes the records themselves."""


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
    paused: frozenset[str] = frozenset()  # ids of the jobs that `tp job pause` held, or asked to save and end
    restart: dict[str, Any] = field(default_factory=dict)  # the last attempt's: what is to start the next
    restarted: dict[str, Any] = field(default_factory=dict)  # the same, once it was done
    restart_error: str = ""  # Slurm's words where it was refused
    settled: SlurmJob | None = None  # Slurm's last word, once it has forgotten the job
    cleared: dict[str, Any] = field(default_factory=dict)  # what `tp job gc` left of the records
    rerun_of: str = ""
    operation: str = "train"
    subject: str = ""  # of an operation: id of the run that it works on
    awaited: str = ""  # and of the run that it waits for
    not_run: dict[str, Any] = field(default_factory=dict)  # of an operation: why it ended before an attempt
    is_whole: bool = True  # its script is there, which is written last

    def starts(self) -> list[Submission]:
        """The jobs that may be the run's present: the last attempt's, and the newest that was begun.

        A start by hand that claimed nothing was refused, and does not speak for the run, unless it waits here.
        """
        begun = [j for j in self.jobs if j.by == TP or j == self.claimed or j.is_alive_here()] or self.jobs
        return [*dict.fromkeys(j for j in (self.claimed, *begun[-1:]) if j is not None)]

    def completed(self) -> bool:
        """Whether the last attempt's own end says that nothing is left to do."""
        return self.end.get("code") == 0 and self.end.get("for_good") is not False

    def is_settled(self) -> bool:
        """Whether Slurm has nothing new to say: it had forgotten the run's present job when it was last asked."""
        newest = self.starts()[-1:]
        return self.settled is not None and [job.job_id for job in newest] == [self.settled.job_id]

    def cause(self) -> str:
        """What ended the last attempt from outside; empty where nothing is recorded."""
        return str(self.restart.get("cause") or self.end.get("cause") or "")

    def waits_for(self, job: Submission) -> bool:
        """Whether a waiting job is the restart of the last attempt: the same one anew, or its successor."""
        return job == self.claimed or str(self.restarted.get("job_id") or "") == job.job_id

    def went_on(self, job: Submission) -> bool:
        """Whether the last attempt's own job was requeued after it, by us or by Slurm itself."""
        by_slurm = bool(self.end.get("cause")) and not self.restart and not self.end.get("not_restarted")
        return job == self.claimed and (by_slurm or str(self.restarted.get("job_id") or "") == job.job_id)

    def pending_restart(self) -> str:
        """The cause for which the run was to start again and, as far as the records say, did not; empty if none.

        A restart that is under way looks the same: whoever asks knows whether a job is still there.
        """
        wanted = bool(self.restart) or self.end.get("to_be_continued") is True
        if not wanted or self.restarted or self.end.get("not_restarted") or self.claimed is None:
            return ""
        if self.claimed.job_id in self.stopped | self.paused or self.starts()[-1] != self.claimed:
            return ""
        return self.cause() or "asked"

    def is_fresh(self, node: NodeState) -> bool:
        """Whether a node's heartbeat tells that it runs."""
        return node.code is None and node.beat_age_s is not None and node.beat_age_s < self.silent_s


def read_nodes(attempt: AttemptFolder) -> list[NodeState]:
    """Every node's record of an attempt, by rank."""
    found = []
    for path in attempt.path.glob("node-*.json"):
        value = read_object(path)
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
    names = read_object(attempt.start).get("hosts")
    hosts = {str(rank): str(name) for rank, name in enumerate(names)} if isinstance(names, list) else {}
    return {**hosts, **{str(node.rank): node.host for node in read_nodes(attempt)}}


def stopped_jobs(run: RunFolder) -> frozenset[str]:
    """Ids of the jobs of a run that `tp job stop` ended."""
    return noted_jobs(run.stopped)


def paused_jobs(run: RunFolder) -> frozenset[str]:
    """Ids of the jobs of a run that `tp job pause` held, or asked to save and end."""
    return noted_jobs(run.paused)


def known_jobs(run: RunFolder, restarted: dict[str, Any] | None = None) -> list[Submission]:
    """Every job of a run, oldest first: those noted, and the successor that its last attempt says it queued.

    A successor counts as `tp`'s own: it was begun on purpose, while a start by hand may have been refused.
    """
    jobs = read_submissions(run)
    if restarted is None:
        last = run.attempts()[-1:]
        restarted = read_object(last[0].restarted) if last else {}
    successor = str(restarted.get("job_id") or "")
    if not successor:
        return jobs
    if all(job.job_id != successor for job in jobs):
        jobs.append(Submission(successor, TP, number(restarted.get("at")) or time.time()))
    return [replace(job, by=TP) if job.job_id == successor else job for job in sorted(jobs, key=_at)]


def _at(job: Submission) -> float:
    return job.at


def excluded_nodes(attempt: AttemptFolder) -> list[str]:
    """Nodes that the next attempt is to avoid, as the restart of this one says."""
    names = read_object(attempt.restart).get("exclude")
    return [name for name in names if isinstance(name, str) and name] if isinstance(names, list) else []


def note_restarted(attempt: AttemptFolder, job_id: str) -> None:
    """Note that the restart which an attempt asked for is carried out, where it asked for one. Never raises."""
    if not attempt.restart.exists():
        return
    with suppress(OSError):  # the queued job itself voids the restart as well
        value = {"way": "successor", "job_id": job_id, "at": time.time()}
        with attempt.restarted.open("x", encoding="utf-8") as file:
            file.write(json_text(value))


def settle(records: Records, job: SlurmJob) -> None:
    """Note Slurm's last word of a job that it has forgotten, so that nobody asks again. Never raises.

    An empty state: it had nothing to say. Only in a run of this user's own.
    """
    with suppress(OSError):
        if records.run.path.stat().st_uid == os.geteuid():
            write_json(records.run.slurm / SETTLED, asdict(job), 0o600)


def read_records(run: RunFolder) -> Records | str:
    """A run's records, or why they cannot be read."""
    try:
        attempts = run.attempts()
        last = attempts[-1] if attempts else None
        # Few files for the many runs that never restart: each is a round trip on shared storage.
        restart = read_object(last.restart) if last else {}
        restarted = read_object(last.restarted) if last and restart else {}
        jobs = known_jobs(run, restarted)
        is_whole = run.script.exists()
        run.path.stat()
    except OSError as error:
        return f"cannot be read: {error.strerror}: {error.filename}"
    start = read_object(last.start) if last else {}
    job = read_object(run.job)
    asked = _of(job, "spec")
    subject = _of(asked, "subject")
    beat_s = number(_of(asked, "node").get("heartbeat_s")) or 0.0
    return Records(
        run=run,
        jobs=jobs,
        attempts=attempts,
        claimed=_claimant(jobs, start),
        start=start,
        end=read_object(last.end) if last else {},
        nodes=read_nodes(last) if last else [],
        stopped=stopped_jobs(run),
        profile=str(_of(asked, "resources").get("profile", "")),
        silent_s=max(SILENT_S, 3 * beat_s),
        paused=paused_jobs(run),
        restart=restart,
        restarted=restarted,
        restart_error=_words(last.restart_error) if last and restart else "",
        settled=_settled(run.slurm / SETTLED),
        cleared={} if is_whole else read_object(run.path / CLEARED),
        rerun_of=str(_of(job, "metadata").get("rerun_of") or ""),
        operation=str(asked.get("operation") or "train"),
        subject=str(subject.get("run_id") or ""),
        awaited=Path(str(subject.get("awaited") or subject.get("folder") or "")).name,
        not_run=read_object(run.not_run) if subject else {},
        is_whole=is_whole,
    )


def _settled(path: Path) -> SlurmJob | None:
    value = read_object(path)
    code = whole(value.get("code"))
    texts = [value.get(name) for name in ("job_id", "state", "reason", "nodes", "folder")]
    if not all(isinstance(text, str) for text in texts):
        return None
    job_id, state, reason, nodes, folder = map(str, texts)
    return SlurmJob(job_id, state, reason, code, nodes, folder)


def _words(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return " ".join(file.read(2000).split())
    except OSError:
        return ""


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


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of a run; empty where there is none, or a broken one."""
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
