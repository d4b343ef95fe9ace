"""A shell beside a running command: the same container, mounts and environment, on the same node."""

from __future__ import annotations

import os

from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.node.scratch import read_launch, scratch_folder
from tuneplane.spec import JobSpec

SHELL = ("bash", "-i")


def run_shell(job: JobSpec, attempt: int, rank: int, command: list[str]) -> int:
    """Replace this process by `command` (an interactive bash where empty). Raises OperationError."""
    scratch = scratch_folder(job, attempt, rank)
    try:
        started = read_launch(scratch.launch)
    except (OSError, ValueError):
        raise OperationError(
            Fault(
                f"attempt {attempt} of {job.metadata.run_id} does not run on this node (rank {rank})",
                f"node {os.uname().nodename}",
                f"tp job status {job.metadata.run_id}",
            )
        ) from None
    argv = [*started.enter, *(command or SHELL)]
    if started.terminal and os.isatty(0):
        argv.insert(1, started.terminal)
    environ = {**started.environ, "TERM": os.environ.get("TERM", "dumb")}
    os.chdir(started.cwd)
    try:
        os.execvpe(argv[0], argv, environ)
    except OSError as error:
        raise OperationError(
            Fault(f"{argv[0]} cannot be started: {error.strerror}", "tp job shell")
        ) from None
