"""A run on this machine: waits for its share of GPUs or CPUs, then the very same attempt and agent.

A share is a number of flock'ed slot files: the kernel frees them however the run ends.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.files import read_json
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import record_submission
from tuneplane.node.agent import run_node
from tuneplane.node.attempt import claim, end
from tuneplane.spec import JobSpec

POLL_S = 0.2


def run_local(job: JobSpec, environ: Mapping[str, str]) -> int:
    """Claim, run and end one attempt here. Returns the attempt's exit code."""
    run = RunFolder(Path(job.metadata.folder))
    signal.signal(signal.SIGTERM, _leave)  # while it waits; the agent takes over later
    record_submission(run, f"local-{os.getpid()}", "hand", os.getpid())
    with ExitStack() as held:
        slots = _acquire(slot_folder(run), machine_slots(job), job.spec.resources.gpus_per_node, held)
        given = dict(environ)
        if job.spec.resources.device == "gpu":
            given["CUDA_VISIBLE_DEVICES"] = ",".join(str(slot) for slot in slots)
        attempt = claim(run, job, ["127.0.0.1"], given)
        claimed = read_json(attempt.start)
        code = run_node(job, attempt.number, claimed["address"], int(claimed["port"]), given)
        return end(run, job, attempt.number, code)


def machine_slots(job: JobSpec) -> int:
    """How many GPUs this machine has (device files), or CPUs on a cpu device."""
    if job.spec.resources.device == "cpu":
        return max(len(os.sched_getaffinity(0)), job.spec.resources.gpus_per_node)
    count = len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()])
    if count < job.spec.resources.gpus_per_node:
        raise OperationError(
            Fault(f"this machine has {count} GPUs, the run asks for {job.spec.resources.gpus_per_node}")
        )
    return count


def slot_folder(run: RunFolder) -> Path:
    """`<storage root>/local/`: runs of one user share this machine among themselves."""
    folder = run.path.parents[3] / "local"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _acquire(folder: Path, slots: int, wanted: int, held: ExitStack) -> list[int]:
    """Hold `wanted` of `slots`. One waiter at a time collects, so that a large run is not starved."""
    queue = held.enter_context((folder / "queue.lock").open("w"))
    fcntl.flock(queue, fcntl.LOCK_EX)
    mine: list[int] = []
    while len(mine) < wanted:
        for slot in range(slots):
            if slot in mine or len(mine) == wanted:
                continue
            file = (folder / f"slot-{slot}.lock").open("w")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                continue
            held.enter_context(file)
            mine.append(slot)
        if len(mine) < wanted:
            time.sleep(POLL_S)
    fcntl.flock(queue, fcntl.LOCK_UN)
    return sorted(mine)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)
