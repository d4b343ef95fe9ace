"""A run that was rendered for review: started by hand, by `tp submit --run`, twice, again (C42)."""

from __future__ import annotations

import json
import re

import pytest
from slurm_lab import WAIT_FOR_GO, Run, SlurmLab, unique
from testbed_client import Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(150)]

REPORT = """
export PYTHONPATH="$TUNEPLANE_WORK_DIR/.tuneplane/kernel"
python3 -c 'from tuneplane.report import log, finish; log({"loss": 0.5}, step=1); finish()'
echo "attempt $TUNEPLANE_JOB_ATTEMPT"
"""


def lab_with(testbed: Testbed, train_sh: str) -> SlurmLab:
    lab = SlurmLab(testbed, experiment=unique("byhand"))
    lab.train_sh(train_sh)
    lab.commit()
    return lab


def queued(lab: SlurmLab) -> list[str]:
    return lab.sh(["squeue", "-h", "-o", "%i", "-n", lab.experiment]).stdout.split()


@pytest.mark.contract("C42")
def test_a_rendered_run_started_by_hand_is_the_same_run_and_retry_makes_the_next_attempt(
    testbed: Testbed,
) -> None:
    lab = lab_with(testbed, REPORT)
    run = lab.render("h200:1")
    assert queued(lab) == []
    assert run.status()["state"] == "PREPARED"
    job = run.sbatch()
    status = run.wait("COMPLETED")
    assert (status["job_id"], status["attempt"], status["code"]) == (job, 0, 0)
    assert "attempt 0" in run.log()
    (loss,) = json.loads(run.tp("metrics", "--json").stdout)["metrics"]
    assert (loss["name"], loss["last"]) == ("loss", 0.5)

    again = run.sbatch()
    testbed.wait_job(again)
    output = lab.sh(["cat", str(run.folder / "slurm" / f"{again}.out")]).stdout
    assert f"tp job retry {run.run_id}" in output
    assert run.status()["attempts"] == 1

    retried = json.loads(run.tp("retry", "--json").stdout)
    run.wait_for(lambda: run.status()["attempts"] == 2, "retry claimed no attempt")
    status = run.wait("COMPLETED")
    assert (status["job_id"], status["attempt"]) == (retried["job_id"], 1)
    assert "attempt 1" in run.log()
    assert "attempt 0" in run.log("--attempt", "0")


@pytest.mark.contract("C42")
def test_a_second_start_is_refused_while_one_runs_and_is_the_next_attempt_after_it(testbed: Testbed) -> None:
    lab = lab_with(testbed, f'echo "attempt $TUNEPLANE_JOB_ATTEMPT"\n{WAIT_FOR_GO}')
    run = lab.render("h200-bare:1")
    first = run.sbatch()
    run.wait_for(lambda: "attempt 0" in run.log(), "the first start printed nothing")
    second = run.sbatch()
    assert testbed.wait_job(second) == "FAILED"
    output = lab.sh(["cat", str(run.folder / "slurm" / f"{second}.out")]).stdout
    assert "attempt 0 of this run has not ended: " in output
    assert f"tp job stop {run.run_id}" in output
    status = run.status()
    assert (status["state"], status["job_id"], status["attempts"]) == ("RUNNING", first, 1)

    lab.sh(["scancel", first])
    assert testbed.wait_job(first) == "CANCELLED"
    assert run.wait("CANCELLED")["attempt"] == 0
    third = run.sbatch()
    run.wait_for(lambda: "attempt 1" in run.log(), "the third start printed nothing")
    run.release()
    status = run.wait("COMPLETED")
    assert (status["job_id"], status["attempt"]) == (third, 1)


@pytest.mark.contract("C42")
def test_stop_ends_the_running_start_though_a_later_one_was_refused(testbed: Testbed) -> None:
    lab = lab_with(testbed, f"echo started\n{WAIT_FOR_GO}")
    run = lab.render("h200-bare:1")
    first = run.sbatch()
    run.wait_for(lambda: "started" in run.log(), "the first start printed nothing")
    testbed.wait_job(run.sbatch())
    assert "CANCELLED" in run.tp("stop").stdout
    assert testbed.wait_job(first) == "CANCELLED"
    assert run.status()["state"] == "CANCELLED"


@pytest.mark.contract("C42")
def test_submit_of_a_rendered_run_hands_over_that_very_script(testbed: Testbed) -> None:
    lab = lab_with(testbed, "echo as rendered")
    run = lab.render("h200-bare:1")
    lab.train_sh("echo edited")
    lab.commit()
    said = json.loads(lab.sh(["tp", "submit", "--run", run.run_id, "--json"]).stdout)
    script = lab.base / "what-slurm-got"
    lab.sh(["scontrol", "write", "batch_script", said["job_id"], str(script)])
    assert lab.sh(["cmp", str(script), str(run.folder / "job.sbatch")]).stdout == ""
    run.wait("COMPLETED")
    assert "as rendered" in run.log()
    assert f"{run.run_id} was submitted already" in lab.refused("submit", "--run", run.run_id)
    said_with_name = lab.refused("submit", lab.experiment, "--run", run.run_id, "--time", "5")
    assert "cannot be said of a run that is prepared" in said_with_name


@pytest.mark.contract("C42")
def test_a_dry_run_prints_the_script_of_a_later_submit_and_leaves_nothing(testbed: Testbed) -> None:
    lab = lab_with(testbed, "echo trained")
    words = [lab.experiment, *lab.flags("h200:16"), "--set", "lr=0.1", "--time", "10"]

    # A home and temporary folders that no other test writes to.
    folders = {"HOME": "home", "XDG_STATE_HOME": "state", "TMPDIR": "tmp"}
    lab.env = {name: str(lab.base / folder) for name, folder in folders.items()}
    for folder in lab.env.values():
        lab.sh(["mkdir", folder])

    def files() -> list[str]:
        shown = ["-type", "f", "-printf", "%p %s %T@ %C@\n", "-o", "-print"]
        return sorted(lab.sh(["find", str(lab.base), *shown]).stdout.splitlines())

    before = files()
    printed = lab.sh(["tp", "submit", *words, "--dry-run"]).stdout
    assert files() == before
    assert lab.run_folders() == []
    assert queued(lab) == []
    run = lab.render("h200:16", "--set", "lr=0.1", "--time", "10")
    (imagined,) = re.findall(r"^# run +(\S+)$", printed, re.MULTILINE)
    assert imagined != run.run_id
    assert printed.replace(imagined, run.run_id) == run.read("job.sbatch")


@pytest.mark.contract("C42")
def test_of_two_starts_at_the_same_moment_one_runs(testbed: Testbed) -> None:
    lab = lab_with(
        testbed, f'echo "attempt $TUNEPLANE_JOB_ATTEMPT" >>"$TUNEPLANE_OUT_DIR/starts"\n{WAIT_FOR_GO}'
    )
    run = lab.render("h200-bare:1")
    script = str(run.folder / "job.sbatch")
    jobs = [lab.sh(["sbatch", "--parsable", "--hold", script]).stdout.strip() for _ in range(3)]
    lab.sh(["scontrol", "release", ",".join(jobs)])
    run.wait_for(lambda: len(queued(lab)) == 1, "more than one runs on, or none")
    (running,) = queued(lab)
    assert run.wait("RUNNING")["job_id"] == running
    run.release()
    assert run.wait("COMPLETED")["attempts"] == 1
    assert run.read("out/starts") == "attempt 0\n"


def test_another_partition_at_a_start_by_hand_is_told_in_the_log(testbed: Testbed) -> None:
    lab = lab_with(testbed, "echo trained")
    run = lab.render("h200-bare:1")
    run.sbatch(env={"SBATCH_PARTITION": "preempt"})
    run.wait("COMPLETED")
    log = run.log()
    assert "warning: the job runs in partition preempt, the run was submitted to gpu" in log
    assert "SBATCH_PARTITION" in log


def test_another_size_at_a_start_by_hand_is_told_in_the_log(testbed: Testbed) -> None:
    lab = lab_with(testbed, "echo trained on $TUNEPLANE_CLUSTER_GPUS_PER_NODE")
    run = lab.render("h200-bare:2")
    lab.sh(["sbatch", "--gpus-per-node=h200:4", str(run.folder / "job.sbatch")])
    run.wait("COMPLETED")
    log = run.log()
    assert "warning: this node gives 4 GPUs, the run was submitted for 2 per node" in log
    assert "trained on 4" in log


def test_sbatch_variables_are_read_at_compose_shown_and_kept_from_the_call(testbed: Testbed) -> None:
    lab = lab_with(testbed, "echo trained")
    env = {
        "SBATCH_PARTITION": "preempt",
        "SBATCH_TIMELIMIT": "17",
        "SBATCH_MEM_PER_NODE": "1",
        "SBATCH_NO_REQUEUE": "1",
        "SBATCH_HINT": "nomultithread",
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "7",
    }
    shown = lab.sh(["tp", "config", "h200-bare"], env=env)
    assert re.search(r"partition: preempt +# \$SBATCH_PARTITION", shown.stdout)
    assert re.search(r"time: \"?17\"? +# \$SBATCH_TIMELIMIT", shown.stdout)
    assert "SBATCH_MEM_PER_NODE" in shown.stderr
    run: Run = lab.submit("h200-bare:1", env=env)
    fields = testbed.job(run.job_id)
    assert (fields["Partition"], fields["TimeLimit"], fields["NumTasks"]) == ("preempt", "00:17:00", "1")
    assert any("SBATCH_MEM_PER_NODE" in notice for notice in run.notices)
    run.wait("COMPLETED")
    flagged = lab.submit("h200-bare:1", "--partition", "gpu", env=env)
    assert testbed.job(flagged.job_id)["Partition"] == "gpu"
    flagged.wait("COMPLETED")
