"""What squeue knows of the jobs that work in a run's folder: of the user's own, by that folder alone.

`restart.py` looks there before it starts a run again, `subject.py` before an operation believes its run over.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OVER = frozenset(
    (
        *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED"),
        *("OUT_OF_MEMORY", "DEADLINE", "REVOKED"),
    )
)
"""Slurm's states of a job that has ended. Source: squeue(1), JOB STATE CODES."""


@dataclass(frozen=True)
class QueuedJob:
    """A job as squeue shows it. element: `<array>_<number>` of an array's."""

    job_id: str
    element: str
    state: str

    @property
    def names(self) -> frozenset[str]:
        return frozenset((self.job_id, self.element))


def queue_argv(ended: bool = False) -> list[str]:
    """The command whose lines `jobs_in` reads. ended: also jobs that Slurm has not forgotten yet."""
    states = ["--states=all"] if ended else []
    user = f"--user={os.geteuid()}"
    return ["squeue", user, "--all", "--noheader", "--array", *states, "--format=%i|%F_%K|%T|%Z"]


def jobs_in(folder: Path, said: str) -> list[QueuedJob]:
    """The jobs of that folder among squeue's lines, in Slurm's order."""
    found = []
    for line in said.splitlines():
        job_id, element, state, place = (part.strip() for part in (line.split("|", 3) + [""] * 4)[:4])
        if place == str(folder):
            found.append(QueuedJob(job_id, element, state))
    return found


def read_queue(folder: Path, environ: Mapping[str, str], ended: bool = False) -> list[QueuedJob]:
    """Ask squeue. Raises OperationError where it does not answer."""
    from tuneplane.node.restart import run_slurm

    return jobs_in(folder, run_slurm(queue_argv(ended), environ))
