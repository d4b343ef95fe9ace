"""Pausing, resuming, running again and clearing on the real Slurm, and stopping one element of an array."""

from __future__ import annotations

import json
import shlex
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from slurm_lab import WAIT_FOR_GO, Run, SlurmLab, unique
from testbed_client import Testbed

pytestmark = [
    pytest.mark.testbed,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("nothing_left"),
]

SAVES = """
echo "begun $TUNEPLANE_JOB_ATTEMPT"
while [ ! -e "$TUNEPLANE_OUT_DIR/go" ]; do
  if [ -e "$TUNEPLANE_STOP_FILE" ]; then
    mkdir -p "$TUNEPLANE_OUT_DIR/checkpoints/step-$TUNEPLANE_JOB_ATTEMPT"
    echo saved
    exit 0
  fi
  sleep 0.05
done
"""
"""A train.sh that polls for the stop marker, and otherwise for `Run.release`."""


def lab_with(testbed: Testbed, train: str) -> SlurmLab:
    lab = SlurmLab(testbed, experiment=unique("pause"))
    lab.train_sh(train)
    lab.commit()
    return lab


def begun(run: Run, attempt: int = 0) -> None:
    run.wait("RUNNING")
    run.wait_for(lambda: f"begun {attempt}" in run.log(), "begun")


@pytest.mark.contract("C46")
def test_a_running_run_saves_on_pause_and_goes_on_as_its_next_attempt_on_resume(testbed: Testbed) -> None:
    run = lab_with(testbed, SAVES).submit("h200-bare:1")
    begun(run)
    said = run.tp("pause")
    assert f"attempt 0 (Slurm job {run.job_id}) was asked to save and end" in said.stderr
    assert f"{run.run_id}: PAUSED, it saved and ended" in said.stdout
    assert (run.folder / "out" / "checkpoints" / "step-0").is_dir()
    assert "saved" in run.log()
    second = json.loads(run.tp("resume", "--json").stdout)
    assert second["job_id"] != run.job_id and not second["released"]
    begun(run, 1)
    assert not (run.folder / "paused").exists()
    run.release()
    status = run.wait("COMPLETED")
    assert [(a["number"], a["job_id"], a["how"]) for a in status["history"]] == [
        (0, run.job_id, "saved"),
        (1, second["job_id"], "completed"),
    ]
    assert "is complete" in run.tp("resume", check=False).stderr
    assert "nothing to pause" in run.tp("pause", check=False).stderr


@pytest.mark.contract("C46")
def test_a_waiting_run_is_held_and_let_go(testbed: Testbed) -> None:
    lab = lab_with(testbed, "true")
    blocker = testbed.exec(["sbatch", "--parsable", "-o", "/dev/null", "--wrap", "sleep 300"]).stdout.strip()
    try:
        run = lab.submit("h200-bare:1", "--dependency", f"afterany:{blocker}")
        said = run.tp("pause")
        assert f"Slurm job {run.job_id} is held" in said.stderr
        status = run.status()
        assert (status["state"], status["reason"]) == ("PENDING", "held by tp job pause")
        refused = run.tp("retry", check=False)
        assert refused.returncode == 2 and f"tp job resume {run.run_id} releases it" in refused.stderr
    finally:
        testbed.exec(["scancel", blocker])
    assert run.status()["state"] == "PENDING"  # what it waited for is over, and it does not start
    assert json.loads(run.tp("resume", "--json").stdout) == {
        "run_id": run.run_id,
        "job_id": run.job_id,
        "released": True,
    }
    run.wait("COMPLETED")


@pytest.mark.contract("C42")
def test_of_two_resumes_at_once_one_queues_a_job_and_the_other_is_told(testbed: Testbed) -> None:
    run = lab_with(testbed, SAVES).submit("h200-bare:1")
    begun(run)
    run.tp("pause")
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda act: run.tp(act, check=False), ("resume", "retry", "resume")))
    assert sorted(d.returncode == 0 for d in done) == [False, False, True], [d.stderr for d in done]
    for refused in (d for d in done if d.returncode):
        assert f"{run.run_id} is" in refused.stderr
    assert len(list((run.folder / "submissions").iterdir())) == 2
    run.release()
    assert run.wait("COMPLETED")["attempts"] == 2


def test_a_stop_while_it_saves_ends_it_for_good(testbed: Testbed) -> None:
    run = lab_with(testbed, "trap '' TERM\n" + WAIT_FOR_GO).submit("h200-bare:1")
    run.wait("RUNNING")
    run.wait_for(lambda: run.status()["attempts"], "claimed")
    assert run.tp("pause", "--no-wait").returncode == 0
    assert run.status()["reason"] == "asked by tp job pause to save and end"
    assert "say tp job resume" in run.tp("resume", check=False).stderr
    said = run.tp("stop")
    assert f"Slurm job {run.job_id} was cancelled while it was RUNNING" in said.stderr
    status = run.status()
    assert (status["state"], status["reason"]) == ("CANCELLED", "stopped by tp job stop")


@pytest.mark.contract("C42")
def test_a_stop_beats_a_requeue_of_the_same_moment(testbed: Testbed) -> None:
    """Slurm takes a requeue of a job that is just being cancelled, and starts it again a little later."""
    lab = lab_with(testbed, "trap '' TERM; echo begun 0; sleep 600")
    run = lab.submit("h200-bare:1")
    begun(run)
    with ThreadPoolExecutor() as pool:
        stopped = pool.submit(run.tp, "stop")
        time.sleep(0.7)  # its scancel comes about now
        requeued = lab.sh(["scontrol", "requeue", run.job_id], check=False)
    assert f"{run.run_id}: CANCELLED" in stopped.result().stdout, (requeued, stopped.result())
    time.sleep(12)  # a requeued job waits for its credential to expire: 11 s here
    status = run.status()
    assert (status["state"], status["reason"]) == ("CANCELLED", "stopped by tp job stop")
    assert status["attempts"] == 1
    assert lab.sh(["squeue", "-h", "-n", lab.experiment]).stdout == ""


@pytest.mark.contract("C46")
def test_an_element_of_an_array_that_is_stopped_leaves_its_siblings_alone(testbed: Testbed) -> None:
    """Each element runs the script of a run of its own; SLURM_JOB_ID of one of them is the whole array's."""
    lab = lab_with(testbed, SAVES)
    runs = [lab.render("h200-bare:1") for _ in range(3)]
    scripts = " ".join(shlex.quote(str(run.folder / "job.sbatch")) for run in runs)
    lab.write(
        str(lab.base / "array.sh"),
        f'#!/bin/bash\nscripts=({scripts})\nexec /bin/bash "${{scripts[$SLURM_ARRAY_TASK_ID]}}"\n',
    )
    options = ["--parsable", "--array=0-2", "--gpus-per-node=h200:1", "--cpus-per-task=8", "--export=NONE"]
    argv = ["sbatch", *options, str(lab.base / "array.sh")]
    array = lab.sh(argv, cwd=str(lab.base)).stdout.strip()
    for run in runs:
        begun(run)
    assert [run.status()["job_id"] for run in runs] == [f"{array}_{task}" for task in range(3)]
    # The last element has the array's own id.
    assert "CANCELLED" in runs[2].tp("stop").stdout
    assert "PAUSED" in runs[0].tp("pause").stdout
    assert runs[1].status()["state"] == "RUNNING"
    runs[1].release()
    runs[1].wait("COMPLETED")
    assert [run.status()["state"] for run in runs] == ["PAUSED", "COMPLETED", "CANCELLED"]


@pytest.mark.contract("C46")
def test_a_rerun_needs_no_lab_and_takes_other_parameters_alone(testbed: Testbed) -> None:
    lab = lab_with(testbed, 'cat "$TUNEPLANE_PARAMS_FILE"; pwd; ls')
    run = lab.submit("h200:1", "--set", "lr=0.1", "--set", "opt=adam")
    run.wait("COMPLETED")
    lab.sh(["rm", "-rf", str(lab.root)], cwd="/")
    lab.root = lab.base
    said = json.loads(run.tp("rerun", "--set", "lr=0.5", "--time", "5", "--json").stdout)
    again = Run(lab, said["run_id"], run.folder.parent / said["run_id"], said["job_id"], said["notices"])
    assert said["rerun_of"] == run.run_id
    assert again.wait("COMPLETED")["rerun_of"] == run.run_id
    first, second = (json.loads(r.read("job.json")) for r in (run, again))
    assert second["spec"]["hyperparams"] == {"lr": 0.5, "opt": "adam"}
    assert second["spec"]["slurm"]["time"] == "5"
    for name in ("container", "recipe", "resources", "entrypoint"):
        assert first["spec"][name] == second["spec"][name]
    assert first["spec"]["capsule"]["digest"] == second["spec"]["capsule"]["digest"]
    assert '"lr": 0.5' in again.log()
    assert "as submitted" in again.tp("verify").stdout


def test_an_old_run_is_cleared_once_slurm_has_nothing_of_it(testbed: Testbed) -> None:
    lab = lab_with(testbed, SAVES)
    going, done = lab.submit("h200-bare:1"), lab.submit("h200-bare:1")
    for run in (going, done):
        begun(run)
    done.release()
    done.wait("COMPLETED")
    words = ["tp", "job", "gc", "--experiment", lab.experiment, "--older-than", "0h"]
    said = json.loads(lab.sh([*words, "--json"]).stdout)
    assert [item["name"] for item in said["items"]] == [done.run_id]
    assert said["kept"] == {going.run_id: "it is RUNNING"}
    assert (done.folder / "capsule.tar").exists()
    lab.sh([*words, "--yes"])
    assert sorted(path.name for path in done.folder.iterdir()) == ["cleared.json", "job.json", "out"]
    status = done.status()
    assert (status["state"], status["cleared"], status["attempts"]) == ("COMPLETED", True, 1)
    lab.sh([*words, "--yes", "--with-out"])
    assert not done.folder.exists()
    assert going.status()["state"] == "RUNNING"
    going.tp("stop")
