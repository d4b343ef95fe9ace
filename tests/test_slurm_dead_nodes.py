"""Dead nodes, a controller that is started anew, preemptions: by Slurm's default time-outs."""

from __future__ import annotations

import json
import time

import pytest
from chain_lab import cut, end_of, left_on_nodes, make_lab, steps, steps_of, unbroken
from testbed_client import Testbed

pytestmark = [
    pytest.mark.testbed,
    pytest.mark.slow,
    pytest.mark.timeout(420),
    pytest.mark.usefixtures("nothing_left"),
]


@pytest.mark.contract("C13")
def test_a_node_that_is_cut_off_ends_the_attempt_and_the_next_avoids_it(testbed_alone: Testbed) -> None:
    """In a container, with the heartbeat of 10 s that sites have, and Slurm's own time-outs."""
    lab = make_lab(testbed_alone, 100_000, 0.2, 5, "deaf")
    lab.own_user_config("cluster/h200.yaml", "heartbeat_s: 10\n")
    run = lab.submit("h200", "--nodes", "3", "--gpus-per-node", "1", "--time", "30")
    run.wait_for(lambda: all(steps(run, r) for r in range(3)), "it did not start")
    time.sleep(5)  # each node was heard
    hosts = json.loads(run.read("attempts/0/start.json"))["hosts"]
    with cut(testbed_alone, hosts[2]) as cut_at:
        run.wait_for((run.folder / "attempts/1/start.json").exists, "no attempt 1", 120)
        again = json.loads(run.read("attempts/1/start.json"))
        ended = end_of(run, 0)
        assert ended["ended_at"] - cut_at < 60
        assert (ended["cause"], ended["first_failing_node"]) == ("node_failure", hosts[2])
        assert hosts[2] not in again["hosts"]
        assert again["follows"] == "node_failure"
        run.wait_for(lambda: steps(run, 0, attempt=1), "attempt 1 does not train")
        for rank in range(3):
            assert steps(run, rank)[-1].at < again["started_at"], "two attempts were alive"
        ranks = f"/work/experiments/{lab.experiment}/"
        left = testbed_alone.node_exec(hosts[2], ["pgrep", "-af", ranks], check=False).stdout
        assert left == "", "the node that is cut off still trains"
        record = json.loads(run.read("attempts/0/node-2.json"))
        assert record["fenced"] and hosts[0] in record["reason"] and "silent" in record["reason"]
    run.tp("stop")
    assert left_on_nodes(run) == []


def test_where_node_0_is_cut_off_another_node_sees_to_the_end(testbed_alone: Testbed) -> None:
    lab = make_lab(testbed_alone, 100_000, 0.2, 5, "deaf")
    run = lab.submit("h200-bare", "--nodes", "2", "--gpus-per-node", "1", "--time", "30")
    run.wait_for(lambda: all(steps(run, r) for r in range(2)), "it did not start")
    time.sleep(3)
    hosts = json.loads(run.read("attempts/0/start.json"))["hosts"]
    with cut(testbed_alone, hosts[0]) as cut_at:
        run.wait_for((run.folder / "attempts/1/start.json").exists, "no attempt 1", 120)
        again = json.loads(run.read("attempts/1/start.json"))
        ended = end_of(run, 0)
        assert ended["ended_at"] - cut_at < 60
        assert (ended["cause"], ended["first_failing_node"]) == ("node_failure", hosts[0])
        assert hosts[0] not in again["hosts"]
        run.wait_for(lambda: steps(run, 0, attempt=1), "attempt 1 does not train")
        for rank in range(2):
            assert steps(run, rank)[-1].at < again["started_at"], "two attempts were alive"
    run.tp("stop")
    assert left_on_nodes(run) == []


def test_a_controller_that_is_started_anew_changes_nothing(testbed_alone: Testbed) -> None:
    lab = make_lab(testbed_alone, 60, 0.2, 5)
    run = lab.submit("h200-bare", "--nodes", "2", "--gpus-per-node", "1", "--time", "30")
    run.wait_for(lambda: all(steps(run, r) for r in (0, 1)), "it did not start")
    testbed_alone.restart_controller()
    status = run.wait("COMPLETED", timeout_s=60)
    assert status["attempts"] == 1
    assert json.loads(run.read("out/final-1.json")) == unbroken(60)


def everything(testbed: Testbed, seconds: int) -> str:
    """A job of the partition that goes first, on every node; its id."""
    script = f"#!/bin/bash\nsleep {seconds}\n"
    words = ["sbatch", "--parsable", "--nodes=4", "--exclusive", "--partition=gpu", "--output=/dev/null"]
    return testbed.exec(words, user="bob", input=script).stdout.strip()


def test_preempted_runs_go_on(testbed_alone: Testbed) -> None:
    """Slurm sends TERM to every process of the step: trainers that catch it save, another one dies of it.

    In a container those that serve the image get it too.
    """
    runs = []
    for profile, every, words in (("h200", 0, "catches-TERM"), ("h200-bare", 5, "")):
        lab = make_lab(testbed_alone, 150, 0.2, every, words)
        more = ["--nodes", "2", "--gpus-per-node", "1", "--partition", "preempt", "--time", "30"]
        runs.append(lab.submit(profile, *more))
    for run in runs:
        run.wait_for(lambda run=run: all(len(steps(run, r)) > 12 for r in (0, 1)), "it did not start")
    everything(testbed_alone, 2)
    for run in runs:
        status = run.wait("COMPLETED", timeout_s=200)
        assert status["attempts"] == 2, run.known()
        assert json.loads(run.read("out/final-0.json")) == unbroken(150)
        assert left_on_nodes(run) == []
    catches, dies = runs
    assert [step for step, _ in steps_of(catches, 1)] == list(range(1, 151))
    saved = max(step for step, attempt in steps_of(dies) if attempt == 0) // 5 * 5
    assert next(step for step, attempt in steps_of(dies) if attempt == 1) in (saved + 1, saved - 4)
