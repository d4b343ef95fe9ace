"""Slurm through submitit: directives and arrays are its, the payload is our script, not a pickle.

`SlurmLauncher.render` is pure; `slurm_commands.submit_script` hands the very text that was rendered to sbatch.
These are private APIs of submitit 1.5: `tests/test_launch_slurm.py` fails loudly when they change.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from submitit.slurm.slurm import SlurmExecutor

from tuneplane.kernel.errors import Fault, OperationError, raise_faults
from tuneplane.launch.script import header, slurm_command, slurm_setup, slurm_teardown
from tuneplane.spec import JobSpec

_DIRECTIVE_NAME = re.compile(r"[a-z][a-z0-9-]*")

_SUBMITITS_OWN = frozenset(("error", "array", "signal", "open-mode", "ntasks", "export-file"))
"""Directives that submitit writes by itself, or that would undo one of ours."""

_MAY_BE_EXTRA = frozenset(("mem", "wckey"))
"""Directives that we name only to say that submitit's default is not wanted."""


class SlurmLauncher(SlurmExecutor):
    """submitit's executor with our script as its payload.

    One instance a JobSpec; it never pickles and never reads or makes its folder. Raises UsageError where a
    value cannot stand in a batch script.
    """

    def __init__(self, job: JobSpec) -> None:
        raise_faults(faults(job))
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
        if lines[0] != "#!/bin/bash":
            raise OperationError(
                Fault("submitit's script does not begin as this version knows it", "submitit")
            )
        dropped = ["export SUBMITIT_EXECUTOR=slurm"]
        if self.job.spec.slurm and self.job.spec.slurm.signal_before_end_s is None:
            dropped.append(f"#SBATCH --signal={_NO_SIGNAL}")
        return "\n".join([lines[0], *header(self.job), *(line for line in lines[1:] if line not in dropped)])


_NO_SIGNAL = "B:USR2@0"
"""Takes the place of submitit's own signal, and is then left out."""


def faults(job: JobSpec) -> list[Fault]:
    """What of a JobSpec cannot be said in a batch script, all at once."""
    slurm, folder = job.spec.slurm, job.metadata.folder
    if slurm is None:
        return [Fault("there is no Slurm part", "spec.slurm")]
    found = []
    if "\\" in folder:
        what = "holds a backslash, which sbatch takes for an escape in the name of its output file"
        found.append(Fault(f"{folder} {what}", "storage root", "choose a storage root without it"))
    values = {f"spec.slurm.{name}": value for name, value in dataclasses.asdict(slurm).items()}
    values |= {"spec.resources.memory_per_node": job.spec.resources.memory_per_node}
    values |= {"metadata.folder": folder}
    for key, value in values.items():
        texts = [*value, *value.values()] if isinstance(value, dict) else value
        for text in texts if isinstance(texts, list) else [texts]:
            if isinstance(text, str) and any(_breaks_line(c) for c in text):
                found.append(Fault(f"{text!r} holds a line break or control character", key))
    own = {name.replace("_", "-") for name in directives(job)} - _MAY_BE_EXTRA
    own |= {*_own_more(job), *_SUBMITITS_OWN}
    for name in slurm.extra_directives:
        if not _DIRECTIVE_NAME.fullmatch(name):
            what = f"{name!r} is no long name of an sbatch option without its dashes"
            found.append(Fault(what, "spec.slurm.extra_directives"))
        elif name in own:
            found.append(Fault(f"{name} is set by TunePlane itself", "spec.slurm.extra_directives"))
    return found


def directives(job: JobSpec) -> dict[str, Any]:
    """submitit's parameters for a JobSpec: a directive only where somebody asked for it."""
    resources, slurm = job.spec.resources, job.spec.slurm
    assert slurm is not None
    asked: dict[str, Any] = {
        "job_name": slurm.job_name,
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
        "exclusive": True if slurm.exclusive else None,
        "wckey": None,
    }
    extra = {name: value or True for name, value in slurm.extra_directives.items()}
    more = {**_own_more(job), **extra}
    return {
        **{name: _unescaped(value) for name, value in asked.items()},
        "nodes": resources.nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": resources.cpus_per_node,
        "setup": slurm_setup(job),
        "teardown": slurm_teardown(),
        "stderr_to_stdout": True,
        "use_srun": False,
        "additional_parameters": {name: _unescaped(value) for name, value in more.items()},
    }


def _own_more(job: JobSpec) -> dict[str, Any]:
    """Directives that submitit has no parameter for, or writes otherwise."""
    resources, slurm = job.spec.resources, job.spec.slurm
    assert slurm is not None
    more: dict[str, Any] = {
        "chdir": job.metadata.folder,
        "output": job.metadata.folder.replace("%", "%%") + "/slurm/%j.out",
        "export": "NONE",
        # Only to this shell: a signal to the step would kill every process of the trainer.
        "signal": f"B:USR2@{slurm.signal_before_end_s}" if slurm.signal_before_end_s else _NO_SIGNAL,
    }
    # So that Slurm itself starts it again (a dead node, a preemption), whatever the site's JobRequeue says.
    if job.spec.restart.max_restarts and not {"requeue", "no-requeue"} & set(slurm.extra_directives):
        more["requeue"] = True
    if slurm.reservation is not None:
        more["reservation"] = slurm.reservation
    if resources.memory_per_node is not None:
        more["mem"] = resources.memory_per_node
    if resources.device == "gpu" and slurm.gpu_request != "none":
        count = f"{slurm.gpu_type}:{resources.gpus_per_node}" if slurm.gpu_type else resources.gpus_per_node
        if slurm.gpu_request == "gres":
            more["gres"] = f"gpu:{count}"
        else:
            more["gpus-per-node"] = count
    return more


def _unescaped(value: Any) -> Any:
    """A directive's value as sbatch reads it back: it takes a backslash for an escape, in quotes too."""
    return value.replace("\\", "\\\\") if isinstance(value, str) else value


def _breaks_line(character: str) -> bool:
    return character < " " or "\x7f" <= character < "\xa0" or character in "\u2028\u2029"
