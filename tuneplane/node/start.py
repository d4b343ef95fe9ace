"""What must be there before an attempt: the shared storage itself, and the run's secrets.

The claim looks on node 0, and every node's agent on its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.spec import Image, JobSpec


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
    if job.spec.container.image is not None:
        faults += _image_faults(job.spec.container.image, run_id)
    if (job.spec.node.secrets or job.spec.reporting.enabled) and not run.secrets.is_file():
        what = f"secrets.env is gone: run {run_id} has ended for good"
        faults.append(Fault(what, str(run.path), f"tp job retry {run_id}"))
    if faults:
        raise OperationError(*faults)


def _image_faults(image: Image, run_id: str) -> Iterator[Fault]:
    """What was submitted is what is started, or nothing (C27, C41). By size and time: hashing takes minutes."""
    where = f"node {os.uname().nodename}"
    try:
        found = Path(image.path).stat()
    except OSError:  # told with the mounts that are not there, by `command`
        return
    recorded = (image.size_bytes, image.modified_s)
    if image.size_bytes and recorded != (found.st_size, int(found.st_mtime)):
        what = f"the image {image.path} is not the one that was submitted: it was changed since"
        yield Fault(
            what, where, f"tp job verify {run_id} shows its sha256; submit again to run what is there now"
        )
