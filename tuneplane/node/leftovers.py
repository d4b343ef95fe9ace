"""What an earlier attempt's processes left on this machine, where no Slurm ends them.

`local.py` calls it before the next attempt, which the claim allowed: that attempt's agent is dead.
"""

from __future__ import annotations

import os
import re
import signal
import time

from tuneplane.kernel import env
from tuneplane.node.process import environment_of, parent_of, processes, reap, signal_all

GONE_S = 5.0
"""How long killed processes may take to disappear."""


def end_leftovers(run_id: str, attempt: int) -> int:
    """Kill every process of this run's attempts before `attempt`. Returns how many there were.

    Known by the environment that they were started with, so those too that left the tree of their parents. A
    shell beside the trainer (`tp job shell`) that this very process came from is spared.
    """
    found = _of_attempts_before(run_id, attempt)
    signal_all(found, signal.SIGKILL)
    deadline = time.monotonic() + GONE_S
    while time.monotonic() < deadline and _of_attempts_before(run_id, attempt):
        reap()
        time.sleep(0.05)
    return len(found)


def _of_attempts_before(run_id: str, attempt: int) -> list[int]:
    spared = {os.getpid(), *_ancestors(os.getpid())}
    return [
        pid
        for pid in processes()
        if pid not in spared and _is_of_earlier(environment_of(pid), run_id, attempt)
    ]


def _is_of_earlier(environment: bytes, run_id: str, attempt: int) -> bool:
    """Whether an environment is that of a trainer of this run, or of the runtime that starts its container.

    The latter has the same variables with its own prefix.
    """
    wanted = f"{env.NRL_RUN_ID}={run_id}".encode()
    if re.search(rb"(^|\0|ENV_)" + re.escape(wanted) + rb"\0", environment) is None:
        return False
    number = re.search(rb"(^|\0|ENV_)" + env.ATTEMPT.encode() + rb"=(\d+)\0", environment)
    return number is not None and int(number.group(2)) < attempt


def _ancestors(pid: int) -> list[int]:
    found = []
    parent = parent_of(pid)
    while parent:
        found.append(parent)
        parent = parent_of(parent)
    return found
