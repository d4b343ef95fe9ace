"""What a user says to a catalog recipe, in config.yaml and by flags: named where it is wrong, all at once."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from warm_tp import run_tp

MANIFEST = """
schema: tuneplane/recipe/v1
id: toy/sum
version: 1.0.0
title: {en: Adds, zh: 求和}
adapter: custom
entrypoint: {kind: experiment, value: train.sh}
scaffold: custom/custom
observability: platform
parameters:
  learning_rate: {type: float, default: 1.0e-3, min: 0, max: 1, help: Step size}
  epochs: {type: int, default: 2, min: 1, help: Passes over the data}
  optim.name: {type: str, default: adamw, choices: [adamw, sgd], help: Optimiser}
bindings:
  model: {required: true, hub: true, help: the model to start from}
  train_data: {required: true, help: what to train on}
  validation_data: {help: what is held out}
metrics: {train/loss: [loss]}
runtime: {default_version: user-managed}
"""
TRAIN = 'cp "$TUNEPLANE_PARAMS_FILE" "$TUNEPLANE_OUT_DIR/params.json"\n'


class Lab:
    """A lab with one experiment of `toy/sum`, a recipe of the site."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.site = where / "site"
        (self.site / "recipe/toy").mkdir(parents=True)
        (self.site / "recipe/toy/sum.yaml").write_text(MANIFEST, encoding="utf-8")
        self.data = where / "data set"
        self.data.mkdir()
        self.tp("init", "lab", cwd=where)
        self.tp("new", "add", "--method", "toy/sum")
        self.folder = where / "lab/experiments/add"
        (self.folder / "train.sh").write_text(TRAIN)
        self.config("")

    def config(self, text: str) -> None:
        (self.folder / "config.yaml").write_text(text, encoding="utf-8")
        self.commit()

    def commit(self) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        for words in (["add", "-A"], [*who, "commit", "-qm", "x", "--allow-empty"]):
            subprocess.run(["git", *words], cwd=self.where / "lab", check=True, timeout=30)

    def tp(self, *words: str, cwd: Path | None = None) -> CompletedProcess[str]:
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.where),
            "TUNEPLANE_CONFIG_DIR": str(self.site),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        return run_tp(words, cwd=cwd or self.where / "lab", env=environ)

    def faults(self, *words: str) -> str:
        """What `tp validate` on this machine says, refusing."""
        done = self.tp("validate", "add", "--profile", "local:1", *words)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done
        return done.stderr

    def submitted(self, *words: str) -> Path:
        """The run folder of a submit on this machine, once it has ended well."""
        done = self.tp("submit", "add", "--profile", "local:1", "--json", *words)
        assert done.returncode == 0, done.stderr
        folder = Path(json.loads(done.stdout)["folder"])
        deadline = time.monotonic() + 60
        while not (folder / "attempts/0/end.json").exists():
            assert time.monotonic() < deadline, list(folder.rglob("*"))
            time.sleep(0.05)
        assert json.loads((folder / "attempts/0/end.json").read_text())["code"] == 0
        return folder


def make_model(folder: Path) -> None:
    """A folder that has all that a model has, without a single weight."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.mark.contract("C29")
@pytest.mark.contract("C30")
def test_every_wrong_value_of_file_and_flags_is_told_at_once_with_its_place_and_the_nearest_key(
    lab: Lab,
) -> None:
    lab.config("epochs: many\nlearning_rat: 1\n")
    said = lab.faults("--set", "lr=fast", "--set", "learning_rate=7", "--model", "/no/model")
    config = lab.folder / "config.yaml"
    assert f"{config}:1" in said and "many" in said and "epochs" in said
    assert f"{config}:2" in said and "learning_rate" in said
    assert "toy/sum has no parameter lr\n  → did you mean learning_rate?" in said
    assert "learning_rate: 7" in said and "Step size" in said
    assert "model '/no/model' is not there" in said and "--model" in said


def test_a_path_that_nothing_can_be_is_told_as_one_that_is_not_there(lab: Lab) -> None:
    link = lab.where / "link"
    link.symlink_to("nowhere")
    for path in ("~no-such-user/model", "/" + "m" * 300, str(link / "below")):
        said = lab.faults("--model", path, "--train-data", "talks.jsonl")
        assert f"--model: model '{path}' is not there" in said
        assert "train data 'talks.jsonl' is not there" in said
    assert f"model '{link}' is a link to 'nowhere', which is not there" in lab.faults("--model", str(link))
    lab.config('model: "/a\\0b"\n')
    assert "model '/a\\x00b' is not there" in lab.faults()


def test_a_file_of_data_that_is_not_there_is_taken_for_no_id_of_the_hub(lab: Lab) -> None:
    assert "model 'org/talks.jsonl.gz' is not there" in lab.faults("--model", "org/talks.jsonl.gz")


def test_a_binding_that_is_set_like_a_parameter_is_told_its_flag(lab: Lab) -> None:
    assert "toy/sum has no parameter train_data\n  → say --train-data PATH" in lab.faults(
        "--set", "train_data=/x"
    )


def test_one_fault_is_not_many(lab: Lab) -> None:
    assert "add: 1 fault\n" in lab.tp("validate", "add", "--profile", "local:1", "--set", "lr=1").stdout
    two = lab.tp("validate", "add", "--profile", "local:1", "--set", "lr=1", "--set", "x=1")
    assert "add: 2 faults\n" in two.stdout


@pytest.mark.contract("C5")
def test_flags_win_over_the_file_and_the_file_over_the_recipe(lab: Lab) -> None:
    lab.config(f"learning_rate: 0.5\noptim: {{name: sgd}}\ntrain_data: {lab.data}\n")
    folder = lab.submitted("--set", "learning_rate=0.25", "--model", "org/model-7b")
    spec = json.loads((folder / "job.json").read_text())["spec"]
    told = {"learning_rate": 0.25, "epochs": 2, "optim.name": "sgd"}
    assert spec["hyperparams"] == told
    assert json.loads((folder / "out/params.json").read_text()) == told
    assert spec["bindings"] == {"model": "org/model-7b", "train_data": str(lab.data)}
    assert spec["metrics"] == {"train/loss": ["loss"]}


def test_what_is_bound_by_a_relative_path_is_found_from_where_the_user_stands(lab: Lab) -> None:
    make_model(lab.data)
    folder = lab.submitted("--model", "../data set", "--train-data", f"{lab.data}/../data set")
    bound = json.loads((folder / "job.json").read_text())["spec"]["bindings"]
    assert {Path(path).resolve() for path in bound.values()} == {lab.data}


def test_data_that_only_a_folder_can_be_takes_no_id_of_the_hub(lab: Lab) -> None:
    said = lab.faults("--model", "org/model", "--train-data", "org/data")
    assert "train data 'org/data' is not there" in said and "'org/model'" not in said


def test_a_flag_that_is_missing_is_told_by_validate_and_refused_by_submit(lab: Lab) -> None:
    checked = lab.tp("validate", "add", "--profile", "local:1", "--model", "org/model")
    assert checked.returncode == 0, checked
    assert "not checked: train data: --train-data was not given" in checked.stdout
    refused = lab.tp("submit", "add", "--profile", "local:1")
    assert refused.returncode == 2
    assert "toy/sum needs --model: the model to start from" in refused.stderr
    assert "toy/sum needs --train-data: what to train on" in refused.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[1, 2]", "is not a mapping of parameters"),
        ("a: &x 1\nb: *x\n", "aliases are not used here"),
        ("epochs: 1\nepochs: 2\n", "stands twice"),
        ("model: [a]\n", "model is not text"),
        ("epochs: {much: 1}\n", "toy/sum has no parameter epochs.much"),
    ],
)
def test_a_config_that_is_not_one_is_told_with_its_line(lab: Lab, text: str, told: str) -> None:
    lab.config(text)
    said = lab.faults("--model", "org/m", "--train-data", str(lab.data))
    assert told in said and str(lab.folder / "config.yaml") in said


def test_a_config_that_git_ignores_is_not_in_the_job_and_so_refused(lab: Lab) -> None:
    (lab.where / "lab/.gitignore").write_text("config.yaml\n")
    subprocess.run(
        ["git", "rm", "-q", "--cached", "experiments/add/config.yaml"], cwd=lab.where / "lab", check=True
    )
    lab.commit()
    said = lab.faults("--model", "org/m", "--train-data", str(lab.data))
    assert "experiments/add/config.yaml is not in the commit" in said


def test_a_run_starts_from_the_weights_that_another_exported(lab: Lab) -> None:
    first = lab.submitted("--model", "org/m", "--train-data", str(lab.data))
    said = lab.faults("--init-from", f"run/{first.name}", "--train-data", str(lab.data))
    assert f"{first.name} has no hf_export" in said
    make_model(first / "out/hf_export")
    second = lab.submitted("--init-from", f"run/{first.name}", "--train-data", str(lab.data))
    bound = json.loads((second / "job.json").read_text())["spec"]["bindings"]
    assert bound["model"] == str(first / "out/hf_export")
    assert "--init-from: no run 'nope' of yours" in lab.faults("--init-from", "run/nope")
    both = lab.faults("--init-from", f"run/{first.name}", "--model", "org/m", "--train-data", str(lab.data))
    assert "--model and --init-from name two models" in both


def test_preflight_is_refused_where_there_are_no_ranks(lab: Lab) -> None:
    said = lab.faults("--preflight", "--model", "org/m", "--train-data", str(lab.data))
    assert "toy/sum is not started by torchrun" in said
