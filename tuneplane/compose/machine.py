"""What a profile of this machine leaves to be found out: is there a GPU, how many, how many CPUs.

Compose calls it for the local scheduler; device files decide, so that no driver library is loaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tuneplane.compose.tree import Statement, Tree

AUTO = "auto"
DEVICES = Path("/dev")
DRIVER_ANSWER_S = 10.0
"""A driver that wakes up its GPUs takes seconds to answer; one that hangs must not hold up a submit."""

_DEVICE = re.compile(r"nvidia[0-9]+")


def complete(tree: Tree, environ: Mapping[str, str]) -> Tree:
    """The tree of a local profile with device, gpus_per_node and cpus_per_node found out where it leaves them.

    `device: auto` becomes gpu or cpu; `gpus_per_node: 0` all GPUs, or on a cpu device one process a CPU.
    """
    found = dict(tree)

    def find(name: str, value: object, how: str) -> None:
        key = ("cluster", name)
        found[key] = Statement(key, value, f"this machine: {how}", "machine")

    device = tree["cluster", "device"].value
    cpus = len(os.sched_getaffinity(0))
    if device == AUTO or (device == "gpu" and tree["cluster", "gpus_per_node"].value == 0):
        gpus, how = count_gpus(environ)
        if device == AUTO:
            device = "gpu" if gpus else "cpu"
            find("device", device, how)
        if device == "gpu" and tree["cluster", "gpus_per_node"].value == 0:
            find("gpus_per_node", gpus, how)
    if device == "cpu" and tree["cluster", "gpus_per_node"].value == 0:
        find("gpus_per_node", cpus, f"one process for each of {cpus} CPUs")
    if tree["cluster", "cpus_per_node"].value is None:
        find("cpus_per_node", cpus, f"{cpus} CPUs")
    return found


def count_gpus(environ: Mapping[str, str]) -> tuple[int, str]:
    """NVIDIA GPUs that this user's programs see here, and how that is known.

    `CUDA_VISIBLE_DEVICES` counts where it is set, as CUDA reads it: up to the first entry that names none.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = 0
        for entry in visible.split(","):
            if not entry.strip() or entry.strip() in ("-1", "NoDevFiles"):
                break
            count += 1
        return count, f"{_gpus(count)} in CUDA_VISIBLE_DEVICES"
    try:
        count = sum(1 for name in os.listdir(DEVICES) if _DEVICE.fullmatch(name))
    except OSError:
        count = 0
    if count == 0:
        count = _ask_driver(environ)
    return count, _gpus(count)


def _ask_driver(environ: Mapping[str, str]) -> int:
    """GPUs that nvidia-smi lists, where it is installed: some systems (WSL) have no device file a GPU."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH", ""))
    if program is None:
        return 0
    try:
        result = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=DRIVER_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    lines = result.stdout.splitlines() if result.returncode == 0 else []
    return sum(1 for line in lines if re.match(r"GPU [0-9]+:", line))


def _gpus(count: int) -> str:
    return "no NVIDIA GPU" if count == 0 else f"{count} NVIDIA GPU{'s' if count > 1 else ''}"
