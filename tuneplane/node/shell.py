"""A shell beside a running command: the same container, mounts and environment, on the same node."""

from __future__ import annotations

import json
import os
import socket

from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.node.scratch import scratch_folder
from tuneplane.spec import JobSpec


def run_shell(job: JobSpec, attempt: int, rank: int, command: list[str]) -> int:
    """Replace this process by `command` (an interactive bash where empty). Raises OperationError."""
    scratch = scratch_folder(job, attempt, rank)
    try:
        started = json.loads(scratch.launch.read_text(encoding="utf-8", errors="surrogateescape"))
    except (OSError, ValueError):
        raise OperationError(
            Fault(
                f"attempt {attempt} of {job.metadata.run_id} does not run on this node (rank {rank})",
                f"node {socket.gethostname()}",
                f"tp job status {job.metadata.run_id}",
            )
        ) from None
    # The adapter's command stands at the end of the argv that started it.
    length = len(started["command"])
    argv = [*started["argv"][: len(started["argv"]) - length], *(command or ["bash", "-i"])]
    os.chdir(started["cwd"])
    environ = dict(started["environ"])
    environ.setdefault("TERM", os.environ.get("TERM", "dumb"))
    os.execvpe(argv[0], argv, environ)
