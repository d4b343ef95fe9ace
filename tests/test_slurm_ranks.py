"""Ranks on real nodes: one raises, one is killed, one hangs; `tp job why` names it, and nothing is left."""

from __future__ import annotations

import json
from typing import Any

import pytest
from node_leftovers import left_by
from rank_runs import JOINED
from slurm_lab import Run, SlurmLab
from testbed_client import Testbed
from training_lab import Training

pytestmark = [pytest.mark.testbed, pytest.mark.slow, pytest.mark.timeout(240)]

ENDS = (
    JOINED
    + """\
how = open(os.environ["TUNEPLANE_EXP_DIR"] + "/how").read().strip()
def reads_data_for_ever():
    while True: time.sleep(1)
if rank == 3:
    if how == "raise":
        raise ValueError("batch of 3 does not divide into 2")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        reads_data_for_ever()
dist.all_reduce(torch.ones(1))
"""
)


@pytest.fixture(scope="module")
def lab(training: Training) -> SlurmLab:
    made = training.lab("pytorch/image-classification", files={"train.py": ENDS, "how": "raise"})
    for part in ("train", "validation"):
        made.write(str(made.base / "data" / part / "cat" / "1.png"), "")
    return made


def submit(training: Training, lab: SlurmLab, how: str, *more: str) -> Run:
    lab.write(f"experiments/{lab.experiment}/how", how)
    lab.sh(["sh", "-c", "git add -A && git commit -qm change --allow-empty"])
    words = [*training.flags(ranks=4, nodes=2), "--train-data", str(lab.base / "data"), *more]
    return lab.submit_words(*words)


def why(run: Run) -> dict[str, Any]:
    """The first finding of `tp job why`."""
    found: dict[str, Any] = json.loads(run.tp("why", "--json").stdout)["finding"]
    return found


def end_of(run: Run) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(run.read("attempts/0/end.json"))
    return value


def host(run: Run, node: int) -> str:
    return str(json.loads(run.read(f"attempts/0/node-{node}.json"))["host"])


@pytest.mark.contract("C43")
def test_a_rank_that_raises_on_the_second_node(training: Training, lab: SlurmLab, testbed: Testbed) -> None:
    run = submit(training, lab, "raise")
    status = run.wait("FAILED", timeout_s=150)
    assert status["reason"].endswith(
        f"rank 3 raised ValueError: batch of 3 does not divide into 2 on {host(run, 1)}"
    )
    found = why(run)
    assert (found["cause"], found["node"], found["rank"], found["host"]) == (
        *("first-failing-rank", 1, 3),
        host(run, 1),
    )
    assert "ValueError: batch of 3 does not divide into 2" in found["sentence"]
    assert "train.py" in "\n".join(found["evidence"])
    assert (
        end_of(run)["failure"]["traceback"].rstrip().endswith("ValueError: batch of 3 does not divide into 2")
    )
    assert left_by(testbed, [run]) == []


def test_a_rank_that_is_killed(training: Training, lab: SlurmLab, testbed: Testbed) -> None:
    run = submit(training, lab, "kill")
    assert "rank 3 was ended by SIGKILL" in run.wait("FAILED", timeout_s=150)["reason"]
    found = why(run)
    assert (found["node"], found["rank"], found["host"]) == (1, 3, host(run, 1))
    assert "rank 3 was killed (SIGKILL)" in found["sentence"]
    assert left_by(testbed, [run]) == []


@pytest.mark.contract("J")
def test_a_rank_that_hangs_after_the_check_went_well(
    training: Training, lab: SlurmLab, testbed: Testbed
) -> None:
    run = submit(training, lab, "hang", "--hang-limit", "20", "--preflight")
    status = run.wait("FAILED", timeout_s=200)
    assert status["reason"].startswith("no output and no point for 20 s")
    end = end_of(run)
    assert (end["code"], end["for_good"], end["to_be_continued"]) == (124, True, False)
    noted = json.loads(run.read("attempts/0/hang.json"))
    assert 20 <= noted["silent_s"] < 24
    found = why(run)
    assert (found["cause"], found["node"], found["rank"]) == ("hang-limit", 1, 3)
    assert f"rank 3 on {host(run, 1)} was in reads_data_for_ever (train.py:" in found["sentence"]
    assert "ranks 0, 1, 2 waited in all_reduce" in found["sentence"]
    assert "tuneplane: preflight: 4 ranks on 2 nodes met after " in run.log()
    assert left_by(testbed, [run]) == []


def test_no_rank_outlives_an_agent_that_is_killed(
    training: Training, lab: SlurmLab, testbed: Testbed
) -> None:
    run = submit(training, lab, "hang")
    run.wait_for(lambda: "joined 3" in run.log("--node", "1"), "the ranks have met", 120)
    record = json.loads(run.read("attempts/0/node-1.json"))
    testbed.node_exec(record["host"], ["kill", "-KILL", str(record["pid"])])
    run.wait("FAILED", timeout_s=120)
    assert left_by(testbed, [run]) == []
