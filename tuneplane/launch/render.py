"""A JobSpec's script, whichever scheduler it is for. Pure; submitit is imported for Slurm alone."""

from __future__ import annotations

from tuneplane.launch.script import local_script
from tuneplane.spec import JobSpec


def script_of(job: JobSpec) -> str:
    """The run's script, for Slurm or for this machine."""
    if job.spec.resources.scheduler == "local":
        return local_script(job)
    from tuneplane.launch.slurm import SlurmLauncher

    return SlurmLauncher(job).render()
