"""`submissions/<id>.json`: which jobs belong to a run.

Noted by `tp` after it submitted one, and by the job itself as it starts, which is then known by hand too.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuneplane.kernel.files import create_once, json_text, read_json, write_json
from tuneplane.kernel.process import is_alive, start_ticks
from tuneplane.kernel.runfolder import RunFolder

TP, HAND = "tp", "hand"
"""Who started a job: `tp`, or somebody with sbatch or bash. The job itself cannot know, so it notes HAND."""


@dataclass(frozen=True)
class Submission:
    """One job of a run: a Slurm id, or `local-<pid>` with the process that runs it."""

    job_id: str
    by: str  # TP or HAND
    at: float  # seconds since the epoch
    host: str = ""
    pid: int = 0
    pid_start: int | None = None

    @property
    def is_local(self) -> bool:
        return self.job_id.startswith("local-")

    @property
    def is_here(self) -> bool:
        """Whether it is a local job of this machine, whose processes can be looked at."""
        return self.is_local and self.host == os.uname().nodename

    def is_alive_here(self) -> bool:
        """Whether a local job's process runs on this machine."""
        return self.is_here and is_alive(self.pid, self.pid_start)


def record_submission(run: RunFolder, job_id: str, by: str, pid: int = 0) -> None:
    """Note that a job belongs to this run. `pid`: the process of a local job. Raises OSError.

    Job and `tp` may both come first: what `tp` says stays, and what the job says is noted where nothing is.
    """
    path = run.submissions / f"{job_id}.json"
    local = job_id.startswith("local-")
    noted = Submission(
        job_id,
        by,
        time.time(),
        os.uname().nodename,
        pid if local else 0,
        start_ticks(pid) if local else None,
    )
    if by == TP or (local and _is_of_another_process(path, noted)):
        write_json(path, asdict(noted))
    elif not path.exists():
        create_once(path, json_text(asdict(noted)))


def read_submissions(run: RunFolder) -> list[Submission]:
    """Every job of the run, oldest first; a file that cannot be read is passed over."""
    found = [_read(path) for path in run.submissions.glob("*.json")]
    return sorted((s for s in found if s is not None), key=lambda s: s.at)


def _read(path: Path) -> Submission | None:
    try:
        value: Any = read_json(path)
        ticks = value.get("pid_start")
        return Submission(
            job_id=str(value["job_id"]),
            by=str(value.get("by", HAND)),
            at=float(value["at"]),
            host=str(value.get("host", "")),
            pid=int(value.get("pid", 0)),
            pid_start=None if ticks is None else int(ticks),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _is_of_another_process(path: Path, noted: Submission) -> bool:
    """Whether the note is of a former process with the same pid: this machine counts them round."""
    known = _read(path)
    return known is not None and (known.host, known.pid_start) != (noted.host, noted.pid_start)
