"""Runs that start again by themselves, on a real Slurm with its default time-outs."""

from __future__ import annotations

import fcntl
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from chain_lab import end_of, left_on_nodes, make_lab, steps, steps_of, unbroken
from conftest import hold
from slurm_lab import Run, SlurmLab, unique
from testbed_client import Testbed

pytestmark = [
    pytest.mark.testbed,
    pytest.mark.slow,
    pytest.mark.timeout(420),
    pytest.mark.usefixtures("nothing_left"),
]

ONE_GPU = ["--nodes", "1", "--gpus-per-node", "1"]


@pytest.fixture
def shared(testbed: Testbed) -> Iterator[Testbed]:
    with hold(fcntl.LOCK_SH):
        yield testbed


@dataclass
class Chains:
    """Runs that meet their walltime, all at once; the first, the second and the fourth in a container."""

    saves: Run  # looks for the stop marker, saves and leaves with 0
    deaf: Run  # does not look for it, but saves now and then
    idle: Run  # neither: it comes no further however often it starts
    catches: Run  # knows nothing of the marker either, but catches USR1, and opted in
    element: Run  # of an array, the first; it saves
    sibling: Run  # of the same array, with more time
    orphaned: Run  # its batch script and whoever ends it are killed just before they would requeue it


def array_of_two(testbed: Testbed) -> list[Run]:
    """Two runs as the elements of one array; the first has two minutes."""
    labs = [make_lab(testbed, steps, 0.25, 0) for steps in (240, 100_000)]
    runs = [lab.render("h200-bare", *ONE_GPU, "--time", "30") for lab in labs]
    scripts = " ".join(shlex.quote(str(run.folder / "job.sbatch")) for run in runs)
    text = f'#!/bin/bash\nscripts=({scripts})\nexec /bin/bash "${{scripts[$SLURM_ARRAY_TASK_ID]}}"\n'
    labs[0].write(str(labs[0].base / "array.sh"), text)
    options = ["--array=0-1", "--gpus-per-node=h200:1", "--cpus-per-task=8", "--export=NONE"]
    options += ["--time=30", "--signal=B:USR2@60", "--requeue"]
    words = ["sbatch", "--parsable", *options, str(labs[0].base / "array.sh")]
    array = labs[0].sh(words, cwd=str(labs[0].base)).stdout.strip()
    runs[0].wait("RUNNING")
    labs[0].sh(["scontrol", "update", f"JobId={array}_0", "TimeLimit=2"])
    return runs


KILLER = """#!/bin/bash
if [[ $1 = requeue && ! -e {flag} ]]; then
  touch {flag}
  shell=$(ps -o ppid= -p $PPID)
  while [[ $(ps -o comm= -p $shell) = python3 ]]; do shell=$(ps -o ppid= -p $shell); done
  kill -KILL $shell $PPID
  sleep 5
fi
exec /usr/bin/scontrol "$@"
"""


def orphaned(testbed: Testbed) -> Run:
    """A run on nodes whose `scontrol` kills, once, whoever is about to requeue a job, and the shell above."""
    lab = make_lab(testbed, 240, 0.25, 0)
    killer = str(lab.base / "bin" / "scontrol")
    lab.write(killer, KILLER.format(flag=lab.base / "killed"))
    lab.sh(["chmod", "755", killer])
    lab.own_user_config("cluster/h200-bare.yaml", f"path: {lab.base}/bin:/usr/local/bin:/usr/bin:/bin\n")
    return lab.submit("h200-bare", *ONE_GPU, "--time", "2")


@pytest.fixture(scope="module")
def chains(testbed: Testbed) -> Iterator[Chains]:
    with hold(fcntl.LOCK_SH):
        runs: list[Run] = []
        try:
            for profile, last, every, words, more in (
                ("h200", 240, 0, "", []),
                ("h200", 440, 5, "deaf", []),
                ("h200-bare", 440, 0, "deaf", []),
                ("h200", 240, 0, "deaf catches-USR1", ["--save-signal", "USR1"]),
            ):
                lab = make_lab(testbed, last, 0.25, every, words)
                runs.append(lab.submit(profile, *ONE_GPU, "--time", "2", *more))
            runs += array_of_two(testbed)
            runs.append(orphaned(testbed))
            yield Chains(*runs)
        finally:
            for run in runs:
                run.tp("stop", check=False)


@pytest.mark.contract("C9")
@pytest.mark.contract("C13")
def test_a_run_longer_than_its_walltime_goes_on_and_trains_nothing_twice(chains: Chains) -> None:
    run = chains.saves
    status = run.wait("COMPLETED", timeout_s=240)
    assert status["attempts"] >= 2, run.known()
    assert json.loads(run.read("out/final-0.json")) == unbroken(240)
    assert [step for step, _ in steps_of(run)] == list(range(1, 241))
    first = end_of(run, 0)
    assert (first["cause"], first["to_be_continued"], first["code"]) == ("walltime", True, 0)
    assert left_on_nodes(run) == []


def test_a_trainer_that_ignores_the_marker_is_told_to_end_and_goes_on_from_its_checkpoint(
    chains: Chains,
) -> None:
    run = chains.deaf
    status = run.wait("COMPLETED", timeout_s=240)
    assert status["attempts"] >= 2, run.known()
    assert json.loads(run.read("out/final-0.json")) == unbroken(440)
    first = end_of(run, 0)
    assert (first["cause"], first["code"]) == ("walltime", 143)
    saved = max(step for step, attempt in steps_of(run) if attempt == 0) // 5 * 5
    assert next(step for step, attempt in steps_of(run) if attempt == 1) == saved + 1


def test_a_signal_that_was_opted_in_reaches_the_trainer_and_no_process_that_does_not_catch_it(
    chains: Chains,
) -> None:
    """Its shell and a `sleep` beside it catch no USR1, and would die of it."""
    run = chains.catches
    status = run.wait("COMPLETED", timeout_s=240)
    assert status["attempts"] >= 2, run.known()
    assert [step for step, _ in steps_of(run)] == list(range(1, 241))
    assert end_of(run, 0)["code"] == 0


def test_an_element_of_an_array_goes_on_and_leaves_its_sibling_alone(chains: Chains) -> None:
    status = chains.element.wait("COMPLETED", timeout_s=240)
    assert status["attempts"] >= 2
    assert end_of(chains.element, 0)["cause"] == "walltime"
    assert [step for step, _ in steps_of(chains.element)] == list(range(1, 241))
    sibling = chains.sibling.status()
    assert (sibling["state"], sibling["attempts"]) == ("RUNNING", 1)
    noted = [step.number for step in steps(chains.sibling)]
    assert noted == list(range(1, len(noted) + 1))


@pytest.mark.contract("C46")
def test_a_restart_that_was_lost_with_its_batch_script_is_told_and_carried_out(chains: Chains) -> None:
    run = chains.orphaned
    run.wait_for((run.folder / "attempts/0/restart.json").exists, "no intent", 150)
    run.wait_for((run.lab.base / "killed").exists, "nobody was killed", 30)
    status = run.wait(timeout_s=60)
    assert status["attempts"] == 1
    assert status["pending_restart"] == "walltime", status
    assert f"tp job resume {run.run_id}" in run.tp("status").stdout
    run.tp("resume")
    assert run.wait("COMPLETED", timeout_s=200)["attempts"] >= 2
    assert [step for step, _ in steps_of(run)] == list(range(1, 241))


def test_a_run_that_makes_no_progress_is_not_started_again(chains: Chains) -> None:
    run = chains.idle
    run.wait_for((run.folder / "attempts/0/end.json").exists, "no end", 200)
    end = end_of(run, 0)
    assert (end["cause"], end["to_be_continued"]) == ("walltime", False)
    assert end["not_restarted"] == "no progress: no new checkpoint in out/checkpoints and no new step"
    assert len(list((run.folder / "attempts").glob("*/start.json"))) == 1


def test_a_run_that_fails_by_itself_is_not_started_again(shared: Testbed) -> None:
    lab = SlurmLab(shared, experiment=unique("crashes"))
    lab.train_sh("exit 7")
    lab.commit()
    run = lab.submit("h200-bare", *ONE_GPU)
    status = run.wait("FAILED")
    assert (status["code"], status["attempts"]) == (7, 1)
    assert (end_of(run, 0)["cause"], end_of(run, 0)["to_be_continued"]) == ("", False)


@pytest.mark.parametrize(("rank", "profile"), [(0, "h200-bare"), (1, "h200")])
def test_an_agent_that_is_killed_ends_the_run_and_leaves_nothing(
    shared: Testbed, rank: int, profile: str
) -> None:
    lab = make_lab(shared, 100_000, 0.2, 5)
    run = lab.submit(profile, "--nodes", "2", "--gpus-per-node", "1", "--time", "30")
    run.wait_for(lambda: all(steps(run, r) for r in (0, 1)), "it did not start")
    host = json.loads(run.read("attempts/0/start.json"))["hosts"][rank]
    shared.node_exec(host, ["pkill", "-KILL", "-f", f"kernel.pyz node {run.folder} "])
    status = run.wait("FAILED", timeout_s=60)
    assert status["attempts"] == 1
    assert host in status["reason"], status
    assert left_on_nodes(run) == []
