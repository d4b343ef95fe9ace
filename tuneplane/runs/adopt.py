"""Jobs of a run that nobody noted: sbatch by hand while they still wait, or a `tp submit` that died meanwhile.

The script of a run works in the run's folder, so Slurm itself knows whose a job is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from tuneplane.kernel.files import read_json
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import record_submission
from tuneplane.launch.slurm_commands import FINAL, Answer, SlurmJob, query_own


def note_unknown_jobs(runs: Iterable[RunFolder]) -> Answer | None:
    """Note the queued jobs of those runs that have none yet, by one squeue for all: its answer. Never raises.

    None where there was nothing to ask for.
    """
    unknown = [run for run in runs if _may_be_queued(run)]
    if not unknown:
        return None
    answer = query_own()
    there = jobs_by_folder(answer)
    for run in unknown:
        for job in there.get(os.path.realpath(run.path), ()):
            with suppress(OSError):  # a colleague's run
                record_submission(run, job.job_id, "hand")
    return answer


def jobs_by_folder(answer: Answer) -> dict[str, list[SlurmJob]]:
    """The unended jobs by the real path of the folder that each works in."""
    found: dict[str, list[SlurmJob]] = {}
    for job in answer.jobs.values():
        if job.state not in FINAL and job.folder:
            found.setdefault(os.path.realpath(job.folder), []).append(job)
    return found


def _may_be_queued(run: RunFolder) -> bool:
    try:
        if not run.script.exists() or any(run.submissions.iterdir()) or any(run.attempts_folder.iterdir()):
            return False
        return bool(read_json(run.job)["spec"]["resources"]["scheduler"] == "slurm")
    except (OSError, ValueError, KeyError, TypeError):
        return False
