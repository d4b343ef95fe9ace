"""SFT, DPO and GRPO on a tiny model, in real runs of this machine: points, checkpoints, resume, hf_export."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_fixture import wait_until
from training_packages import need_training_packages
from trl_lab import TRAINERS, TrlLab, TrlRun, make_tiny_model

from tuneplane.hf_export.folder import read_origin

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OFFLINE = {"PATH": os.defpath, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_training_packages()
    return make_tiny_model(tmp_path_factory.mktemp("shared files"))


@pytest.fixture(scope="module")
def sft(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrlLab, TrlRun]:
    """An unbroken run of SFT on two ranks: 6 steps, evaluated at 3 and 6, checkpoints at 4 and 6."""
    lab = TrlLab(tmp_path_factory.mktemp("sft"), "trl/sft", shared)
    run = lab.submit(*sft_words(lab, shared))
    assert run.ended()["code"] == 0, run.log()
    return lab, run


def sft_words(lab: TrlLab, shared: Path) -> list[str | Path]:
    words = lab.words("sft.jsonl", "max_steps=6", "eval_steps=3", "save_total_limit=5")
    return [*words, "--validation-data", shared / "held [out].jsonl"]


def loaded(*folders: Path) -> list[dict[str, Any]]:
    """What transformers makes of exports, in a process of its own."""
    done = subprocess.run(
        [sys.executable, TRAINERS / "load_export.py", *folders],
        env=OFFLINE,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return [found[str(folder)] for folder in folders]


def points(run: TrlRun) -> dict[str, dict[int, float]]:
    """What was reported, by name: value by step."""
    return {
        name: dict(zip(series.steps, series.values, strict=True))
        for name, series in run.metrics().series.items()
        if not name.startswith("system/") and name != "train/total_flos"
    }


def resumed(points_: dict[str, dict[int, Any]], after: int, *names: str) -> dict[str, dict[int, Any]]:
    return {name: {s: v for s, v in points_[name].items() if s > after} for name in names}


def end_of_training(name: str) -> bool:
    """What is logged once, after the last checkpoint: the trainer's summary."""
    return name.startswith("train/train_")


@pytest.mark.contract("C19")
def test_points_of_two_ranks_are_the_trainers_own_history(sft: tuple[TrlLab, TrlRun]) -> None:
    _, run = sft
    found = points(run)
    assert sorted(found["train/loss"]) == [1, 2, 3, 4, 5, 6]
    assert sorted(found["validation/loss"]) == [3, 6]
    assert {"train/train_loss", "train/train_runtime", "train/token_accuracy"} <= set(found)
    assert {k: v for k, v in found.items() if not end_of_training(k)} == run.history("checkpoint-6")
    assert run.metrics().hparams["learning_rate"] == 0.001


@pytest.mark.contract("C13")
def test_the_final_model_is_in_hf_export_and_loads_by_itself(
    sft: tuple[TrlLab, TrlRun], shared: Path
) -> None:
    _, run = sft
    assert sorted(path.name for path in run.out.iterdir()) == ["checkpoints", "hf_export"]
    assert {path.name for path in (run.out / "checkpoints").iterdir() if path.name != "README.md"} == {
        "checkpoint-4",
        "checkpoint-6",
    }, "TRL's card of the model apart, nothing lies beside the checkpoints"
    origin = read_origin(run.out / "hf_export")
    assert origin is not None and (origin.source, origin.step, origin.attempt) == ("final", 6, 0)
    assert not (run.out / "hf_export/training_args.bin").exists()
    steps = run.out / "checkpoints"
    final, fourth, sixth, base = loaded(
        run.out / "hf_export", steps / "checkpoint-4", steps / "checkpoint-6", shared / "tiny model"
    )
    assert final == sixth
    assert final["next"] != fourth["next"] and final["next"] != base["next"]


def rendered(lab: TrlLab, shared: Path) -> TrlRun:
    """A run like the unbroken one that has not started."""
    done = lab.tp("render", *sft_words(lab, shared), "--json")
    assert done.returncode == 0, done.stderr
    return TrlRun(Path(json.loads(done.stdout)["folder"]))


def run_to_end(lab: TrlLab, run: TrlRun) -> None:
    done = lab.tp("submit", "--run", run.folder.name)
    assert done.returncode == 0, done.stderr
    assert run.ended()["code"] == 0, run.log()


def test_a_cut_run_goes_on_from_its_last_complete_checkpoint_as_if_it_had_not_been(
    sft: tuple[TrlLab, TrlRun], shared: Path
) -> None:
    """As after a kill in the middle of saving: checkpoint-5 lacks its state, checkpoint-4 is whole."""
    lab, unbroken = sft
    run = rendered(lab, shared)
    whole, cut = (run.out / "checkpoints" / f"checkpoint-{step}" for step in (4, 5))
    shutil.copytree(unbroken.out / "checkpoints/checkpoint-4", whole)
    shutil.copytree(whole, cut, ignore=shutil.ignore_patterns("trainer_state.json"))
    (cut / "trainer_state.json.partial").write_text("{")
    run_to_end(lab, run)
    found, before = points(run), points(unbroken)
    assert sorted(found["train/loss"]) == [5, 6], "steps up to the checkpoint are not computed again"
    names = ("train/loss", "train/grad_norm", "train/learning_rate", "validation/loss")
    expected = {n: {s: pytest.approx(v, rel=1e-5) for s, v in of.items()} for n, of in before.items()}
    assert resumed(found, 4, *names) == resumed(expected, 4, *names)
    again, first = loaded(run.out / "hf_export", unbroken.out / "hf_export")
    assert again["next"] == pytest.approx(first["next"], abs=1e-3)


def test_a_run_that_was_cut_after_its_last_step_only_saves_its_model(
    sft: tuple[TrlLab, TrlRun], shared: Path
) -> None:
    lab, unbroken = sft
    run = rendered(lab, shared)
    shutil.copytree(unbroken.out / "checkpoints/checkpoint-6", run.out / "checkpoints/checkpoint-6")
    run_to_end(lab, run)
    assert "train/loss" not in points(run)
    weights = "hf_export/model.safetensors"
    assert (run.out / weights).read_bytes() == (unbroken.out / weights).read_bytes()
    origin = read_origin(run.out / "hf_export")
    assert origin is not None and (origin.source, origin.step) == ("final", 6)


def export(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The adapter's own export command, on this machine's Python."""
    root = str(Path(__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-m", "tuneplane.hf_export", out, *words],
        env={**OFFLINE, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_dpo_of_lora_weights_from_a_runs_export_and_their_export_merged(
    sft: tuple[TrlLab, TrlRun], shared: Path, tmp_path: Path
) -> None:
    _, before = sft
    lab = TrlLab(tmp_path, "trl/dpo", shared)
    words = lab.words("dpo.jsonl", "max_steps=3", "use_peft=true", "lora_r=4", "learning_rate=0.01", ranks=1)
    words[words.index("--model") + 1] = before.out / "hf_export"
    words[words.index("learning_rate=1e-3")] = "lora_target_modules=[all-linear]"
    run = lab.submit(*words)
    assert run.ended()["code"] == 0, run.log()
    assert {k: v for k, v in points(run).items() if not end_of_training(k)} == run.history("checkpoint-3")
    assert sorted(points(run)["train/reward_margin"]) == [1, 2, 3]
    assert (run.out / "adapter/adapter_model.safetensors").exists() and not (run.out / "hf_export").exists()
    done = export(run.out)
    assert done.returncode == 0, done.stderr
    merged, apart, base = loaded(run.out / "hf_export", run.out / "adapter", before.out / "hf_export")
    assert merged["next"] == pytest.approx(apart["next"], abs=2e-3) and merged["next"] != base["next"]
    assert "is the final model already" in export(run.out).stdout


def test_grpo_with_the_scaffolds_reward_stops_and_saves_when_asked(shared: Path, tmp_path: Path) -> None:
    """A stop in the middle leaves no model that looks final; an export takes the checkpoint."""
    lab = TrlLab(tmp_path, "trl/grpo", shared)
    words = lab.words("grpo.jsonl", "max_steps=3000", "num_generations=2", "max_completion_length=8", ranks=1)
    run = lab.submit(*words)
    wait_until(lambda: "train/reward" in points(run), "the first answers are rewarded", 100)
    done = lab.tp("job", "pause", run.folder.name)
    assert done.returncode == 0, done.stderr
    run.ended()
    assert "no final model is written" in run.log()
    assert not (run.out / "hf_export").exists()
    last = max(run.checkpoints(), key=lambda name: int(name.rpartition("-")[2]))
    found = {k: v for k, v in points(run).items() if not end_of_training(k)}
    assert found == run.history(last)
    assert {"rewards/near_length/mean", "train/reward", "train/completion_length"} <= set(found)
    assert export(run.out).returncode == 0
    origin = read_origin(run.out / "hf_export")
    assert origin is not None and origin.source == last
    (model,) = loaded(run.out / "hf_export")
    assert len(model["next"]) == 20
