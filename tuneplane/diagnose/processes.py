"""Looking at a running command on its node: what its main process does, with its stack where py-spy is.

By an overlapping step of the job, or right here for a local run. `gather.py` asks for it where a run is silent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tuneplane.diagnose import probe
from tuneplane.diagnose.evidence import Process
from tuneplane.diagnose.traces import cut
from tuneplane.launch.slurm_commands import slurm_environment

ANSWER_S = 40.0
"""A step must be scheduled beside the running one, and py-spy reads a large process for seconds."""


def read_processes(
    python: str, commands: Mapping[int, tuple[str, int]], job_id: str
) -> tuple[Process, ...] | str:
    """What the processes that speak for a running command do, on all its nodes; or why they cannot be looked at.

    commands: host and pid of the command by node. job_id: of Slurm; empty for a run on this machine.
    """
    source = Path(probe.__file__).read_text(encoding="utf-8")
    pids = [f"{node}:{pid}" for node, (_, pid) in sorted(commands.items())]
    inside = [python, "-I", "-S", "-c", source, *pids, "--", str(Path(sys.executable).parent / "py-spy")]
    hosts = [host for _, (host, _) in sorted(commands.items())]
    if job_id:
        step = ["srun", f"--jobid={job_id}", f"--nodelist={','.join(hosts)}", f"--nodes={len(hosts)}"]
        step += [f"--ntasks={len(hosts)}", "--overlap", "--mem=0", "--gres=none", "--export=NONE", "--quiet"]
        argv = [*step, *inside]
    elif hosts == [os.uname().nodename]:
        argv = inside
    else:
        return f"it runs on {hosts[0]}: ask there"
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
    except subprocess.TimeoutExpired:
        return f"{hosts[0]} did not answer within {ANSWER_S:.0f} s"
    except OSError as error:
        return f"{hosts[0]}: {error.strerror}"
    try:
        found = parse_processes(done.stdout)
    except (ValueError, KeyError, TypeError):
        found = ()
    if found:
        return found
    return f"{hosts[0]}: {' '.join(done.stderr.split())[-300:] or 'the command is not there any more'}"


def parse_processes(said: str) -> tuple[Process, ...]:
    """Lines of `probe.py`, by node and rank. Raises ValueError, KeyError, TypeError for anything else."""
    found = []
    for line in said.splitlines():
        if not line.startswith("{"):
            continue
        value = json.loads(line)
        for process in value["processes"]:
            rank = process["rank"]
            found.append(
                Process(
                    node=int(value["node"]),
                    pid=int(process["pid"]),
                    name=str(process["name"]),
                    state=str(process["state"]),
                    cpu_percent=float(process["cpu_percent"]),
                    rank=None if rank is None else int(rank),
                    wait_channel=str(process["wait_channel"]),
                    stack=tuple(cut(str(text)) for text in process["stack"]),
                    no_stack=str(process["no_stack"]),
                )
            )
    return tuple(sorted(found, key=lambda p: (p.node, p.rank if p.rank is not None else -1)))
