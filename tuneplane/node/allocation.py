"""What was really given to this node, and how it differs from what the JobSpec asked for.

The agent and the claim read it. Pure but for `count_devices`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

from tuneplane.spec import JobSpec


@dataclass(frozen=True)
class Allocation:
    """This node's place in the job and its share of it.

    gpus: GPUs per node; on a cpu device the processes asked for. visible_devices: CUDA_VISIBLE_DEVICES as
    given, None where it was not.
    """

    rank: int
    nodes: int
    gpus: int
    host: str
    visible_devices: str | None = None
    slurm_job_id: str = ""
    partition: str = ""


def read_allocation(job: JobSpec, environ: Mapping[str, str], host: str, devices: int = 0) -> Allocation:
    """The allocation that Slurm's variables (or none of them) tell. Source: srun(1), OUTPUT ENVIRONMENT.

    devices: GPUs that this machine has (`count_devices`).
    """
    resources, slurm = job.spec.resources, job.spec.slurm
    gpu = resources.device == "gpu"
    # Where Slurm was not asked for GPUs, a site gives whole nodes: what the machine has, no more than asked.
    untold = min(resources.gpus_per_node, devices) if slurm and slurm.gpu_request == "none" else 0
    return Allocation(
        rank=int(environ.get("SLURM_NODEID", "0")),
        nodes=int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or "1"),
        gpus=count_gpus(environ, untold) if gpu else resources.gpus_per_node,
        host=environ.get("SLURMD_NODENAME", host),
        visible_devices=environ.get("CUDA_VISIBLE_DEVICES") if gpu else None,
        slurm_job_id=slurm_job_id(environ),
        partition=environ.get("SLURM_JOB_PARTITION", ""),
    )


def count_gpus(environ: Mapping[str, str], untold: int = 0) -> int:
    """GPUs of this node: the step's own list first, then Slurm's count; `untold` where neither is there.

    Indices and UUIDs, of whole GPUs or of MIG instances, count alike; as CUDA reads the list, it ends at the
    first that is none (`-1`), and an empty list hides every GPU. Source: CUDA C++ Programming Guide,
    environment variables. `NoDevFiles` is Slurm's word for GPUs that have no device file.
    """
    counted = environ.get("SLURM_GPUS_ON_NODE", "")
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible != "NoDevFiles":
        named = (device.strip() for device in visible.split(","))
        return len(list(takewhile(lambda device: device and device != "-1", named)))
    if counted or visible is not None:
        return sum(int(number) for number in re.findall(r"(\d+)(?:\(|,|$)", counted))
    return untold


def count_devices(folder: str = "/dev") -> int:
    """GPUs that this machine has, by the NVIDIA driver's device files: nvidia0, nvidia1, …"""
    try:
        return len([name for name in os.listdir(folder) if re.fullmatch(r"nvidia[0-9]+", name)])
    except OSError:
        return 0


def slurm_job_id(environ: Mapping[str, str]) -> str:
    """`123`, or `<array>_<task>`: an element's SLURM_JOB_ID can name the whole array."""
    if environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ.get('SLURM_ARRAY_TASK_ID', '0')}"
    return environ.get("SLURM_JOB_ID", "")


def differences(job: JobSpec, given: Allocation) -> list[str]:
    """One sentence for each thing that differs from the JobSpec, for the log and the record."""
    asked = job.spec.resources
    told = place_differences(job, given.nodes, given.partition)
    if given.gpus != asked.gpus_per_node:
        gives = _count(given.gpus, "GPU" if asked.device == "gpu" else "process")
        told.append(f"this node gives {gives}, the run was submitted for {asked.gpus_per_node} per node")
    return told


def place_differences(job: JobSpec, nodes: int, partition: str) -> list[str]:
    """What the whole job has that is not as submitted: known to the claim, before any node starts."""
    told = []
    asked, slurm = job.spec.resources, job.spec.slurm
    if nodes != asked.nodes:
        told.append(f"the job has {_count(nodes, 'node')}, the run was submitted for {asked.nodes}")
    if slurm and slurm.partition and partition and partition not in slurm.partition.split(","):
        told.append(
            f"the job runs in partition {partition}, the run was submitted to {slurm.partition}"
            " (SBATCH_PARTITION in the environment, or an option, overrides the script)"
        )
    return told


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}" if number == 1 else f"{number} {unit}{'es' if unit.endswith('s') else 's'}"
