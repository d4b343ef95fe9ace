"""What `tp validate` and `tp submit` tell of a TRL experiment before the queue: all that is wrong, and where."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_data_check import make_model, written
from trl_lab import TrlLab

TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of files that are well-formed, and data for each method."""
    folder = tmp_path_factory.mktemp("shared files")
    make_model(folder / "tiny model")
    written(folder / "sft.jsonl", [TALK] * 3)
    written(folder / "held [out].jsonl", [TALK])
    written(folder / "dpo.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 3)
    written(folder / "grpo.jsonl", [{"prompt": "a"}] * 3)
    return folder


@pytest.fixture(scope="module")
def lab(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> TrlLab:
    return TrlLab(tmp_path_factory.mktemp("lab"), "trl/sft", shared)


def bound(lab: TrlLab, model: str | Path, data: str | Path, *words: str | Path) -> list[str | Path]:
    return ["chat", "--profile", "local:2", "--model", model, "--train-data", data, *words]


def refusal(lab: TrlLab, *words: str | Path, command: str = "validate") -> str:
    done = lab.tp(command, *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    return done.stderr


@pytest.mark.contract("C29")
@pytest.mark.contract("C30")
@pytest.mark.parametrize("command", ["validate", "submit"])
def test_wrong_parameters_a_missing_model_and_data_without_its_columns_are_told_at_once(
    lab: TrlLab, tmp_path: Path, command: str
) -> None:
    data = written(tmp_path / "wrong data.jsonl", [{"mesages": TALK["messages"]}] * 3)
    sets = ("learning_rate=fast", "learning_rte=1e-4", "lr=1e-4", "warmup_steps=-1", "optim=adamm")
    words = bound(lab, tmp_path / "no model", data, *(w for s in sets for w in ("--set", s)))
    told = refusal(lab, *words, command=command)
    assert re.search(r"--set learning_rate=fast: learning_rate: fast is text, not float", told)
    assert re.search(r"trl/sft has no parameter learning_rte\s+→ did you mean learning_rate", told)
    assert "trl/sft has no parameter lr" in told
    assert "warmup_steps: -1.0 is below the smallest value 0" in told
    assert "optim: adamm is none of adamw_torch_fused" in told
    assert f"model '{tmp_path}/no model' is not there" in told
    assert f"{data}:1" in told and "has no columns messages; or prompt and completion; or text" in told
    assert "rename mesages → messages?" in told


@pytest.mark.contract("C29")
def test_bad_rows_are_named_by_file_and_line_and_a_cut_off_model_too(
    lab: TrlLab, shared: Path, tmp_path: Path
) -> None:
    data = written(tmp_path / "a.jsonl", [TALK, {"messages": []}, TALK, {"messages": "x"}])
    weights = make_model(tmp_path / "m") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    told = refusal(lab, *bound(lab, tmp_path / "m", data, "--validation-data", tmp_path / "a.jsonl"))
    assert told.count(f"{data}:2") == 2, "of the training data, and of the validation data"
    assert f"{data}:4" in told and "messages is text, not a list of messages with role and content" in told
    assert "model model.safetensors is cut off" in told


def test_what_is_right_passes_and_is_compiled_whole(lab: TrlLab, shared: Path) -> None:
    lab_words = lab.words("sft.jsonl")
    done = lab.tp("validate", *lab_words, "--validation-data", shared / "held [out].jsonl")
    assert done.returncode == 0, done.stderr
    done = lab.tp("render", *lab_words, "--json")
    assert done.returncode == 0, done.stderr
    spec = json.loads((Path(json.loads(done.stdout)["folder"]) / "job.json").read_text())["spec"]
    assert spec["recipe"]["name"] == "trl/sft" and spec["launch"] == "torchrun"
    assert (spec["entrypoint_kind"], spec["entrypoint"]) == ("module", "trl.scripts.sft")
    assert spec["bindings"] == {"model": f"{shared}/tiny model", "train_data": f"{shared}/sft.jsonl"}
    assert spec["hyperparams"]["learning_rate"] == 1e-3  # the flag, over config.yaml
    assert spec["hyperparams"]["lr_scheduler_type"] == "cosine"  # config.yaml, over the recipe
    assert spec["hyperparams"]["weight_decay"] == 0.0  # the recipe


@pytest.mark.parametrize("method", ["trl/sft", "trl/dpo", "trl/grpo"])
def test_a_new_experiment_needs_a_model_and_data_and_nothing_else(
    tmp_path: Path, shared: Path, method: str
) -> None:
    lab = TrlLab(tmp_path, method, shared)
    done = lab.tp("new", "again", "--method", method)
    assert "next: write experiments/again/config.yaml, git add -A" in done.stdout
    lab.commit()
    assert {p.name for p in lab.folder.iterdir()} == {
        *("config.yaml", "README.md", "recipe.lock.json"),
        *(["rewards.py"] if method == "trl/grpo" else []),
    }
    told = refusal(lab, "chat", "--profile", "local:2", command="submit")
    assert "needs --model" in told and "needs --train-data" in told and "learning_rate" not in told
    data = shared / f"{method[4:]}.jsonl"
    done = lab.tp("validate", *bound(lab, shared / "tiny model", data))
    assert done.returncode == 0, done.stderr


def test_parameters_that_do_not_fit_the_ranks_are_told(tmp_path: Path, shared: Path) -> None:
    lab = TrlLab(tmp_path, "trl/grpo", shared)
    words = bound(lab, shared / "tiny model", shared / "grpo.jsonl")
    told = refusal(lab, *words, "--set", "num_generations=6", "--set", "reward_funcs=[acuracy]")
    assert (
        "num_generations=6 does not divide the completions of a round, 2 ranks × 8 samples × 1 batches"
        in told
    )
    assert "acuracy is no reward function of TRL" in told


@pytest.mark.contract("C29")
def test_offline_what_the_cache_does_not_hold_is_refused_with_the_way_to_fetch_it(
    tmp_path: Path, shared: Path
) -> None:
    lab = TrlLab(tmp_path, "trl/sft", shared)
    told = refusal(lab, *bound(lab, "org/model", "org/talks"))
    assert "the site is offline (HF_HUB_OFFLINE) and names no HF_HOME" in told
    home = tmp_path / "hf"
    (home / "hub").mkdir(parents=True)
    with (lab.site / "site/default.yaml").open("a") as site:
        site.write(f"  HF_HOME: {home}\n")
    told = refusal(lab, *bound(lab, "org/model", "org/My-Talks"))
    assert f"model org/model is not in {home}/hub, and the site is offline" in told
    assert f"HF_HOME={home} hf download org/model" in told
    assert f"data set org/My-Talks is not in {home}/datasets" in told
    snapshot = home / "hub/models--org--model/snapshots/abc"
    make_model(snapshot)
    (home / "hub/models--org--model/refs").mkdir()
    (home / "hub/models--org--model/refs/main").write_text("abc")
    (home / "datasets/org___my-talks/default/0.0.0/1234").mkdir(parents=True)
    done = lab.tp("validate", *bound(lab, "org/model", "org/My-Talks"))
    assert done.returncode == 0, done.stderr
    (snapshot / "model.safetensors").write_bytes(b"")
    assert "model.safetensors is empty" in refusal(lab, *bound(lab, "org/model", "org/My-Talks"))


def test_looking_at_data_imports_nothing_heavy() -> None:
    code = (
        "import tuneplane.data.check, sys; print(*{'yaml', 'hydra', 'pyarrow', 'torch'} & set(sys.modules))"
    )
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": os.defpath, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == ""
