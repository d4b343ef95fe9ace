"""What is started on this node: the recipe's command, in its container or as it is. The agent calls this."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from tuneplane.containers import Container, Launch, launch
from tuneplane.containers import Mount as Bind
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.node.allocation import Allocation
from tuneplane.node.environment import Place, data_folders
from tuneplane.node.scratch import Scratch
from tuneplane.recipes.adapters import Command, NodeFacts
from tuneplane.spec import JobSpec


def node_facts(job: JobSpec, given: Allocation, place: Place) -> NodeFacts:
    """What the recipe's adapter may know of this node."""
    run = RunFolder(Path(job.metadata.folder))
    entrypoint = place.work / job.spec.entrypoint
    return NodeFacts(
        work_dir=str(place.work),
        exp_dir=str(place.work / "experiments" / job.metadata.experiment),
        out_dir=str(run.out),
        entrypoint=str(entrypoint),
        nodes=given.nodes,
        gpus_per_node=given.gpus,
        node_rank=given.rank,
        main_ip=place.address,
        main_port=place.port,
        params=dict(job.spec.hyperparams),
        params_file=str(run.attempt(place.attempt).params),
    )


def start_line(
    job: JobSpec,
    values: Mapping[str, str],
    command: Command,
    scratch: Scratch,
    attempt: AttemptFolder,
    agent: Mapping[str, str],
    rank: int,
) -> Launch:
    """The argv and environment that start the command in its container, or as it is.

    agent: the agent's own environment, for the runtime's process: a module may have brought the runtime, and
    pyxis needs Slurm's variables. Raises OperationError where a mount is not on this node.
    """
    spec, run = job.spec, RunFolder(Path(job.metadata.folder))
    container = Container(
        runtime=spec.container.runtime,
        binary=spec.container.binary,
        image=spec.container.image.path if spec.container.image else "",
        options=tuple(spec.container.options),
        gpus=spec.resources.device == "gpu",
        workdir=command.cwd,
        tmp_dir=str(scratch.temporary),
        home_dir=str(scratch.home),
        state_dir=str(scratch.runtime),
        log=str(attempt.node_log(rank)),
    )
    binds = [
        Bind(str(scratch.work), str(scratch.work), read_only=True),
        Bind(str(run.out), str(run.out)),
        Bind(str(run.ingest), str(run.ingest)),
        Bind(str(attempt.path), str(attempt.path), read_only=True),
        *(Bind(m.source, m.target, m.read_only) for m in spec.container.mounts),
    ]
    if spec.container.runtime != "none":
        targets = {bind.target for bind in binds}
        binds += [Bind(f, f) for f in dict.fromkeys(data_folders(values)) if f not in targets]
        faults = [_not_here(b.source) for b in binds if not os.path.exists(b.source)]  # noqa: PTH110
        if not os.path.exists(container.image):  # noqa: PTH110
            what = f"the image {container.image} is not on this node"
            faults.append(Fault(what, f"node {os.uname().nodename}", "keep images where all nodes see them"))
        if faults:
            raise OperationError(*faults)
    host = {"PATH": spec.node.path, **agent, "TMPDIR": str(scratch.temporary)}
    return launch(container, command.argv, values, binds, host)


def command_line(given: Allocation, command: Command) -> str:
    """The line before the trainer's output (C8)."""
    where = f"node {given.rank} of {given.nodes} ({given.host})"
    return f"{where}: {shlex.join(command.argv)}"


def _not_here(source: str) -> Fault:
    return Fault(
        f"{source} is to be mounted and is not on this node",
        f"node {os.uname().nodename}",
        "--mount, the site's mounts, HF_HOME and *_DATA_DIR must name what compute nodes see",
    )
