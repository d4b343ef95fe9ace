"""SFT, DPO and GRPO of a tiny model on the real Slurm: two nodes, offline, in containers; what follows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from eval_lab import write_task
from slurm_lab import Run, SlurmLab
from testbed_client import Testbed
from training_lab import Training
from trl_lab import make_tiny_model

pytestmark = [pytest.mark.testbed, pytest.mark.slow, pytest.mark.timeout(420)]

WAIT_S = 300
QUICK = ("logging_steps=1", "save_steps=3", "per_device_train_batch_size=2", "learning_rate=1e-3")
OFFLINE = "cluster:\n  environment:\n    HF_HUB_OFFLINE: '1'\n    OMP_NUM_THREADS: '1'\n"


@pytest.fixture(scope="module")
def shared(testbed: Testbed, training: Training, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, data and a task for lm-eval, where compute nodes see them."""
    made = make_tiny_model(tmp_path_factory.mktemp("trl"))
    write_task(made / "tasks")
    home = testbed.home("alice") / f"data of {made.parent.name}-{made.name}"
    made.rename(home)
    return testbed.give(home)


def submit(
    training: Training, shared: Path, method: str, *words: str, sets: tuple[str, ...] = ()
) -> tuple[SlurmLab, Run, dict[str, Any]]:
    """A run of two ranks on two nodes, and what submit said."""
    name = method.removeprefix("trl/")
    lab = training.lab(method, name=name, files={"../../configs/defaults.yaml": OFFLINE})
    flags = [*training.flags(ranks=2, nodes=2), "--train-data", str(shared / f"{name}.jsonl")]
    flags += [word for text in (*QUICK, *sets) for word in ("--set", text)]
    said = json.loads(lab.sh(["tp", "submit", lab.experiment, *flags, *words, "--json"]).stdout)
    return lab, Run(lab, said["run_id"], Path(said["folder"]), said["job_id"], said["notices"]), said


def curve(run: Run, name: str) -> list[int]:
    """The steps of a metric, as `tp job metrics` says it."""
    (found,) = json.loads(run.tp("metrics", name, "--json").stdout)["metrics"]
    return [int(step) for step in found["steps"]]


def test_sft_is_exported_and_evaluated_and_dpo_starts_from_it(
    testbed: Testbed, training: Training, shared: Path
) -> None:
    model = ("--model", str(shared / "tiny model"))
    behind = (
        "--then",
        "export",
        "--then",
        "eval",
        "--tasks",
        "colours",
        "--include-path",
        str(shared / "tasks"),
    )
    held_out = ("--validation-data", str(shared / "held [out].jsonl"))
    _, sft, said = submit(
        training, shared, "trl/sft", *model, *held_out, *behind, sets=("max_steps=4", "eval_steps=2")
    )
    _, grpo, _ = submit(
        training,
        shared,
        "trl/grpo",
        *model,
        sets=("max_steps=2", "num_generations=2", "max_completion_length=8"),
    )
    sft.wait("COMPLETED", timeout_s=WAIT_S)
    assert sorted(p.name for p in (sft.folder / "attempts/0").glob("node-?.log")) == [
        "node-0.log",
        "node-1.log",
    ]
    assert curve(sft, "train/loss") == [1, 2, 3, 4] and curve(sft, "validation/loss") == [2, 4]
    _, dpo, _ = submit(training, shared, "trl/dpo", "--init-from", f"run/{sft.run_id}", sets=("max_steps=2",))
    for then in said["then"]:
        one = Run(sft.lab, then["run_id"], Path(then["folder"]), then["job_id"], [])
        one.wait("COMPLETED", timeout_s=WAIT_S)
    (row,) = [r for r in sft.status()["report"]["rows"] if r["metric"].startswith("acc")][:1]
    assert row["task"] == "colours" and 0 <= row["value"] <= 1
    grpo.wait("COMPLETED", timeout_s=WAIT_S)
    assert curve(grpo, "train/reward") == [1, 2]
    dpo.wait("COMPLETED", timeout_s=WAIT_S)
    assert curve(dpo, "train/reward_margin") == [1, 2]
    for run in (sft, grpo, dpo):
        record = json.loads(run.read("out/hf_export/tuneplane_export.json"))
        assert record["source"] == "final" and record["run_id"] == run.run_id
