"""Slurm through submitit: directives and arrays are its, the payload is our script, not a pickle.

`SlurmLauncher.render` is pure; `slurm_commands.submit_script` hands the very text that was rendered to sbatch.
These are private APIs of submitit 1.5: `tests/test_launch_slurm.py` fails loudly when they change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor

from tuneplane.launch.script import header, slurm_command, slurm_setup, slurm_teardown
from tuneplane.spec import JobSpec


class SlurmLauncher(SlurmExecutor):
    """submitit's executor with our script as its payload.

    One instance a JobSpec; it never pickles and never reads its own folder.
    """

    def __init__(self, job: JobSpec) -> None:
        self.job = job
        super().__init__(folder=Path(job.metadata.folder) / "slurm")
        self.update_parameters(**directives(job))

    @classmethod
    def affinity(cls) -> int:
        """Always usable: rendering needs no srun on this machine."""
        return 2

    def render(self) -> str:
        """The whole script."""
        text: str = self._make_submission_file_text(slurm_command(self.job), uid="")
        return text

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        text: str = super()._make_submission_file_text(command, uid)
        lines = text.split("\n")
        assert lines[0] == "#!/bin/bash"
        if self.job.spec.slurm and self.job.spec.slurm.signal_before_end_s is None:
            lines = [line for line in lines if not line.startswith("#SBATCH --signal=")]
        lines = [line for line in lines if line != "export SUBMITIT_EXECUTOR=slurm"]
        return "\n".join([lines[0], *header(self.job), *lines[1:]])


def directives(job: JobSpec) -> dict[str, Any]:
    """submitit's parameters for a JobSpec: a directive only where somebody asked for it."""
    resources, slurm = job.spec.resources, job.spec.slurm
    assert slurm is not None
    asked: dict[str, Any] = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "nodelist": slurm.nodelist,
        "exclude": slurm.exclude,
        "dependency": slurm.dependency,
        "mail_user": slurm.mail_user,
        "mail_type": slurm.mail_type,
        "time": slurm.time,
        "mem": None,
        "cpus_per_task": resources.cpus_per_node,
        "exclusive": True if slurm.exclusive else None,
        "wckey": None,
    }
    more: dict[str, Any] = {
        "chdir": job.metadata.folder,
        "output": _pattern_free(job.metadata.folder) + "/slurm/%j.out",
        "export": "NONE",
    }
    if slurm.reservation is not None:
        more["reservation"] = slurm.reservation
    if resources.memory_per_node is not None:
        more["mem"] = resources.memory_per_node
    if slurm.signal_before_end_s is not None:
        # Only to this shell: a signal to the step would kill every process of the trainer.
        more["signal"] = f"B:USR2@{slurm.signal_before_end_s}"
    if resources.device == "gpu" and slurm.gpu_request != "none":
        count = f"{slurm.gpu_type}:{resources.gpus_per_node}" if slurm.gpu_type else resources.gpus_per_node
        if slurm.gpu_request == "gres":
            more["gres"] = f"gpu:{count}"
        else:
            more["gpus-per-node"] = count
    more.update({name: value or True for name, value in slurm.extra_directives.items()})
    return {
        **asked,
        "job_name": slurm.job_name,
        "nodes": resources.nodes,
        "ntasks_per_node": 1,
        "setup": slurm_setup(job),
        "teardown": slurm_teardown(),
        "stderr_to_stdout": True,
        "use_srun": False,
        "additional_parameters": more,
    }


def _pattern_free(path: str) -> str:
    """A path in which `%` is no filename pattern of sbatch."""
    return path.replace("%", "%%")
