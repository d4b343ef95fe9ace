"""Jobs of a run that nobody noted: sbatch by hand while they still wait, or a `tp submit` that died meanwhile.

The script of a run works in the run's folder, so Slurm itself knows whose a job is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from tuneplane.kernel.errors import OperationError
from tuneplane.kernel.files import read_json
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import record_submission
from tuneplane.launch.slurm_commands import query_folders


def note_unknown_jobs(runs: Iterable[RunFolder]) -> None:
    """Note the queued jobs of those runs that have none yet, by one squeue for all. Never raises."""
    unknown = [run for run in runs if _may_be_queued(run)]
    if not unknown:
        return
    try:
        jobs = query_folders()
    except OperationError:
        return
    for run in unknown:
        job_id = jobs.get(os.path.realpath(run.path))
        if job_id is not None:
            with suppress(OSError):  # a colleague's run
                record_submission(run, job_id, "hand")


def _may_be_queued(run: RunFolder) -> bool:
    try:
        if not run.script.exists() or any(run.submissions.iterdir()) or any(run.attempts_folder.iterdir()):
            return False
        return bool(read_json(run.job)["spec"]["resources"]["scheduler"] == "slurm")
    except (OSError, ValueError, KeyError, TypeError):
        return False
