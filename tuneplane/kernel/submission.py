"""`submissions/<id>.json`: which jobs belong to a run. Written once, by whoever knew of the job first."""

from __future__ import annotations

import socket
import time
from dataclasses import asdict, dataclass

from tuneplane.kernel.files import read_json, write_json
from tuneplane.kernel.process import is_alive, start_ticks
from tuneplane.kernel.runfolder import RunFolder


@dataclass(frozen=True)
class Submission:
    """One job of a run: a Slurm id, or `local-<pid>` with the process that runs it."""

    job_id: str
    by: str  # "tp" or "hand"
    at: float  # seconds since the epoch
    host: str = ""
    pid: int = 0
    pid_start: int | None = None

    @property
    def is_local(self) -> bool:
        return self.job_id.startswith("local-")

    def is_alive_here(self) -> bool:
        """Whether a local job's process runs on this machine."""
        return self.is_local and self.host == socket.gethostname() and is_alive(self.pid, self.pid_start)


def record_submission(run: RunFolder, job_id: str, by: str, pid: int = 0) -> None:
    """Note that a job belongs to this run, unless that is known. `pid`: the process of a local job."""
    path = run.submissions / f"{job_id}.json"
    if path.exists():
        return
    local = job_id.startswith("local-")
    noted = Submission(
        job_id,
        by,
        time.time(),
        socket.gethostname(),
        pid if local else 0,
        start_ticks(pid) if local else None,
    )
    write_json(path, asdict(noted))


def read_submissions(run: RunFolder) -> list[Submission]:
    """Every job of the run, oldest first; a file that cannot be read is passed over."""
    found = []
    for path in run.submissions.glob("*.json"):
        try:
            found.append(Submission(**read_json(path)))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(found, key=lambda s: s.at)
