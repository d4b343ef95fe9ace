"""Run folders written by hand in the shapes that the node side writes, and a Slurm of a few lines.

For what is slow or rare on a real one: restarts by cause, lost intents, jobs that come back while they are ended.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from launch_jobs import bare_slurm_job, changed, write_run

from tuneplane.kernel.files import write_json
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import record_submission
from tuneplane.launch.render import script_of
from tuneplane.runs.index import current_user

LONG_AGO = 1_700_000_000.0

SLURM = """#!/usr/bin/python3 -IS
# Jobs in a file: id -> [state, reason]. Each call is noted, then may change the jobs by a rule of the test.
import json, os, sys
from pathlib import Path
name, here, words = Path(sys.argv[0]).name, Path(sys.argv[0]).parent, sys.argv[1:]
with (here / "calls").open("a") as calls:
    print(name, *words, file=calls)
if (here / f"{name}.refuses").exists():
    sys.exit((here / f"{name}.refuses").read_text())
jobs = json.loads((here / "jobs").read_text())
folder = (here / "folder").read_text() if (here / "folder").exists() else ""
def keep():
    (here / "new").write_text(json.dumps(jobs))
    os.replace(here / "new", here / "jobs")
if name == "squeue":
    named = [w.split("=")[1].split(",") for w in words if w.startswith("--jobs=")]
    for job in named[0] if named else jobs:
        if job in jobs:
            print(f"{job}|{jobs[job][0]}|n1|{jobs[job][1]}" + (f"\\x1f{folder}" if folder else ""))
elif name == "scancel" and not any(w.startswith("--signal") for w in words):
    for job in words:
        jobs[job] = ["CANCELLED", "None"]
    rule = here / "on_scancel"
    if rule.exists():
        jobs.update(json.loads(rule.read_text()))
        rule.unlink()
    keep()
elif name == "scontrol" and words[0] == "hold":
    if jobs[words[1]][0] != "PENDING":
        sys.exit("Job is no longer pending execution for job " + words[1])
    jobs[words[1]][1] = "JobHeldUser"
    keep()
elif name == "scontrol" and words[0] == "release":
    jobs[words[1]][1] = "Priority"
    keep()
elif name == "sbatch" and "--test-only" not in words:
    number = str(max([9000, *map(int, (j for j in jobs if j.isdecimal()))]) + 1)
    jobs[number] = ["PENDING", "Priority"]
    keep()
    print("Submitted batch job", number)
"""


class HandSlurm:
    """The programs of Slurm, first on the PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("squeue", "scancel", "scontrol", "sbatch", "sacct"):
            (folder / name).write_text(SLURM)
            (folder / name).chmod(0o755)
        self.jobs({})
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def jobs(self, jobs: Mapping[str, str]) -> None:
        """`{"42": "PENDING Resources"}`."""
        write_json(self.folder / "jobs", {job: [*told.split(" "), "None"][:2] for job, told in jobs.items()})

    def on_scancel(self, jobs: Mapping[str, str]) -> None:
        """What the next scancel brings about besides: a job that comes back, or a successor."""
        write_json(self.folder / "on_scancel", {job: [told, "None"] for job, told in jobs.items()})

    def refuses(self, name: str, words: str) -> None:
        (self.folder / f"{name}.refuses").write_text(words)

    def answers(self, name: str) -> None:
        (self.folder / f"{name}.refuses").unlink()

    def asked(self, *names: str) -> list[str]:
        """The calls of these programs so far, all of them where none is named."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if not names or line.split()[0] in names]


def slurm_run(root: Path, number: int = 0, changes: Mapping[str, Any] | None = None) -> RunFolder:
    """A run on Slurm, complete as rendered, below a storage root."""
    run_id = f"ring-20261129-1200{number:02}-x3k9"
    folder = root / "runs" / current_user() / "ring" / run_id
    job = changed(
        bare_slurm_job(),
        {
            "metadata.folder": str(folder),
            "metadata.run_id": run_id,
            "spec.reporting.enabled": False,
            **(changes or {}),
        },
    )
    return write_run(job, script_of(job))


def submit(run: RunFolder, job_id: str, at: float = LONG_AGO) -> None:
    record_submission(run, job_id, "tp")
    path = run.submissions / f"{job_id}.json"
    write_json(path, {**json.loads(path.read_text()), "at": at})


def attempt(
    run: RunFolder,
    number: int,
    job_id: str,
    *,
    end: Mapping[str, Any] | None = None,
    restart: Mapping[str, Any] | None = None,
    restarted: Mapping[str, Any] | None = None,
    **start: Any,
) -> None:
    """One attempt with its records. end: over those of one that saved and ended with code 0."""
    folder = run.attempt(number).path
    folder.mkdir(parents=True)
    begun = {"job_id": job_id, "slurm_job_id": job_id, "hosts": ["n1"], "host": "n1", "pid": 1}
    write_json(folder / "start.json", {**begun, "started_at": LONG_AGO + number * 100, **start})
    if end is not None:
        saved = {"code": 0, "reason": None, "stop_requested": True, "for_good": False}
        write_json(folder / "end.json", {**saved, "ended_at": LONG_AGO + number * 100 + 50, **end})
    for name, value in (("restart", restart), ("restarted", restarted)):
        if value is not None:
            write_json(folder / f"{name}.json", {"at": time.time(), **value})
