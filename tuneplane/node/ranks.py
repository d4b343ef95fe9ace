"""How torchrun starts a command in every rank, through the bridge, and with which variables. The agent calls it.

Static rendezvous: c10d's own elects its host by host names, which differ on some clusters (pytorch#73656).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from tuneplane.recipes.adapters import Command, Launch, NodeFacts

BRIDGE = "tuneplane.bridge"
"""The module that enters the training interpreter; PYTHONPATH has the kernel that it is part of."""

TORCHRUN = ("python3", "-m", "torch.distributed.run")
"""The image's own, by module: `torchrun` on PATH may be that of another interpreter."""

LINE_PREFIX = "[rank${rank}]: "
"""Before each line of a rank in the node's log, as torch's own hook writes it; by itself `--tee` would number the
ranks of each node anew. Source: TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE of torch.distributed.run."""


def launched(command: Command, node: NodeFacts, ranks_dir: str, bridge: tuple[str, ...] = ()) -> Command:
    """The command as a node starts it: what torchrun is to start becomes torchrun's arguments.

    ranks_dir: of this node and attempt, for each rank's own log and error file. bridge: options of the bridge
    besides the command's own.
    """
    if command.launch is not Launch.TORCHRUN:
        return command
    argv = (
        *TORCHRUN,
        f"--nnodes={node.nodes}",
        f"--node-rank={node.node_rank}",
        f"--nproc-per-node={node.gpus_per_node}",
        "--rdzv-backend=static",
        f"--master-addr={node.main_ip}",
        f"--master-port={node.main_port}",
        "--max-restarts=0",
        f"--log-dir={ranks_dir}",
        "--tee=3",
        "-m",
        BRIDGE,
        *bridge,
        *command.bridge,
        *command.argv,
    )
    return dataclasses.replace(command, argv=argv)


def rank_environment(command: Command, values: Mapping[str, str], ranks: int, cpus: int) -> dict[str, str]:
    """What a command that torchrun starts needs besides the job's variables; empty for any other. Pure.

    values: the job's, which are left as they are. cpus: of this node, for its `ranks` together: torchrun would
    give each rank one thread.
    """
    if command.launch is not Launch.TORCHRUN:
        return {}
    wanted = {
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": LINE_PREFIX,
        "OMP_NUM_THREADS": str(max(1, cpus // max(1, ranks))),
    }
    return {name: value for name, value in wanted.items() if name not in values}


def count_cpus(environ: Mapping[str, str]) -> int:
    """CPUs that this node's job really has: Slurm's word, and what this process may run on."""
    told = environ.get("SLURM_CPUS_ON_NODE", "")
    here = len(os.sched_getaffinity(0))
    return min(here, int(told)) if told.isdecimal() and int(told) else here
