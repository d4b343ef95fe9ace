"""pytorch/image-classification on the real Slurm: two nodes of two ranks learn digits, also when they are cut."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from digits import write_digits
from slurm_lab import Run, SlurmLab
from testbed_client import Testbed
from training_lab import Training

pytestmark = [pytest.mark.testbed, pytest.mark.slow, pytest.mark.timeout(300)]

METHOD = "pytorch/image-classification"
STEPS, EVERY = 88, 30
CONFIG = f"""\
architecture: small-cnn
image_size: 16
color: false
augmentation: crop
dropout: 0.1
num_workers: 0
batch_size: 16
epochs: 4
warmup_steps: 10
log_every_steps: 1
checkpoint_every_steps: {EVERY}
"""


@pytest.fixture(scope="module")
def data(testbed: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits where compute nodes see them."""
    made = write_digits(tmp_path_factory.mktemp("digits"))
    home = testbed.home("alice") / f"digits-{made.parent.name}-{made.name}"
    made.rename(home)
    return testbed.give(home)


@pytest.fixture(scope="module")
def lab(training: Training) -> SlurmLab:
    return training.lab(METHOD, name="cls", files={"config.yaml": CONFIG})


def start(lab: SlurmLab, training: Training, data: Path, *more: str) -> Run:
    return lab.submit_words(*training.flags(ranks=4, nodes=2), "--train-data", str(data), *more)


def curve(run: Run, name: str) -> dict[str, Any]:
    """One metric as `tp job metrics` says it."""
    (found,) = json.loads(run.tp("metrics", name, "--json").stdout)["metrics"]
    return dict(found)


@pytest.fixture(scope="module")
def unbroken(lab: SlurmLab, training: Training, data: Path) -> Run:
    run = start(lab, training, data)
    run.wait("COMPLETED", timeout_s=120)
    return run


@pytest.mark.contract("C43")
def test_two_nodes_of_two_ranks_learn_digits_that_they_have_not_seen(unbroken: Run) -> None:
    accuracy = curve(unbroken, "validation/accuracy")
    assert accuracy["steps"] == [22, 44, 66, 88] and accuracy["last"] > 0.95
    assert curve(unbroken, "train/loss")["steps"] == list(range(1, STEPS + 1))
    assert curve(unbroken, "train/images_per_second")["min"] > 0
    log = unbroken.log()
    assert "1437 images of 10 classes, 4 ranks on cpu, 88 steps of 64" in log
    for rank, host in enumerate(("n1", "n2")):
        assert re.search(
            rf"^{host} \| .*node {rank} of 2 .* --nproc-per-node=2 .*tuneplane.bridge", log, re.M
        )
    assert f"step-{STEPS}" in unbroken.tp("artifacts").stdout


@pytest.mark.contract("C46")
def test_a_run_that_slurm_requeues_goes_on_after_its_last_checkpoint(
    lab: SlurmLab, training: Training, data: Path, unbroken: Run, nothing_left: None
) -> None:
    """Killed between two checkpoints on both nodes: nothing before is done again, and the losses are the same."""
    run = start(lab, training, data)
    log = run.folder / "attempts/0/node-0.log"
    run.wait_for(lambda: log.exists() and f"step {EVERY + 5} " in log.read_text(), "a few steps more", 90)
    lab.sh(["scontrol", "requeue", run.job_id])
    run.wait_for((run.folder / "attempts/1/start.json").exists, "its second attempt", 60)
    noted = [each["name"] for each in json.loads(run.read("attempts/1/start.json"))["checkpoints"]]
    saved = int(noted[-1].removeprefix("step-"))
    run.wait("COMPLETED", timeout_s=120)

    told = [
        int(step)
        for step in re.findall(r"step (\d+)  train/loss", (run.folder / "attempts/1/node-0.log").read_text())
    ]
    assert told == list(range(saved + 1, STEPS + 1)), "earlier steps are not computed again"
    loss, whole = curve(run, "train/loss"), curve(unbroken, "train/loss")
    assert loss["steps"] == list(range(1, STEPS + 1))
    assert loss["attempt_of"] == [0] * saved + [1] * (STEPS - saved)
    assert saved >= EVERY and loss["hidden"] > 0, "it was cut some steps after a checkpoint"
    assert loss["values"] == whole["values"]
    accuracy = curve(run, "validation/accuracy")
    assert accuracy["steps"] == [22, 44, 66, 88] and accuracy["last"] > 0.95
    assert accuracy["values"] == curve(unbroken, "validation/accuracy")["values"]
