"""What is started on this node: the recipe's command, in its container or as it is. The agent calls this."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from tuneplane.containers import Container, Launch, launch
from tuneplane.containers import Mount as Bind
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.node.allocation import Allocation
from tuneplane.node.checkpoints import noted_checkpoints
from tuneplane.node.environment import Place, data_folders
from tuneplane.node.record import read_record
from tuneplane.node.scratch import Scratch
from tuneplane.recipes.adapters import Command, NodeFacts
from tuneplane.spec import JobSpec

MOST_LINKS = 10_000
"""So many entries of a bound folder are looked at for links: the hub's cache has fewer in a model."""


def output_folder(job: JobSpec) -> Path:
    """`TUNEPLANE_OUT_DIR`: the run's own, or of an operation that of the run it works on."""
    subject = job.spec.subject
    return RunFolder(Path(subject.folder if subject else job.metadata.folder)).out


def node_facts(job: JobSpec, given: Allocation, place: Place, scratch: Scratch) -> NodeFacts:
    """What the recipe's adapter may know of this node."""
    run = RunFolder(Path(job.metadata.folder))
    attempt = run.attempt(place.attempt)
    module = job.spec.entrypoint_kind == "module"
    out = output_folder(job)
    return NodeFacts(
        work_dir=str(place.work),
        exp_dir=str(place.work / "experiments" / job.metadata.experiment),
        out_dir=str(out),
        entrypoint=job.spec.entrypoint if module else str(place.work / job.spec.entrypoint),
        nodes=given.nodes,
        gpus_per_node=given.gpus,
        node_rank=given.rank,
        main_ip=place.address,
        main_port=place.port,
        params=dict(job.spec.hyperparams),
        params_file=str(attempt.params),
        module=module,
        bindings=dict(job.spec.bindings),
        files_dir=str(scratch.files),
        checkpoints=noted_checkpoints(read_record(attempt.start).get("checkpoints"), out),
        attempt=place.attempt,
        device=job.spec.resources.device,
        tmp_dir=place.temporary,
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
        Bind(str(output_folder(job)), str(output_folder(job))),
        Bind(str(run.ingest), str(run.ingest)),
        Bind(str(attempt.path), str(attempt.path), read_only=True),
        *(Bind(m.source, m.target, m.read_only) for m in spec.container.mounts),
    ]
    if spec.launch != "each-node":
        binds += [Bind(str(scratch.files), str(scratch.files), read_only=True)]
        binds += [Bind(str(scratch.ranks), str(scratch.ranks))]
    binds += [Bind(path, path, read_only=True) for path in bound_paths(spec.bindings, binds)]
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


def bound_paths(bindings: Mapping[str, str], binds: Sequence[Bind]) -> list[str]:
    """Paths that bindings name and that no mount shows yet, with what links in such a folder point to.

    A model as the hub's cache has it is a folder of links into another one.
    """
    shown = [Path(bind.target) for bind in binds]
    found: list[str] = []
    for value in bindings.values():
        path = Path(value)
        if not path.is_absolute():
            continue
        inside = list(islice(path.iterdir(), MOST_LINKS)) if path.is_dir() else [path]
        targets = [Path(os.path.realpath(item)).parent for item in inside if item.is_symlink()]
        for place in (path, *targets):
            if not any(place.is_relative_to(other) for other in shown):
                shown.append(place)
                found.append(str(place))
    return found


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
