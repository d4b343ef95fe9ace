"""How torchrun is told to start the ranks of a command, and which checkpoints an attempt finds."""

from __future__ import annotations

import os
from pathlib import Path

from tuneplane.node.checkpoints import list_checkpoints, noted_checkpoints
from tuneplane.node.command import bound_paths
from tuneplane.node.ranks import count_cpus, launched, rank_environment
from tuneplane.recipes.adapters import Checkpoint, Command, Launch, NodeFacts


def facts(nodes: int, rank: int) -> NodeFacts:
    return NodeFacts(
        work_dir="/w", exp_dir="/w/e", out_dir="/o", entrypoint="/w/e/train.py",
        nodes=nodes, gpus_per_node=8, node_rank=rank, main_ip="10.0.0.1", main_port=20_001,
    )  # fmt: skip


def test_every_rank_enters_the_bridge_by_a_static_rendezvous_on_node_0() -> None:
    command = Command(
        ("-m", "trl.scripts.sft", "--config", "/f/c.yaml"), "/w", Launch.TORCHRUN, bridge=("--hook", "x")
    )
    assert launched(command, facts(4, 3), "/s/ranks", ("--preflight",)).argv == (
        *("python3", "-m", "torch.distributed.run", "--nnodes=4", "--node-rank=3", "--nproc-per-node=8"),
        *("--rdzv-backend=static", "--master-addr=10.0.0.1", "--master-port=20001", "--max-restarts=0"),
        *("--log-dir=/s/ranks", "--tee=3", "-m", "tuneplane.bridge", "--preflight", "--hook", "x"),
        *("-m", "trl.scripts.sft", "--config", "/f/c.yaml"),
    )  # fmt: skip


def test_any_other_launch_is_left_as_it_is() -> None:
    command = Command(("bash", "train.sh"), "/w", Launch.EACH_NODE)
    assert launched(command, facts(2, 0), "/s/ranks") == command


def test_each_rank_has_its_share_of_the_cpus_for_threads_unless_somebody_said_otherwise() -> None:
    command = Command(("t.py",), "/w", Launch.TORCHRUN)
    assert rank_environment(command, {}, 8, 96)["OMP_NUM_THREADS"] == "12"
    assert rank_environment(command, {}, 8, 4)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in rank_environment(command, {"OMP_NUM_THREADS": "3"}, 8, 96)
    assert rank_environment(Command(("bash", "train.sh"), "/w", Launch.EACH_NODE), {}, 8, 96) == {}
    here = len(os.sched_getaffinity(0))
    assert count_cpus({"SLURM_CPUS_ON_NODE": "1"}) == 1
    assert [count_cpus({"SLURM_CPUS_ON_NODE": told}) for told in ("100000", "", "x", "0")] == [here] * 4


def test_checkpoints_are_folders_in_the_order_of_their_numbers_with_what_they_hold(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for name in ("step-10", "step-9", "step-9/rank 1.pt", "best"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "step-9/model.pt").touch()
    (folder / "notes.txt").touch()
    (folder / "last").symlink_to("step-10")
    found = noted_checkpoints(list_checkpoints(tmp_path), tmp_path)
    assert found == (
        Checkpoint("best", str(folder / "best")),
        Checkpoint("step-9", str(folder / "step-9"), ("model.pt", "rank 1.pt")),
        Checkpoint("step-10", str(folder / "step-10")),
    )


def test_a_folder_of_any_name_keeps_no_run_from_its_start(tmp_path: Path) -> None:
    for name in ("step-5²", "step-٣", "5", b"\xff-1".decode("utf-8", "surrogateescape")):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert len(list_checkpoints(tmp_path)) == 4


def test_without_checkpoints_or_through_a_link_none_is_found(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path) == []
    (tmp_path / "elsewhere/step-1").mkdir(parents=True)
    (tmp_path / "checkpoints").symlink_to("elsewhere")
    assert list_checkpoints(tmp_path) == []
    assert noted_checkpoints(None, tmp_path) == ()


def test_a_model_of_links_is_shown_with_what_they_point_to_and_nothing_twice(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots/abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / "1").touch()
    (snapshot / "config.json").symlink_to(os.path.relpath(blobs / "1", snapshot))
    bindings = {"model": str(snapshot), "train_data": str(blobs), "validation_data": "org/data"}
    assert bound_paths(bindings, []) == [str(snapshot), str(blobs)]
