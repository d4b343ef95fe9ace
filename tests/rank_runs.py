"""Runs whose ranks torchrun starts: real agents, real torchrun, gloo ranks, on this one machine as two nodes.

run = rank_run(make, "import torch.distributed as dist; …", nodes=2)
assert run_nodes(run) == [1, 1]
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_fixture import SYSTEM_PATH, Run

JOINED = """\
import os, signal, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
print("joined", rank, flush=True)
dist.all_reduce(torch.ones(1))
"""


def needs_torch() -> None:
    """Skip where torch is not installed, which no CI run may."""
    if importlib.util.find_spec("torch") is None:
        if os.environ.get("CI"):
            pytest.fail("torch is not installed, and this is a CI run: it must not be skipped")
        pytest.skip("torch is not installed: `make test` does so")


def rank_run(make: Callable[..., Run], train: str, *, nodes: int = 1, ranks: int = 2, **more: Any) -> Run:
    """A run of train.py in `ranks` ranks on each of `nodes` nodes, claimed."""
    needs_torch()
    usual: dict[str, Any] = {
        "observability": "platform",
        "url": None,
        "adapter": "pytorch",
        "entrypoint": "train.py",
    }
    usual |= {"heartbeat_s": 5.0}  # two cores serve all ranks: agents are late
    path = f"{Path(sys.executable).parent}:{SYSTEM_PATH}"
    run = make("", files={"train.py": train}, nodes=nodes, per_node=ranks, path=path, **{**usual, **more})
    claim_for(run, nodes)
    return run


def claim_for(run: Run, nodes: int) -> None:
    """As a claim on so many hosts, which this one machine stands for: a real one takes no loopback address."""
    run.claimed()
    start = run.start_of()
    hosts = [f"n{rank + 1}" for rank in range(nodes)]
    run.attempt().start.write_text(json.dumps({**start, "hosts": hosts, "address": "127.0.0.1"}))


def start_nodes(run: Run, **more: str) -> list[subprocess.Popen[str]]:
    """An agent for each node, as srun starts them."""
    nodes = len(run.start_of()["hosts"])
    return [run.start_node(rank=rank, nodes=nodes, **more) for rank in range(nodes)]


def run_nodes(run: Run, **more: str) -> list[int]:
    """All nodes from their start to their end: their exit codes."""
    return [run.finish(agent).returncode for agent in start_nodes(run, **more)]
