"""The site's cap on one user's GPUs in flight, pending and running, by squeue's own numbers (C45)."""

from __future__ import annotations

import re

from tuneplane.kernel.errors import Fault, UsageError
from tuneplane.launch.slurm_commands import run_slurm


def check_in_flight(cap: int, asked: int, contact: str) -> None:
    """Raise UsageError where this user's GPUs and those asked for are more than the cap."""
    held = gpus_in_flight(run_slurm(["squeue", "--me", "--noheader", "--array", "--format=%D|%b"]))
    if held + asked > cap:
        raise UsageError(
            Fault(
                f"you have {held} GPUs in flight and ask for {asked}: this site's cap on a user is {cap}",
                "site.caps.gpus_in_flight",
                f"wait for a run to end, stop one (tp job ls), or ask {contact}",
            )
        )


def gpus_in_flight(squeue: str) -> int:
    """GPUs in lines of `nodes|gres per node`, such as `2|gres:gpu:h200:8`."""
    total = 0
    for line in squeue.splitlines():
        nodes, _, gres = line.partition("|")
        each = sum(int(n) for n in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", gres))
        total += each * int(nodes) if nodes.strip().isdigit() else 0
    return total
