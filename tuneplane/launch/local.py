"""Starting a run on this machine: its script in a session of its own, so that it outlives the terminal."""

from __future__ import annotations

import os
import subprocess

from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import record_submission


def start_local(run: RunFolder) -> str:
    """Start the run's script in the background and return its job id, `local-<pid>`. Raises OSError.

    The script execs into the kernel, so the pid stays that of the run.
    """
    output = run.slurm / "local.out"
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        process = subprocess.Popen(
            ["/bin/bash", str(run.script)],
            cwd=run.path,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    job_id = f"local-{process.pid}"
    record_submission(run, job_id, "tp", process.pid)
    return job_id
