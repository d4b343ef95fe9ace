"""Looks at a running command's processes on its node. Run there as a program of its own: standard library, Python 3.9.

`processes.py` sends this very file's text to the node. Prints one JSON object. Arguments: the command's pid, then
paths where py-spy may be.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any

LOOK_S = 1.0
"""Between two readings of the processor time."""

STACK_S = 10.0
MOST_STACK_LINES = 60


def fields_of(pid: int) -> list[str]:
    """Fields of proc(5)'s stat after the name; empty where the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def text_of(pid: int, name: str) -> str:
    """A file of /proc/PID, or nothing."""
    try:
        with open(f"/proc/{pid}/{name}", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return ""


def below(root: int) -> list[int]:
    """The process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            fields = fields_of(int(entry))
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry))
    found, queue = [], [root]
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue += children.get(pid, [])
    return found


def ticks(pid: int) -> int:
    """Processor time of a process in clock ticks."""
    fields = fields_of(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def is_python(pid: int) -> bool:
    """Whether a process runs a Python interpreter."""
    try:
        program = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        program = text_of(pid, "comm")
    return os.path.basename(program).startswith("python")


def stack_of(pid: int, programs: list[str]) -> tuple[list[str], str]:
    """The stack by py-spy, or why there is none."""
    program = next((p for p in (*programs, shutil.which("py-spy")) if p and os.access(p, os.X_OK)), None)
    if program is None:
        return [], "py-spy is not on this node"
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=STACK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"py-spy: {error}"
    if done.returncode != 0:
        return [], f"py-spy: {' '.join(done.stderr.split())[:300]}"
    return done.stdout.splitlines()[:MOST_STACK_LINES], ""


def look(root: int, programs: list[str]) -> dict[str, Any]:
    """The process below `root` that speaks for the command: the busiest Python, else the busiest at all."""
    pids = below(root)
    before = {pid: ticks(pid) for pid in pids}
    time.sleep(LOOK_S)
    spent = {pid: ticks(pid) - before[pid] for pid in pids if fields_of(pid)}
    if not spent:
        return {}
    # A launcher such as torchrun waits; of several that wait, the one that was started last trains.
    chosen = max(spent, key=lambda pid: (is_python(pid), spent[pid], pid))
    stack, why = stack_of(chosen, programs) if is_python(chosen) else ([], "it is no Python program")
    return {
        "pid": chosen,
        "name": text_of(chosen, "comm"),
        "state": fields_of(chosen)[0] if fields_of(chosen) else "",
        "cpu_percent": round(100.0 * sum(spent.values()) / os.sysconf("SC_CLK_TCK") / LOOK_S, 1),
        "wait_channel": text_of(chosen, "wchan").strip("0"),
        "stack": stack,
        "no_stack": why,
    }


if __name__ == "__main__":
    json.dump(look(int(sys.argv[1]), sys.argv[2:]), sys.stdout)
