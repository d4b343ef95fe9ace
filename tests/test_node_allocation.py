"""What a node counts as its own, from Slurm's variables as Slurm writes them, and which difference it tells."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from run_fixture import SLURM, job_spec

from tuneplane.node.allocation import count_devices, count_gpus, differences, read_allocation, slurm_job_id
from tuneplane.spec import JobSpec, Slurm

UUID = "GPU-6f2a9a8e-0b1c-4d3e-9f00-{:012d}"
MIG = "MIG-6f2a9a8e-0b1c-4d3e-9f00-{:012d}"


def spec(slurm: Slurm | None = SLURM, device: str = "gpu", nodes: int = 2, per_node: int = 8) -> JobSpec:
    return job_spec(
        Path("/s/r"),
        "r",
        scratch=Path("/scratch"),
        slurm=slurm,
        device=device,
        nodes=nodes,
        per_node=per_node,
    )


@pytest.mark.parametrize(
    ("visible", "on_node", "gpus"),
    [
        ("0,1,2,3,4,5,6,7", "8", 8),
        ("0,1", "8", 2),  # the step's own list, where it is narrower than the job's
        ("3", None, 1),
        ("0, 1 ,2", None, 3),
        (UUID.format(1), "1", 1),
        (f"{UUID.format(1)},{UUID.format(2)}", None, 2),
        (f"{MIG.format(1)},{MIG.format(2)},{MIG.format(3)}", "3", 3),
        (f"MIG-{UUID.format(1)}/1/0,MIG-{UUID.format(1)}/2/0", None, 2),
        ("", "4", 0),  # CUDA shows none
        ("-1", None, 0),
        ("0,1,-1,2", None, 2),  # CUDA reads no further
        ("0,1,", None, 2),
        ("NoDevFiles", None, 0),
        ("NoDevFiles", "4", 4),
        (None, "8", 8),
        (None, "h200:4", 4),
        (None, "h200:4(S:0-1)", 4),
        (None, "h200:4,a100:2", 6),
        (None, None, 0),
        (None, "", 0),
    ],
)
def test_gpus_of_a_node(visible: str | None, on_node: str | None, gpus: int) -> None:
    given = {"CUDA_VISIBLE_DEVICES": visible, "SLURM_GPUS_ON_NODE": on_node}
    assert count_gpus({name: value for name, value in given.items() if value is not None}) == gpus


def test_a_site_that_gives_whole_nodes_and_counts_no_gpus_is_believed_by_its_device_files() -> None:
    uncounted = spec(dataclasses.replace(SLURM, gpu_request="none"))
    assert read_allocation(uncounted, {}, "n1", devices=8).gpus == 8
    assert read_allocation(uncounted, {}, "n1", devices=4).gpus == 4
    assert read_allocation(uncounted, {}, "n1", devices=16).gpus == 8  # no more than asked is this run's
    assert read_allocation(uncounted, {"CUDA_VISIBLE_DEVICES": "0,1"}, "n1", devices=8).gpus == 2
    # Where Slurm was asked and names none, none was given: the files of a shared node are another job's.
    assert read_allocation(spec(), {}, "n1", devices=8).gpus == 0


def test_device_files_are_counted_without_their_neighbours(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia0.old", "null"):
        (tmp_path / name).touch()
    assert count_devices(str(tmp_path)) == 3
    assert count_devices(str(tmp_path / "none")) == 0


def test_a_cpu_profile_counts_the_processes_asked_for() -> None:
    given = read_allocation(spec(device="cpu", per_node=3), {"CUDA_VISIBLE_DEVICES": "0,1"}, "here")
    assert (given.gpus, given.visible_devices) == (3, None)


def test_a_node_knows_its_place() -> None:
    step = {
        "SLURM_NODEID": "3",
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_NNODES": "8",
        "SLURMD_NODENAME": "gpu-17",
    }
    given = read_allocation(spec(), step, "gpu-17.cluster.example")
    assert (given.rank, given.nodes, given.host) == (3, 4, "gpu-17")
    alone = read_allocation(spec(), {}, "laptop")
    assert (alone.rank, alone.nodes, alone.host, alone.slurm_job_id) == (0, 1, "laptop", "")


def test_an_element_of_an_array_is_named_so_that_scancel_hits_it_alone() -> None:
    assert slurm_job_id({"SLURM_JOB_ID": "12"}) == "12"
    assert (
        slurm_job_id({"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3"}) == "9_3"
    )
    assert slurm_job_id({}) == ""


@pytest.mark.contract("C12")
def test_what_was_given_differently_is_told_one_sentence_a_thing() -> None:
    given = {
        "SLURM_NODEID": "0",
        "SLURM_NNODES": "1",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        "SLURM_JOB_PARTITION": "debug",
    }
    job = spec()
    assert differences(job, read_allocation(job, given, "n1")) == [
        "the job has 1 node, the run was submitted for 2",
        "the job runs in partition debug, the run was submitted to gpu"
        " (SBATCH_PARTITION in the environment, or an option, overrides the script)",
        "this node gives 4 GPUs, the run was submitted for 8 per node",
    ]


def test_what_is_as_submitted_is_not_told() -> None:
    given = {
        "SLURM_NNODES": "2",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(8))),
        "SLURM_JOB_PARTITION": "gpu",
    }
    either = dataclasses.replace(SLURM, partition="debug,gpu")
    anywhere = dataclasses.replace(SLURM, partition=None)
    for slurm in (SLURM, either, anywhere):
        job = spec(slurm)
        assert differences(job, read_allocation(job, given, "n1")) == []
