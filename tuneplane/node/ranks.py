"""How torchrun starts a command in every rank, through the bridge. Pure; the agent calls it.

Static rendezvous: c10d's own elects its host by host names, which differ on some clusters (pytorch#73656).
"""

from __future__ import annotations

import dataclasses

from tuneplane.recipes.adapters import Command, Launch, NodeFacts

BRIDGE = "tuneplane.bridge"
"""The module that enters the training interpreter; PYTHONPATH has the kernel that it is part of."""

TORCHRUN = ("python3", "-m", "torch.distributed.run")
"""The image's own, by module: `torchrun` on PATH may be that of another interpreter."""


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
