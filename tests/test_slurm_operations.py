"""Operations behind runs on a real Slurm: they look at the run's own records, never at Slurm's code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chain_lab import TRAINER
from operation_lab import MANIFEST, METHOD, SCAFFOLD, TRAIN, files
from slurm_lab import WAIT_FOR_GO, Run, SlurmLab, unique
from testbed_client import Testbed

pytestmark = [
    pytest.mark.testbed,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("nothing_left"),
]

ONE_GPU = ("--profile", "h200-bare:1")
EVAL = ("--then", "eval", "--tasks", "a,b")


def lab_of(testbed: Testbed, train: str, cluster: str = "") -> SlurmLab:
    """A lab whose one experiment is of the toy method, on nodes whose `python3` knows it."""
    lab = SlurmLab(testbed)
    site, library = lab.own_site(), lab.base / "library"
    for path, text in files(library).items():
        lab.write(str(library / path), text)
    lab.sh(["chmod", "755", str(library / "bin/python3")])
    lab.write(str(site / "recipe/toy/model.yaml"), MANIFEST)
    for name, text in SCAFFOLD.items():
        lab.write(str(site / f"recipe/toy/model.scaffold/{name}"), text)
    path = f"path: {library}/bin:/usr/local/bin:/usr/bin:/bin\n"
    lab.own_user_config("cluster/h200-bare.yaml", f"{path}{cluster}")
    lab.sh(["rm", "-r", "experiments/mlp"])
    lab.experiment = unique("ops")
    lab.sh(["tp", "new", lab.experiment, "--method", METHOD])
    lab.write(f"experiments/{lab.experiment}/train.sh", train)
    lab.write(f"experiments/{lab.experiment}/train.py", TRAINER)
    lab.commit()
    return lab


def submit(lab: SlurmLab, *words: str) -> list[Run]:
    """The run, and the operations behind it."""
    said = json.loads(lab.sh(["tp", "submit", lab.experiment, *ONE_GPU, *words, "--json"]).stdout)
    return [made(lab, one) for one in (said, *said.get("then", ()))]


def made(lab: SlurmLab, said: dict[str, Any]) -> Run:
    return Run(lab, said["run_id"], Path(said["folder"]), said["job_id"], said.get("notices", []))


def evaluated(run: Run) -> list[tuple[str, float]]:
    return [(row["task"], row["value"]) for row in run.status()["report"]["rows"]]


def test_an_evaluation_starts_once_the_run_is_complete_and_waits_for_it_till_then(testbed: Testbed) -> None:
    lab = lab_of(testbed, f"{WAIT_FOR_GO}\n{TRAIN}")
    run, behind = submit(lab, *EVAL)
    run.wait("RUNNING")
    waiting = behind.status()
    assert waiting["state"] == "PENDING"
    assert waiting["reason"] == f"waits for {run.run_id} to complete (Dependency)"
    # By hand it would start at once; it sees that the run goes on, and that its own job waits already.
    by_hand = behind.sbatch()
    testbed.wait_job(by_hand)
    said = lab.sh(["cat", str(behind.folder / f"slurm/{by_hand}.out")]).stdout
    assert f"{run.run_id} goes on in job {run.job_id}: handed on to job {behind.job_id}" in said
    run.release()
    run.wait("COMPLETED")
    status = behind.wait("COMPLETED")
    assert (status["operation"], status["subject"], status["attempts"]) == ("eval", run.run_id, 1)
    assert evaluated(run) == evaluated(behind) == [("a", 0.25), ("b", 1.25)]
    behind.tp("retry")  # the run is complete: it starts at once
    behind.wait_for(lambda: behind.status()["attempts"] == 2, "retry claimed no attempt")
    behind.wait("COMPLETED")
    # Two at once, of a run that is complete: neither waits, and each has its own report.
    words = ["tp", "eval", run.run_id, "--json", "--tasks"]
    both = [made(lab, json.loads(lab.sh([*words, task]).stdout)) for task in ("c", "d")]
    for one, task in zip(both, ("c", "d"), strict=True):
        one.wait("COMPLETED")
        assert evaluated(one) == [(task, 0.25)]
    assert evaluated(run) in ([("c", 0.25)], [("d", 0.25)])


def test_what_follows_a_run_that_is_stopped_or_fails_ends_at_once(testbed: Testbed) -> None:
    lab = lab_of(testbed, f"{WAIT_FOR_GO}\nexit 7\n")
    fails, after_failure = submit(lab, *EVAL)
    stopped, after_stop = submit(lab, *EVAL)
    for run in (fails, stopped):
        run.wait("RUNNING")
    fails.release()
    stopped.tp("stop")
    for run, behind, word in ((fails, after_failure, "FAILED"), (stopped, after_stop, "CANCELLED")):
        status = behind.wait("NOT_RUN")
        assert status["reason"] == f"not run: {run.run_id} is {word}"
        assert (status["attempts"], run.status()["state"]) == (0, word)
        assert not (behind.folder / "secrets.env").exists()
    held = lab.sh(["sacct", "-nPX", "-j", after_stop.job_id, "--format=ElapsedRaw,State"]).stdout
    seconds, state = held.strip().split("|")
    assert int(seconds) < 30 and state == "FAILED"


def test_an_evaluation_follows_a_run_through_its_successors(testbed: Testbed) -> None:
    """Walltime: the run saves and goes on in a new job, and the evaluation behind it too."""
    steps = '/usr/bin/python3 "$TUNEPLANE_EXP_DIR/train.py" 160 0.25 0 || exit'
    train = f"{steps}\n[[ -e $TUNEPLANE_OUT_DIR/final-0.json ]] || exit 0\n{TRAIN}"
    lab = lab_of(testbed, train, "restart_way: successor\n")
    run, behind = submit(lab, "--time", "1", *EVAL)
    status = behind.wait("COMPLETED", timeout_s=240)
    assert run.status()["attempts"] >= 2, run.known()
    assert status["attempts"] == 1 and status["job_id"] != behind.job_id
    assert evaluated(run) == [("a", 0.25), ("b", 1.25)]
    handed = json.loads(behind.read("handed-on.json"))
    assert handed["to"] == status["job_id"]
    said = lab.sh(["cat", str(behind.folder / f"slurm/{behind.job_id}.out")]).stdout
    assert "goes on in job" in said


def test_a_hand_over_that_slurm_refuses_is_told(testbed: Testbed) -> None:
    """On nodes whose `sbatch` refuses: the run that waits for the other has lost its place, and says so."""
    lab = lab_of(testbed, f"{WAIT_FOR_GO}\n{TRAIN}")
    words = "sbatch: error: Batch job submission failed: QOSMaxSubmitJobPerUserLimit"
    refusal = f"#!/bin/sh\necho '{words}' >&2\nexit 1\n"
    lab.write(str(lab.base / "library/bin/sbatch"), refusal)
    lab.sh(["chmod", "755", str(lab.base / "library/bin/sbatch")])
    run, behind = submit(lab, *EVAL)
    run.wait("RUNNING")
    lab.sh(["scontrol", "update", f"JobId={behind.job_id}", "Dependency="])  # it starts too early
    status = behind.wait("FAILED")
    assert (
        f"{run.run_id} goes on in job {run.job_id}, and this run could not be handed on" in status["reason"]
    )
    assert "QOSMaxSubmitJobPerUserLimit" in status["reason"]
    run.release()
    run.wait("COMPLETED")
    behind.tp("retry")
    behind.wait("COMPLETED")


def test_where_slurm_does_not_take_what_follows_nothing_stays_queued(testbed: Testbed) -> None:
    lab = lab_of(testbed, f"{WAIT_FOR_GO}\n{TRAIN}")
    words = "Batch job submission failed: QOSMaxSubmitJobPerUserLimit"
    refusal = f"case \"$*\" in *--dependency=*) echo 'sbatch: error: {words}' >&2; exit 1 ;; esac"
    lab.write(str(lab.base / "own/sbatch"), f'#!/bin/sh\n{refusal}\nexec /usr/bin/sbatch "$@"\n')
    lab.sh(["chmod", "755", str(lab.base / "own/sbatch")])
    path = lab.sh(["sh", "-c", "echo $PATH"]).stdout.strip()
    told = lab.tp(
        *("submit", lab.experiment, *ONE_GPU, *EVAL), code=1, env={"PATH": f"{lab.base}/own:{path}"}
    )
    (run,) = json.loads(lab.sh(["tp", "job", "ls", "--experiment", lab.experiment, "--json"]).stdout)
    assert f"eval was not taken, so {run['run_id']} was stopped: " in told and words in told
    left = Run(lab, run["run_id"], Path(run["folder"]), run["job_id"], [])
    assert left.wait("CANCELLED")["attempts"] <= 1
