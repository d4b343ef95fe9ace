"""Proving a cluster profile: scripts of its usual sizes, judged by `sbatch --test-only`. Nothing is queued."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneplane import __version__
from tuneplane.compose import compose
from tuneplane.kernel.errors import Fault, TunePlaneError, UsageError
from tuneplane.launch import slurm_commands
from tuneplane.launch.script import resources_line
from tuneplane.launch.slurm import SlurmLauncher
from tuneplane.profile import Placement, place
from tuneplane.runs.folder import run_path
from tuneplane.runs.index import current_user, state_folder
from tuneplane.site import Cluster, Config
from tuneplane.spec import (
    Capsule,
    Container,
    Framework,
    JobSpec,
    Metadata,
    Node,
    Recipe,
    Reporting,
    Resources,
    Slurm,
    Spec,
)

RUN_ID = "check-20000101-000000-0000"
STARTS = "to start at"
"""What `sbatch --test-only` says of a job that it would take. Source: sbatch(1)."""


@dataclass(frozen=True)
class Result:
    """One size of job, and Slurm's word on it."""

    asked: str
    ok: bool
    said: str


def check_profile(name: str, environ: Mapping[str, str]) -> list[Result]:
    """Slurm's word on the usual sizes of a profile's jobs. Raises UsageError where it cannot be composed."""
    config = compose(name, lab_root=None, flags={}, environ=environ).config
    if config.cluster.scheduler != "slurm":
        what = f"profile {name} runs on this machine without Slurm: there is nothing to ask"
        raise UsageError(Fault(what, "NAME"))
    return [check_size(config, placement) for placement in sizes(config)]


def sizes(config: Config) -> list[Placement]:
    """What the bare name asks for, the smallest job, one whole node, two nodes: each once, where it fits."""
    cluster = config.cluster
    asked: list[dict[str, Any]] = [{"total": None}, {"total": 1}, {"total": cluster.gpus_per_node}]
    if (cluster.max_nodes or 2) > 1:
        each = cluster.gpus_per_node if cluster.device == "gpu" else 1
        asked.append({"total": None, "nodes": 2, "gpus_per_node": each})
    found: list[Placement] = []
    for size in asked:
        try:
            placement = place(cluster, **size, site=config.site)
        except UsageError:  # beyond the site's caps
            continue
        if placement not in found:
            found.append(placement)
    return found


def check_size(config: Config, placement: Placement) -> Result:
    """Slurm's word on one size."""
    asked = resources_line(job_of(config.cluster, placement)).partition(" (")[0]
    try:
        text = SlurmLauncher(job_of(config.cluster, placement)).render()
        said = test_only(text)
    except TunePlaneError as error:
        return Result(asked, False, "; ".join(fault.what for fault in error.faults))
    return Result(asked, STARTS in said, said)


def test_only(script: str) -> str:
    """What `sbatch --test-only` says of a script's text. Raises OperationError where no file can be written."""
    descriptor, path = tempfile.mkstemp(prefix="check-", suffix=".sbatch", dir=state_folder())
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(script)
        return slurm_commands.test_only(Path(path))
    finally:
        Path(path).unlink()


def job_of(cluster: Cluster, placement: Placement) -> JobSpec:
    """A JobSpec as a submit with this profile makes it, but for what it trains."""
    root = Path(cluster.storage_root).expanduser()
    folder = run_path(root, current_user(), "check", RUN_ID)
    shared: dict[str, Any] = {
        f.name: getattr(cluster, f.name) for f in dataclasses.fields(Node) if hasattr(cluster, f.name)
    }
    return JobSpec(
        Metadata(RUN_ID, current_user(), "check", "check", str(folder), "2000-01-01T00:00:00Z", __version__),
        Spec(
            recipe=Recipe("custom/custom", "0", "", "custom"),
            framework=Framework("custom", "", "", "external"),
            entrypoint="experiments/check/train.sh",
            resources=Resources(
                profile=cluster.name,
                cluster=cluster.name,
                scheduler="slurm",
                device=cluster.device,
                nodes=placement.nodes,
                gpus_per_node=placement.gpus_per_node,
                cpus_per_node=placement.cpus_per_node,
                memory_per_node=placement.memory_per_node,
            ),
            container=Container("none"),
            node=Node(**{**shared, "python": cluster.python or "/usr/bin/python3"}),
            reporting=Reporting(False),
            capsule=Capsule("", 0, 0, ""),
            slurm=slurm_of(cluster),
        ),
    )


def slurm_of(cluster: Cluster) -> Slurm:
    """The directives of a profile: the fields of the same names."""
    values = {
        f.name: getattr(cluster.slurm, f.name)
        for f in dataclasses.fields(Slurm)
        if hasattr(cluster.slurm, f.name)
    }
    return Slurm(**{**values, "job_name": cluster.slurm.job_name or "tp-check"})
