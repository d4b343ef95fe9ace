"""The site's cap on one user's GPUs in flight, pending and running, by squeue's own numbers (C45)."""

from __future__ import annotations

import os
import re

from tuneplane.kernel.errors import Fault, UsageError
from tuneplane.launch.slurm_commands import run_slurm

FORMAT = "numnodes:20,tres-per-node:200,tres-alloc:400"
"""Wide columns: squeue cuts what does not fit. None of them holds a blank."""


def check_in_flight(cap: int, asked: int, contact: str) -> None:
    """Raise UsageError where this user's GPUs and those asked for are more than the cap."""
    # --all: in partitions that are hidden, or closed to the user's group by now, too
    argv = ["squeue", f"--user={os.getuid()}", "--all", "--noheader", "--array", f"--Format={FORMAT}"]
    held = gpus_in_flight(run_slurm(argv))
    if held + asked > cap:
        raise UsageError(
            Fault(
                f"you have {held} GPUs in flight and ask for {asked}: this site's cap on a user is {cap}",
                "site.caps.gpus_in_flight",
                f"wait for a run to end, stop one (tp job ls), or ask {contact}",
            )
        )


def gpus_in_flight(squeue: str) -> int:
    """GPUs in lines of `nodes, gres per node, resources in all`, as `FORMAT` asks for them.

    The last column has them however they were asked for, where the site counts GPUs (AccountingStorageTRES);
    elsewhere the gres per node is all that squeue tells.
    """
    total = 0
    for line in squeue.splitlines():
        nodes, gres, tres = (*line.split(), "", "", "")[:3]
        counted = _gpus(tres)
        total += counted if counted is not None else (_gpus(gres) or 0) * _number(nodes)
    return total


def _gpus(text: str) -> int | None:
    """GPUs in a list such as `cpu=8,gres/gpu=8,gres/gpu:h200=8` or `gres:gpu:h200:8(S:0-1)`; None without any."""
    typed: list[int] = []
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        found = re.fullmatch(r"gres[/:]gpu(?::([^:=]*[^0-9:=][^:=]*))?(?:[:=](\d+))?", item)
        if found is None:
            continue
        count = int(found[2] or 1)
        if found[1] is None and "=" in item:  # the sum of all types
            return count
        typed.append(count)
    return sum(typed) if typed else None


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
