"""Looks at a running command's processes, as a program of its own on each node: standard library, Python 3.9.

`processes.py` sends this very file's text to the nodes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from typing import Any

LOOK_S = 1.0
"""Between two readings of the processor time."""

STACK_S = 10.0
STACKS_S = 20.0
MOST_STACK_LINES = 40
MOST_PROCESSES = 8
"""As many ranks as a node mostly has."""


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
        program = os.readlink(f"/proc/{pid}/exe")  # noqa: PTH115
    except OSError:
        program = text_of(pid, "comm")
    return program.rpartition("/")[2].startswith("python")


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


def rank_of(pid: int) -> int | None:
    """RANK of a process's environment, as torchrun and its like set it."""
    found = re.search(r"(?:^|\0)RANK=(\d+)(?:\0|$)", text_of(pid, "environ"))
    return int(found.group(1)) if found else None


def chosen(pids: list[int], spent: dict[int, int]) -> list[int]:
    """The processes that speak for the command: one of each rank; without ranks the busiest, a Python first.

    A launcher such as torchrun has no rank; of several processes of a rank the first one trains.
    """
    ranks: dict[int, int] = {}
    for pid in pids:  # parents first
        rank = rank_of(pid)
        if rank is not None and pid in spent and is_python(pid):
            ranks.setdefault(rank, pid)
    if ranks:
        return [ranks[rank] for rank in sorted(ranks)][:MOST_PROCESSES]
    return [max(spent, key=lambda pid: (is_python(pid), spent[pid], pid))] if spent else []


def look(root: int, programs: list[str]) -> list[dict[str, Any]]:
    """What the main processes below `root` do."""
    pids = below(root)
    before = {pid: ticks(pid) for pid in pids}
    time.sleep(LOOK_S)
    spent = {pid: ticks(pid) - before[pid] for pid in pids if fields_of(pid)}
    found = []
    deadline = time.monotonic() + STACKS_S
    stack: list[str]
    for pid in chosen(pids, spent):
        if not is_python(pid):
            stack, why = [], "it is no Python program"
        elif time.monotonic() > deadline:
            stack, why = [], "the time for stacks was over"
        else:
            stack, why = stack_of(pid, programs)
        fields = fields_of(pid)
        found.append(
            {
                "pid": pid,
                "rank": rank_of(pid),
                "name": text_of(pid, "comm"),
                "state": fields[0] if fields else "",
                "cpu_percent": round(100.0 * spent[pid] / os.sysconf("SC_CLK_TCK") / LOOK_S, 1),
                "wait_channel": text_of(pid, "wchan").strip("0"),
                "stack": stack,
                "no_stack": why,
            }
        )
    return found


def main(arguments: list[str]) -> None:
    """`RANK:PID…` of the nodes' commands, `--`, programs that may be py-spy. Prints what is below this node's."""
    place = arguments.index("--")
    commands = dict(word.split(":") for word in arguments[:place])
    node = os.environ.get("SLURM_NODEID", "0") if len(commands) > 1 else next(iter(commands))
    found = look(int(commands[node]), arguments[place + 1 :]) if node in commands else []
    # In one write: nodes share the pipe.
    os.write(1, (json.dumps({"node": int(node), "processes": found}) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1:])
