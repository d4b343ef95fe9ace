"""What agents that were killed left on their nodes: a last step of the job removes it.

`outcome.py` calls it as an attempt ends. Where Slurm itself ends the job there is no such step any more: then the
next run on that node removes it, before it makes a folder of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tuneplane.kernel.errors import TunePlaneError
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.node.record import read_record
from tuneplane.node.restart import slurm_environment
from tuneplane.node.scratch import make_user_folder, remove_abandoned
from tuneplane.spec import JobSpec, read

STEP_S = 30.0
"""How long the step may take: a large tree on a slow disk. The run has ended by then, and the job waits."""


def clear_nodes(run: RunFolder, attempt: AttemptFolder, environ: Mapping[str, str]) -> None:
    """Remove the scratch folders of agents that were killed; says so where that fails."""
    hosts = killed([read_record(path) for path in sorted(attempt.path.glob("node-*.json"))])
    job_id = environ.get("SLURM_JOB_ID")
    if not hosts or not job_id:
        return
    step = [
        "srun",
        f"--jobid={job_id}",
        f"--nodes={len(hosts)}",
        f"--ntasks={len(hosts)}",
        "--ntasks-per-node=1",
    ]
    step += [
        f"--nodelist={','.join(hosts)}",
        "--overlap",
        "--mem=0",
        "--gres=none",
        "--export=NONE",
        "--quiet",
    ]
    try:
        python = read(run.job).spec.node.python
        subprocess.run(
            [*step, python, "-I", "-S", str(run.kernel), "clear", str(run.path)],
            env=slurm_environment(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the batch script reads ours
            timeout=STEP_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, TunePlaneError):  # srun has said why
        told = f"what a killed agent left stays on {', '.join(hosts)} until the next run there"
        print(f"tuneplane: {told}", file=sys.stderr)


def killed(nodes: list[dict[str, Any]]) -> list[str]:
    """Hosts of agents that began and left no exit record."""
    return [str(node["host"]) for node in nodes if node.get("pid") and node.get("code") is None]


def clear_here(job: JobSpec) -> None:
    """On such a node: remove what no agent holds any more. Raises OperationError."""
    folder = make_user_folder(job)
    for name in remove_abandoned(folder):
        print(f"tuneplane: {folder / name} of an agent that was killed is removed", file=sys.stderr)
