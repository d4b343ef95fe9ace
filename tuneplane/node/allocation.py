"""What was really given to this node, and how it differs from what the JobSpec asked for. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tuneplane.spec import JobSpec


@dataclass(frozen=True)
class Allocation:
    """This node's place in the job and its share of it."""

    rank: int
    nodes: int
    gpus: int  # GPUs per node; on a cpu device the processes asked for
    host: str
    visible_devices: str = ""  # CUDA_VISIBLE_DEVICES as given
    slurm_job_id: str = ""
    partition: str = ""


def read_allocation(job: JobSpec, environ: Mapping[str, str], host: str) -> Allocation:
    """The allocation that Slurm's variables (or none of them) tell. Source: srun(1), OUTPUT ENVIRONMENT."""
    resources = job.spec.resources
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = resources.gpus_per_node
    if resources.device == "gpu":
        gpus = _count_gpus(environ, visible)
    return Allocation(
        rank=int(environ.get("SLURM_NODEID", "0")),
        nodes=int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or "1"),
        gpus=gpus,
        host=environ.get("SLURMD_NODENAME", host),
        visible_devices=visible,
        slurm_job_id=slurm_job_id(environ),
        partition=environ.get("SLURM_JOB_PARTITION", ""),
    )


def slurm_job_id(environ: Mapping[str, str]) -> str:
    """`123`, or `<array>_<task>`: an element's SLURM_JOB_ID can name the whole array."""
    if environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ.get('SLURM_ARRAY_TASK_ID', '0')}"
    return environ.get("SLURM_JOB_ID", "")


def differences(job: JobSpec, given: Allocation) -> list[str]:
    """One sentence for each thing that differs from the JobSpec, for the log and the record."""
    asked, told = job.spec.resources, []
    unit = "GPUs" if asked.device == "gpu" else "processes"
    if given.nodes != asked.nodes:
        told.append(f"the job has {given.nodes} nodes, the run was submitted for {asked.nodes}")
    if given.gpus != asked.gpus_per_node:
        told.append(
            f"this node gives {given.gpus} {unit}, the run was submitted for {asked.gpus_per_node} per node"
        )
    slurm = job.spec.slurm
    if slurm and slurm.partition and given.partition and given.partition not in slurm.partition.split(","):
        told.append(
            f"the job runs in partition {given.partition}, the run was submitted to {slurm.partition}"
            " (SBATCH_PARTITION in the environment, or an option, overrides the script)"
        )
    return told


def _count_gpus(environ: Mapping[str, str], visible: str) -> int:
    """GPUs of this node: the step's own list first, then Slurm's count."""
    if visible and visible not in ("NoDevFiles", "-1"):
        return len([device for device in visible.split(",") if device])
    found = re.search(r"(\d+)$", environ.get("SLURM_GPUS_ON_NODE", ""))
    return int(found.group(1)) if found else 0
