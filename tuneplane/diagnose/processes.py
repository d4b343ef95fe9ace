"""Looking at a running command on its node: what its main process does, with its stack where py-spy is.

By an overlapping step of the job, or right here for a local run. `gather.py` asks for it where a run is silent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tuneplane.diagnose import probe
from tuneplane.diagnose.evidence import Process
from tuneplane.launch.slurm_commands import slurm_environment

ANSWER_S = 40.0
"""A step must be scheduled beside the running one, and py-spy reads a large process for seconds."""


def read_process(python: str, node: int, host: str, pid: int, job_id: str) -> Process | str:
    """The process that speaks for the command of a node, or why it could not be looked at.

    job_id: of Slurm; empty for a run on this machine.
    """
    source = Path(probe.__file__).read_text(encoding="utf-8")
    inside = [python, "-I", "-S", "-c", source, str(pid), str(Path(sys.executable).parent / "py-spy")]
    if job_id:
        step = ["srun", f"--jobid={job_id}", f"--nodelist={host}", "--nodes=1", "--ntasks=1", "--overlap"]
        argv = [*step, "--mem=0", "--gres=none", "--export=NONE", "--quiet", *inside]
    elif host == os.uname().nodename:
        argv = inside
    else:
        return f"it runs on {host}: ask there"
    try:
        done = subprocess.run(
            argv,
            env=slurm_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=ANSWER_S,
            check=False,
        )
        value: Any = json.loads(done.stdout) if done.returncode == 0 else None
    except subprocess.TimeoutExpired:
        return f"{host} did not answer within {ANSWER_S:.0f} s"
    except (OSError, ValueError) as error:
        return f"{host}: {error}"
    if not isinstance(value, dict):
        return f"{host}: {' '.join(done.stderr.split())[-300:] or f'exit code {done.returncode}'}"
    if not value:
        return f"{host}: the command is not there any more"
    return Process(
        node=node,
        pid=int(value["pid"]),
        name=str(value["name"]),
        state=str(value["state"]),
        cpu_percent=float(value["cpu_percent"]),
        wait_channel=str(value["wait_channel"]),
        stack=tuple(str(line) for line in value["stack"]),
        no_stack=str(value["no_stack"]),
    )
