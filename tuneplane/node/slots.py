"""Shares of this machine for runs without Slurm: one lock a GPU or CPU, freed by the kernel however a run ends.

`local.py` takes them. The locks lie on this machine's own disk: another machine's runs are not in the way.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.node.allocation import count_devices
from tuneplane.spec import JobSpec

POLL_S = 0.2


def machine_shares(job: JobSpec, environ: Mapping[str, str]) -> list[str]:
    """Names of this machine's GPUs as CUDA_VISIBLE_DEVICES has them, or of its CPUs. Raises OperationError.

    GPUs are those that the environment names already, else one for each device file.
    """
    wanted = job.spec.resources.gpus_per_node
    if job.spec.resources.device == "cpu":
        # A machine with fewer CPUs still runs it, alone.
        return [str(cpu) for cpu in range(max(len(os.sched_getaffinity(0)), wanted))]
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        shares = [str(index) for index in range(count_devices())]
    else:
        shares = list(dict.fromkeys(filter(None, (name.strip() for name in named.split(",")))))
    if len(shares) < wanted:
        where = "this machine" if named is None else f"CUDA_VISIBLE_DEVICES={named}"
        raise OperationError(
            Fault(
                f"{where} has {len(shares)} GPUs, the run asks for {wanted}",
                f"profile {job.spec.resources.profile}",
                f"submit it for {len(shares)} GPUs" if shares else "submit it where there are GPUs",
            )
        )
    return shares


def take_shares(folder: Path, shares: list[str], wanted: int, held: ExitStack) -> list[str]:
    """Wait for `wanted` of `shares` and hold them until `held` ends, or this process.

    One waiter at a time collects, so that a large run is not starved by small ones; the others queue behind it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "queue.lock").open("w") as queue:
        told = not _lock(queue.fileno())
        if told:
            _say_waiting(wanted)
            fcntl.flock(queue, fcntl.LOCK_EX)
        mine: dict[str, None] = {}
        while True:
            for share in shares:
                if share not in mine and len(mine) < wanted:
                    file = (folder / f"share-{share.replace('/', '_')}.lock").open("w")
                    if _lock(file.fileno()):
                        held.enter_context(file)
                        mine[share] = None
                    else:
                        file.close()
            if len(mine) == wanted:
                return [share for share in shares if share in mine]
            if not told:
                _say_waiting(wanted)
                told = True
            time.sleep(POLL_S)


def _say_waiting(wanted: int) -> None:
    print(f"tuneplane: waits for {wanted} of this machine's GPUs or CPUs", file=sys.stderr, flush=True)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
