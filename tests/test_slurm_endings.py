"""Ends at bad moments: a full disk, a pause as walltime comes, datagrams lost, a stop while it is requeued."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from chain_lab import end_of, make_lab, steps, steps_of
from shared_disk import shared_disk
from slurm_lab import SlurmLab, unique
from testbed_client import Testbed

pytestmark = [
    pytest.mark.testbed,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("nothing_left"),
]

ONE_GPU = ["--nodes", "1", "--gpus-per-node", "1"]

SAVES_ONTO_A_FULL_DISK = """
while [ ! -e "$TUNEPLANE_STOP_FILE" ]; do sleep 0.1; done
mkdir -p "$TUNEPLANE_OUT_DIR/checkpoints/step-1"
echo weights >"$TUNEPLANE_OUT_DIR/checkpoints/step-1/weights"
cat /dev/zero >"$TUNEPLANE_OUT_DIR/fill" || true
sync -f "$TUNEPLANE_OUT_DIR" || true
i=0
while mkdir "$TUNEPLANE_OUT_DIR/fill.$i" 2>&1; do i=$((i+1)); done
"""
"""The last blocks go by folders: files leave some that the filesystem keeps for itself."""


def test_a_run_that_saves_onto_a_full_disk_is_not_called_complete(testbed: Testbed) -> None:
    lab = SlurmLab(testbed, experiment=unique("full"))
    lab.train_sh(SAVES_ONTO_A_FULL_DISK)
    lab.commit()
    with shared_disk(testbed) as disk:
        lab.own_user_config("cluster/h200-bare.yaml", f"storage_root: {disk}\n")
        run = lab.submit("h200-bare", *ONE_GPU, "--time", "1")
        status = run.wait("FAILED", timeout_s=120)
        assert (status["code"], status["attempts"]) == (75, 1)
        assert "could not be noted" in status["reason"]
        assert f"tp job resume {run.run_id} goes on" in run.tp("status").stdout
        why = json.loads(run.tp("why", "--json").stdout)["finding"]
        assert why["cause"] == "no-space", why
        left = lab.sh(
            ["ls", "-A", str(run.folder / "attempts/0")]
        ).stdout.split()  # the hosts alone see the disk
        assert left == ["node-0.beat", "node-0.json", "node-0.log", "params.json", "start.json", "stop"]
        assert json.loads(run.read("attempts/0/node-0.json"))["code"] == 0
        lab.sh(["sh", "-c", 'rm -r "$0"/fill*', str(run.folder / "out")])
        run.tp("resume")
        run.wait("RUNNING")
        run.wait_for(lambda: run.status()["attempts"] == 2, "it does not go on")
        run.tp("stop")


@pytest.mark.contract("C46")
@pytest.mark.parametrize("words", ["deaf", ""])
def test_a_pause_as_walltime_comes_is_one_end_and_nothing_starts_until_resume(
    testbed: Testbed, words: str
) -> None:
    """Slurm asks it to save at once, a minute before its limit; the pause comes while it saves, or has ended."""
    lab = make_lab(testbed, 100_000, 0.1, 5, words)
    run = lab.submit("h200", *ONE_GPU, "--time", "1")
    run.wait_for((run.folder / "attempts/0/stop").exists, "it was not asked")
    said = run.tp("pause")
    assert "PAUSED" in said.stdout or "held by tp job pause" in said.stdout, (said, run.known())
    time.sleep(13)  # a requeued job would have waited 11 s
    status = run.status()
    assert status["attempts"] == 1
    assert (status["state"], status["reason"]) == ("PENDING", "held by tp job pause") or (
        (status["state"], status["pending_restart"]) == ("PAUSED", "")
    )
    run.tp("resume")
    run.wait_for((run.folder / "attempts/1/start.json").exists, "it does not go on")
    assert len(list((run.folder / "submissions").iterdir())) <= 2
    run.tp("stop")
    assert sorted({attempt for _, attempt in steps_of(run)}) in ([0], [0, 1])


@contextmanager
def no_datagrams(bed: Testbed, nodes: list[str]) -> Iterator[None]:
    """Nodes between which no UDP comes through, and all else does."""
    rule = ["pref", "10", "ipproto", "udp", "blackhole"]
    for node in nodes:
        bed.node_exec(node, ["ip", "rule", "add", *rule])
    try:
        yield
    finally:
        for node in nodes:
            bed.node_exec(node, ["ip", "rule", "del", *rule])


def test_a_healthy_run_goes_on_where_its_nodes_lose_each_others_datagrams(testbed_alone: Testbed) -> None:
    lab = make_lab(testbed_alone, 100_000, 0.2, 5)
    run = lab.submit("h200-bare", "--nodes", "2", "--gpus-per-node", "1", "--time", "30")
    run.wait_for(lambda: all(steps(run, r) for r in range(2)), "it did not start")
    time.sleep(3)  # each node was heard
    with no_datagrams(testbed_alone, json.loads(run.read("attempts/0/start.json"))["hosts"]):
        time.sleep(20)  # ten heartbeats; a node is taken for dead after three
        begun = time.time()
        for rank in range(2):
            run.wait_for(lambda rank=rank: steps(run, rank)[-1].at > begun, f"rank {rank} does not train")
        assert (run.status()["state"], run.status()["attempts"]) == ("RUNNING", 1), run.known()
    run.tp("stop")


@pytest.mark.contract("C46")
def test_a_stop_while_slurm_requeues_it_is_for_good(testbed: Testbed) -> None:
    lab = make_lab(testbed, 100_000, 0.2, 5)
    run = lab.submit("h200", *ONE_GPU, "--time", "30")
    run.wait_for(lambda: steps(run), "it did not start")
    lab.sh(["scontrol", "requeue", run.job_id])
    run.wait("COMPLETING", "PENDING", "REQUEUED")
    assert f"{run.run_id}: CANCELLED" in run.tp("stop").stdout
    time.sleep(13)  # it would have started after 11 s
    status = run.status()
    assert (status["state"], status["reason"]) == ("CANCELLED", "stopped by tp job stop")
    assert status["attempts"] == 1
    assert lab.sh(["squeue", "-h", "-n", lab.experiment]).stdout == ""
    assert [attempt for _, attempt in steps_of(run)][-1] == 0
    assert end_of(run, 0)["code"] != 0
