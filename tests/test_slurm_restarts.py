"""Runs that start again by themselves, on a real Slurm with its default time-outs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from conftest import hold
from slurm_lab import Run, SlurmLab, unique
from testbed_client import Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.slow, pytest.mark.timeout(420)]

ONE_GPU = ["--nodes", "1", "--gpus-per-node", "1"]
NODES = ("n1", "n2", "n3", "n4")

TRAINER = r"""
import hashlib, json, os, pathlib, signal, sys, time

out, stop = pathlib.Path(os.environ["TUNEPLANE_OUT_DIR"]), os.environ["TUNEPLANE_STOP_FILE"]
rank, attempt = os.environ["TUNEPLANE_MACHINE_RANK"], os.environ["TUNEPLANE_JOB_ATTEMPT"]
last, pace_s, every = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
folder = out / "checkpoints" / rank
folder.mkdir(parents=True, exist_ok=True)
step, weights = 0, "0" * 64
for path in sorted(folder.glob("step-*.json"))[-1:]:
    step, weights = json.loads(path.read_text())
told = []
for word in sys.argv:
    if word.startswith("catches-"):
        signal.signal(getattr(signal, "SIG" + word[8:]), lambda *_: told.append(1))
print(f"attempt {attempt} begins after step {step}", flush=True)

def save():
    draft = folder / ".draft"
    draft.write_text(json.dumps([step, weights]))
    draft.rename(folder / f"step-{step:06d}.json")

with open(out / f"steps-{rank}-{attempt}.txt", "a") as steps:
    while step < last:
        time.sleep(pace_s)
        step += 1
        weights = hashlib.sha256(f"{weights} {step}".encode()).hexdigest()
        print(step, attempt, time.time(), file=steps, flush=True)
        if every and step % every == 0:
            save()
        if told or (os.path.exists(stop) and "deaf" not in sys.argv):
            save()
            print("saved and ended", flush=True)
            sys.exit(0)
save()
(out / f"final-{rank}.json").write_text(json.dumps([step, weights]))
"""


def unbroken(last: int) -> list[Any]:
    """The final checkpoint of a run that nothing interrupts."""
    weights = "0" * 64
    for step in range(1, last + 1):
        weights = hashlib.sha256(f"{weights} {step}".encode()).hexdigest()
    return [last, weights]


def make_lab(testbed: Testbed, last: int, pace_s: float, every: int, *words: str) -> SlurmLab:
    """A lab whose trainer makes `last` steps, saves at every `every`-th, and is what `words` say."""
    lab = SlurmLab(testbed, experiment=unique("goes-on"))
    lab.write(f"experiments/{lab.experiment}/train.py", TRAINER)
    train = f'python3 "$TUNEPLANE_EXP_DIR/train.py" {last} {pace_s} {every} {" ".join(words)}'
    lab.train_sh(f"sleep 100000 &\n{train}\nstatus=$?\nkill $!\nexit $status")
    lab.commit()
    return lab


@dataclass(frozen=True)
class Step:
    number: int
    attempt: int
    at: float  # seconds since the epoch


def steps(run: Run, rank: int = 0, attempt: int = 0) -> list[Step]:
    """What one rank of one attempt noted of its steps."""
    path = run.folder / f"out/steps-{rank}-{attempt}.txt"
    if not path.exists():
        return []
    words = [line.split() for line in path.read_text().splitlines() if line.count(" ") == 2]
    return [Step(int(number), int(of), float(at)) for number, of, at in words]


def steps_of(run: Run, rank: int = 0) -> list[tuple[int, int]]:
    """(step, attempt) of one rank, attempt by attempt; a file has the lines of its own attempt alone."""
    found = []
    for attempt in range(len(list((run.folder / "attempts").glob("*/start.json")))):
        noted = steps(run, rank, attempt)
        assert {step.attempt for step in noted} == {attempt}
        found += [(step.number, attempt) for step in noted]
    return found


def left_on_nodes(run: Run) -> list[str]:
    """Processes of a run on any node, a moment after its end."""
    bed, found = run.lab.bed, [""]
    for _ in range(50):
        found = [bed.node_exec(n, ["pgrep", "-af", run.run_id], check=False).stdout for n in NODES]
        if not any(found):
            return []
        time.sleep(0.2)
    return [line for line in found if line]


@contextmanager
def cut(testbed: Testbed, node: str) -> Iterator[float]:
    """A node without its network, and with it again afterwards; the time of the cut."""
    testbed.cut(node)
    try:
        yield time.time()
    finally:
        testbed.join(node)


def end_of(run: Run, attempt: int) -> dict[str, Any]:
    return dict(json.loads(run.read(f"attempts/{attempt}/end.json")))


@pytest.fixture
def shared(testbed: Testbed) -> Iterator[Testbed]:
    with hold(fcntl.LOCK_SH):
        yield testbed


@dataclass
class Chains:
    """Runs that meet their walltime, all at once."""

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
        runs = []
        for last, every, words, more in (
            (240, 0, "", []),
            (240, 5, "deaf", []),
            (240, 0, "deaf", []),
            (240, 0, "deaf catches-USR1", ["--save-signal", "USR1"]),
        ):
            lab = make_lab(testbed, last, 0.25, every, words)
            runs.append(lab.submit("h200-bare", *ONE_GPU, "--time", "2", *more))
        runs += array_of_two(testbed)
        runs.append(orphaned(testbed))
        yield Chains(*runs)
        for run in runs:
            run.tp("stop", check=False)


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
    assert json.loads(run.read("out/final-0.json")) == unbroken(240)
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


@pytest.mark.parametrize("rank", [0, 1])
def test_an_agent_that_is_killed_ends_the_run_and_leaves_nothing(shared: Testbed, rank: int) -> None:
    lab = make_lab(shared, 100_000, 0.2, 5)
    run = lab.submit("h200-bare", "--nodes", "2", "--gpus-per-node", "1", "--time", "30")
    run.wait_for(lambda: all(steps(run, r) for r in (0, 1)), "it did not start")
    host = json.loads(run.read("attempts/0/start.json"))["hosts"][rank]
    shared.node_exec(host, ["pkill", "-KILL", "-f", f"kernel.pyz node {run.folder} "])
    status = run.wait("FAILED", timeout_s=60)
    assert status["attempts"] == 1
    assert host in status["reason"], status
    assert left_on_nodes(run) == []


def test_a_node_that_is_cut_off_ends_the_attempt_and_the_next_avoids_it(testbed_alone: Testbed) -> None:
    """With the heartbeat of 10 s that sites have, and Slurm's own time-outs."""
    lab = make_lab(testbed_alone, 100_000, 0.2, 5, "deaf")
    lab.own_user_config("cluster/h200-bare.yaml", "heartbeat_s: 10\n")
    run = lab.submit("h200-bare", "--nodes", "3", "--gpus-per-node", "1", "--time", "30")
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
    """Slurm sends TERM to every process of the step: one trainer catches it and saves, another one dies of it."""
    runs = []
    for every, words in ((0, "catches-TERM"), (5, "")):
        lab = make_lab(testbed_alone, 150, 0.2, every, words)
        more = ["--nodes", "2", "--gpus-per-node", "1", "--partition", "preempt", "--time", "30"]
        runs.append(lab.submit("h200-bare", *more))
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
