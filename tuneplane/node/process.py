"""Processes of one node: started in a session of their own, told to end, surely gone at the end."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from tuneplane.containers import serves_image

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def become_subreaper() -> None:
    """Let orphans of this process's tree become its children, so that none outlives the job unseen."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, by parent links in /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{entry}/stat").read_text(errors="replace")
            children.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(entry))
    found: list[int] = []
    queue = [pid]
    while queue:
        for child in children.get(queue.pop(), ()):
            found.append(child)
            queue.append(child)
    return found


def trainers(pids: list[int]) -> list[int]:
    """Without the processes that serve the container's image: ended first, they take it from the others."""
    return [pid for pid in pids if not serves_image(_name(pid))]


def signal_all(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to each that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_descendants(grace_s: float) -> int:
    """End every process below this one: TERM, `grace_s`, KILL. Returns how many had to be killed.

    Needs `become_subreaper` before they started.
    """
    me = os.getpid()
    signal_all(trainers(descendants(me)), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        _reap()
        if not trainers(descendants(me)):
            break
        time.sleep(0.02)
    killed = trainers(descendants(me))
    # A tree that forks while it is killed: again until none is left, bounded.
    for _ in range(50):
        left = descendants(me)
        if not left:
            break
        signal_all(left, signal.SIGKILL)
        time.sleep(0.02)
        _reap()
    return len(killed)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
