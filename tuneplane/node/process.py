"""Processes of one node: found by parent links in /proc, told to end together, reaped by the agent.

`trainer.py` calls this for what it started, `leftovers.py` for what an earlier attempt left.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress

from tuneplane.containers import serves_image

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def become_subreaper() -> None:
    """Let orphans of this process's tree become its children, so that none outlives the job unseen."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def processes() -> list[int]:
    """Every process that /proc shows."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, parents first. Zombies among them: they still have a parent."""
    children: dict[int, list[int]] = {}
    for other in processes():
        parent = parent_of(other)
        if parent is not None:
            children.setdefault(parent, []).append(other)
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def parent_of(pid: int) -> int | None:
    """A process's parent; None where it is gone. Source: proc(5), /proc/pid/stat."""
    try:
        return int(_read(pid, "stat").rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def led_by(words: Sequence[str]) -> list[int]:
    """The process whose argv starts with `words`, and all that came from it; empty where there is none.

    For what Slurm started beside this process. Besides the tree, whatever else is in the leader's cgroup,
    which is its step's, unless it is this process's own.
    """
    start = b"".join(os.fsencode(word) + b"\0" for word in words)
    leaders = [pid for pid in processes() if _try_read(pid, "cmdline").startswith(start)]
    found = dict.fromkeys(leaders)
    own = _try_read(os.getpid(), "cgroup")
    for leader in leaders:
        found.update(dict.fromkeys(descendants(leader)))
        group = _try_read(leader, "cgroup")
        if group and group != own:
            above = parent_of(leader)  # slurmstepd
            found.update(
                dict.fromkeys(p for p in processes() if p != above and _try_read(p, "cgroup") == group)
            )
    return list(found)


def trainers(pids: Iterable[int]) -> list[int]:
    """Without the processes that serve the container's image: ended first, they take it from the others."""
    return [pid for pid in pids if not serves_image(_name(pid))]


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of its own for a signal. Source: proc(5), SigCgt in /proc/pid/status."""
    for line in _try_read(pid, "status").splitlines():
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def speakers(pids: Iterable[int]) -> list[int]:
    """Those that say on SIGQUIT where they are: they catch it.

    Where any of them is a rank of torchrun, ranks alone, without what they forked: torchrun itself catches it to
    end them all.
    """
    catching = [pid for pid in pids if catches(pid, signal.SIGQUIT)]
    ranks = {pid for pid in catching if b"\0LOCAL_RANK=" in b"\0" + environment_of(pid)}
    return [pid for pid in catching if pid in ranks and parent_of(pid) not in ranks] if ranks else catching


def reap() -> tuple[dict[int, int], bool]:
    """Collect every child that has ended: pid → exit code (negative: the signal), and whether any is left."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended[pid] = os.waitstatus_to_exitcode(status)


def environment_of(pid: int) -> bytes:
    """A process's environment as it was started, `NAME=value` ended by NUL; empty where it may not be read."""
    return _try_read(pid, "environ")


def _name(pid: int) -> str:
    return _try_read(pid, "comm").decode("utf-8", "replace").strip()


def _try_read(pid: int, name: str) -> bytes:
    try:
        return _read(pid, name)
    except OSError:
        return b""


def _read(pid: int, name: str) -> bytes:
    descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY)
    try:
        parts = []
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)
