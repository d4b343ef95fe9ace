"""What must be there before an attempt: the shared storage itself, and the run's secrets.

The claim looks on node 0, and every node's agent on its own.
"""

from __future__ import annotations

import os

from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.spec import JobSpec


def check_start(run: RunFolder, job: JobSpec) -> None:
    """Raise OperationError with all that is missing."""
    faults = []
    run_id = job.metadata.run_id
    try:
        seen = run.canary.read_bytes()
    except OSError:
        seen = b""
    if seen.strip() != run_id.encode():
        faults.append(
            Fault(
                f"the canary file {run.canary} is not there or not this run's",
                f"node {os.uname().nodename}",
                "the storage root is not shared with this node: choose another, or tell the administrators",
            )
        )
    if (job.spec.node.secrets or job.spec.reporting.enabled) and not run.secrets.is_file():
        what = f"secrets.env is gone: run {run_id} has ended for good"
        faults.append(Fault(what, str(run.path), f"tp job retry {run_id}"))
    if faults:
        raise OperationError(*faults)
