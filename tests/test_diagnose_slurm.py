"""`tp job why` on a real Slurm: waiting, refused, failed on one node of two, ended from outside, without sacct."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from slurm_lab import Run, SlurmLab, unique
from testbed_client import Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(180)]


@pytest.fixture
def lab(testbed: Testbed) -> SlurmLab:
    return SlurmLab(testbed, experiment=unique("why"))


def training(lab: SlurmLab, text: str) -> SlurmLab:
    lab.train_sh(text)
    lab.commit()
    return lab


def why(run: Run) -> dict[str, Any]:
    """The finding that is told first."""
    value: dict[str, Any] = json.loads(run.tp("why", "--json").stdout)
    return value["finding"]  # type: ignore[no-any-return]


@pytest.mark.contract("J")
def test_the_node_that_failed_first_is_told_and_not_the_one_that_was_ended_for_it(lab: SlurmLab) -> None:
    training(
        lab, 'if [ "$TUNEPLANE_MACHINE_RANK" = 1 ]; then sleep 1; echo "disk is bad"; exit 5; fi\nsleep 120'
    )
    run = lab.submit("h200-bare:2", "--nodes", "2")
    run.wait("FAILED")
    found = why(run)
    assert (found["node"], found["cause"]) == (1, "command-failed")
    assert "exit code 5 on node 1" in found["sentence"]
    assert found["evidence"][-1] == "disk is bad"


@pytest.mark.contract("J")
def test_a_container_that_cannot_be_started_is_told(lab: SlurmLab) -> None:
    training(lab, "echo trained")
    lab.own_user_config("defaults.yaml", "cluster:\n  container:\n    binary: /opt/none/apptainer\n")
    run = lab.submit("h200:1")
    run.wait("FAILED")
    found = why(run)
    assert found["cause"] == "runtime-missing"
    assert "/opt/none/apptainer cannot be started on the node" in found["sentence"]


@pytest.mark.contract("C46")
def test_a_run_that_waits_is_told_why_and_a_stopped_one_that_it_was_stopped(lab: SlurmLab) -> None:
    training(lab, "echo trained")
    lab.own_user_config(
        "defaults.yaml", "cluster:\n  slurm:\n    extra_directives:\n      begin: now+1hour\n"
    )
    run = lab.submit("h200-bare:1")
    found = why(run)
    assert found["sentence"].startswith("it waits in the queue: it is not to begin before ")
    assert found["evidence"][0] == "squeue: PENDING (BeginTime)"
    run.tp("stop")
    assert why(run)["sentence"] == "it was stopped by tp job stop"


@pytest.mark.contract("J")
def test_a_held_run_is_told_with_the_command_that_frees_it(lab: SlurmLab) -> None:
    training(lab, "echo trained")
    lab.own_user_config("defaults.yaml", "cluster:\n  slurm:\n    extra_directives:\n      hold: ''\n")
    run = lab.submit("h200-bare:1")
    found = why(run)
    assert found["sentence"] == "it waits in the queue: it is held, by you"
    assert found["remedy"] == f"scontrol release {run.job_id}"
    run.tp("stop")


@pytest.mark.contract("J")
def test_what_slurm_refused_is_told_in_plain_words(lab: SlurmLab) -> None:
    training(lab, "echo trained")
    words = ["submit", lab.experiment, *lab.flags("h200-bare:1"), "--account", "physics"]
    lab.tp(*words, code=1)
    said = lab.tp("job", "why", lab.experiment)
    assert "Slurm refused it, so it was never submitted: you may not use the account physics" in said
    assert "sacctmgr show assoc" in said
    assert "Invalid account" in said


@pytest.mark.contract("J")
def test_a_run_that_somebody_cancelled_is_told_by_whom(lab: SlurmLab) -> None:
    training(lab, "echo started\nsleep 120")
    run = lab.submit("h200-bare:1")
    run.wait_for(lambda: "started" in run.log(), "started")
    lab.bed.exec(["scancel", run.job_id], user="root")
    run.wait("CANCELLED")
    assert why(run)["sentence"] == "the Slurm job was cancelled by root, an administrator"


@pytest.mark.slow
@pytest.mark.contract("J")
def test_a_run_at_its_time_limit_is_told(lab: SlurmLab) -> None:
    training(lab, "echo started\nsleep 300")
    run = lab.submit("h200-bare:1", "--time", "1")
    run.wait("TIMEOUT", timeout_s=150)
    found = why(run)
    assert found["cause"] == "restarts-without-progress"
    assert found["sentence"].startswith(
        "attempt 0 met its walltime, and it is not started again: no progress"
    )
    assert "--time" in found["remedy"]


@pytest.mark.contract("J")
def test_a_preempted_run_and_a_lost_node_are_told(testbed_alone: Testbed) -> None:
    lab = training(SlurmLab(testbed_alone, experiment=unique("why")), "echo started\nsleep 300")
    run = lab.submit("h200-bare:32", "--partition", "preempt")
    run.wait_for(lambda: run.log().count("started") == 4, "started on four nodes")
    testbed_alone.exec(["sbatch", "--nodes=4", "--exclusive", "--wrap", "sleep 20"], user="bob")
    run.wait_for(lambda: run.status()["state"] not in ("RUNNING", "COMPLETING"), "preempted")
    said = why(run)["sentence"]
    assert said.startswith("attempt 0 was preempted by a job of higher priority; attempt 1 starts by itself")
    run.tp("stop")
    testbed_alone.cancel_all()
    run = lab.submit("h200-bare:2", "--nodes", "2")
    run.wait_for(lambda: run.log().count("started") == 2, "started on two nodes")
    host = run.status()["nodes"][1]["host"]
    # A node that is gone: its slurmd does not answer. Slurm is told at once instead of after its SlurmdTimeout.
    testbed_alone.node_exec(host, ["pkill", "-STOP", "-x", "slurmd"])
    try:
        words = ["scontrol", "update", f"nodename={host}", "state=down", "reason=test"]
        testbed_alone.exec(words, user="root")
        run.wait_for(lambda: run.status()["state"] not in ("RUNNING", "COMPLETING"), "lost its node")
        assert f"node 1 ({host}) failed under attempt 0; attempt 1 starts by itself" in why(run)["sentence"]
    finally:
        testbed_alone.node_exec(host, ["pkill", "-CONT", "-x", "slurmd"])
        testbed_alone.exec(
            ["scontrol", "update", f"nodename={host}", "state=resume"], user="root", check=False
        )


@pytest.mark.contract("J")
def test_a_job_over_its_memory_is_told_with_the_numbers(testbed_alone: Testbed) -> None:
    testbed_alone.set(JobAcctGatherParams="OverMemoryKill", JobAcctGatherFrequency=1)
    lab = SlurmLab(testbed_alone, experiment=unique("why"))
    lab.own_user_config("defaults.yaml", "cluster:\n  request_memory: true\n  memory_per_node: 200M\n")
    lab.write(
        f"experiments/{lab.experiment}/train.py",
        "import time\nheld = []\nfor step in range(100):\n    held.append(b'x' * (16 << 20))\n"
        "    time.sleep(0.3)\n",
    )
    training(lab, 'exec python3 "$TUNEPLANE_EXP_DIR/train.py"')
    run = lab.submit("h200-bare:8")
    run.wait("FAILED", "OUT_OF_MEMORY", "CANCELLED")
    found = why(run)
    assert found["sentence"].startswith("Slurm ended the job because it used more memory than it was given")
    assert "exceeded memory limit" in found["evidence"][0]


@pytest.mark.contract("C46")
def test_without_accounting_the_cause_is_told_all_the_same(testbed_alone: Testbed) -> None:
    testbed_alone.accounting(on=False)
    lab = training(SlurmLab(testbed_alone, experiment=unique("why")), "echo last words\nexit 6")
    run = lab.submit("h200-bare:1")
    run.wait("FAILED")
    found = why(run)
    assert "exit code 6" in found["sentence"]
    assert found["evidence"] == ["last words"] or found["evidence"][-1] == "last words"


@pytest.mark.contract("J")
def test_a_hung_run_of_two_nodes_is_looked_at_on_both(lab: SlurmLab) -> None:
    training(lab, "echo step 1\nexec sleep 300")
    run = lab.submit("h200-bare:2", "--nodes", "2")
    run.wait_for(lambda: run.log().count("step 1") == 2, "both started")
    time.sleep(1)
    code = (
        "import json, os, sys, time\nthen = time.time() - 1000\nfor path in sys.argv[1:]:\n"
        "    value = json.load(open(path + '.json'))\n    value['command_started_at'] = then - 60\n"
        "    json.dump(value, open(path + '.json', 'w'))\n    os.utime(path + '.log', (then, then))\n"
    )
    paths = [str(run.folder / "attempts" / "0" / f"node-{rank}") for rank in (0, 1)]
    lab.sh(["python3", "-c", code, *paths])
    value = json.loads(run.tp("why", "--json").stdout)
    run.tp("stop")
    assert value["finding"]["cause"] == "no-progress", value
    assert value["unread"] == []
    assert "sleep" in " ".join(value["finding"]["evidence"])
