"""Runs that start again by themselves, on a real Slurm with its default time-outs."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import hold
from slurm_lab import Run, SlurmLab, unique
from testbed_client import Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.slow, pytest.mark.timeout(420)]

TRAINER = r'''
import hashlib, json, os, pathlib, sys, time

out, stop = pathlib.Path(os.environ["TUNEPLANE_OUT_DIR"]), os.environ["TUNEPLANE_STOP_FILE"]
rank, attempt = os.environ["TUNEPLANE_MACHINE_RANK"], os.environ["TUNEPLANE_JOB_ATTEMPT"]
last, pace_s, every = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
folder = out / "checkpoints" / rank
folder.mkdir(parents=True, exist_ok=True)
step, weights = 0, "0" * 64
for path in sorted(folder.glob("step-*.json"))[-1:]:
    step, weights = json.loads(path.read_text())
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
        print(step, os.environ["TUNEPLANE_JOB_ATTEMPT"], time.time(), file=steps, flush=True)
        if every and step % every == 0:
            save()
        if os.path.exists(stop) and "deaf" not in sys.argv:
            save()
            print("saved and ended", flush=True)
            sys.exit(0)
save()
(out / f"final-{rank}.json").write_text(json.dumps([step, weights]))
'''


def unbroken(last: int) -> list[Any]:
    """The final checkpoint of a run that nothing interrupts."""
    import hashlib

    weights = "0" * 64
    for step in range(1, last + 1):
        weights = hashlib.sha256(f"{weights} {step}".encode()).hexdigest()
    return [last, weights]


def make_lab(testbed: Testbed, last: int, pace_s: float, every: int, *words: str) -> SlurmLab:
    lab = SlurmLab(testbed, experiment=unique("goes-on"))
    lab.write(f"experiments/{lab.experiment}/train.py", TRAINER)
    lab.train_sh(f'exec python3 "$TUNEPLANE_EXP_DIR/train.py" {last} {pace_s} {every} {" ".join(words)}')
    site = lab.own_site()
    profile = site / "cluster" / "h200-bare.yaml"
    lab.sh(["sh", "-c", 'printf "%s\\n" "$2" >>"$1"', "sh", str(profile), "# of this test"], cwd="/")
    lab.commit()
    return lab


def steps_of(run: Run, rank: int = 0) -> list[tuple[int, int]]:
    """(step, attempt) as the trainer noted them, attempt by attempt."""
    text = run.lab.sh(["sh", "-c", f"cat {run.folder}/out/steps-{rank}-*.txt"]).stdout
    return [(int(line.split()[0]), int(line.split()[1])) for line in text.splitlines()]


def end_of(run: Run, attempt: int) -> dict[str, Any]:
    return dict(json.loads(run.read(f"attempts/{attempt}/end.json")))


@pytest.fixture
def shared(testbed: Testbed) -> Iterator[Testbed]:
    with hold(fcntl.LOCK_SH):
        yield testbed


def test_a_run_longer_than_its_walltime_goes_on_and_trains_nothing_twice(shared: Testbed) -> None:
    lab = make_lab(shared, 240, 0.25, 0)
    run = lab.submit("h200-bare", "--nodes", "1", "--gpus-per-node", "1", "--time", "2")
    status = run.wait("COMPLETED", timeout_s=400)
    assert status["attempts"] >= 2
    assert json.loads(run.read("out/final-0.json")) == unbroken(240)
    assert [step for step, _ in steps_of(run)] == list(range(1, 241))
    first = end_of(run, 0)
    assert (first["cause"], first["to_be_continued"], first["code"]) == ("walltime", True, 0)


def test_a_node_that_is_cut_off_ends_the_attempt_and_the_next_avoids_it(testbed_alone: Testbed) -> None:
    lab = make_lab(testbed_alone, 100_000, 0.2, 5)
    run = lab.submit("h200-bare", "--nodes", "3", "--gpus-per-node", "1", "--time", "30")
    run.wait_for(lambda: "attempt 0 begins" in run.log(), "it did not start")
    time.sleep(15)
    hosts = json.loads(run.read("attempts/0/start.json"))["hosts"]
    try:
        testbed_alone.cut(hosts[2])
        cut_at = time.time()
        run.wait_for((run.folder / "attempts/1/start.json").exists, "no attempt 1", 150)
        again = json.loads(run.read("attempts/1/start.json"))
        assert hosts[2] not in again["hosts"]
        ended = end_of(run, 0)
        assert ended["ended_at"] - cut_at < 60
        assert ended["cause"] == "node_failure"
        assert hosts[2] in ended["reason"]
        last = run.read("out/steps-2-0.txt").splitlines()[-1].split()
        assert float(last[2]) < again["started_at"], "two attempts were alive"
    finally:
        testbed_alone.join(hosts[2])
        run.tp("stop", check=False)
