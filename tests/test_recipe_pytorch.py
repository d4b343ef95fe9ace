"""pytorch/image-classification as an adapter's whole commands, and what users say to it before the queue."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from test_recipe_adapters import facts
from warm_tp import run_tp

from tuneplane.node.ranks import launched
from tuneplane.packaged import packaged_configs
from tuneplane.recipes.adapters import NodeFacts, compile_command
from tuneplane.recipes.catalog import load_catalog

METHOD = "pytorch/image-classification"
RECIPE = load_catalog([packaged_configs()]).get(METHOD)
DEFAULTS = {parameter.name: parameter.default for parameter in RECIPE.parameters}

ARGUMENTS = """\
--train-data=/data/it's 花
--architecture=resnet18
--image-size=224
--color
--dropout=0.0
--augmentation=crop-and-flip
--num-workers=4
--batch-size=64
--epochs=30
--max-steps=0
--optimizer=sgd
--learning-rate=0.1
--momentum=0.9
--weight-decay=0.0001
--schedule=cosine
--warmup-steps=0
--decay-epochs=10
--decay-factor=0.1
--label-smoothing=0.0
--gradient-clip=0.0
--precision=fp32
--seed=0
--no-deterministic
--log-every-steps=10
--eval-every-steps=0
--checkpoint-every-steps=500
--keep-checkpoints=2"""


def node(nodes: int, rank: int) -> NodeFacts:
    return dataclasses.replace(
        facts(nodes, rank),
        entrypoint="/work 'x' $HOME/实验/experiments/a/train.py",
        params=DEFAULTS,
        bindings={"train_data": "/data/it's 花"},
    )


@pytest.mark.parametrize(("nodes", "rank"), [(1, 0), (4, 0), (4, 3)])
def test_train_py_gets_every_parameter_in_the_declared_order(nodes: int, rank: int) -> None:
    command = compile_command("pytorch", "train", node(nodes, rank))
    assert command.argv == ("/work 'x' $HOME/实验/experiments/a/train.py", *ARGUMENTS.splitlines())
    assert (command.launch, command.cwd) == ("torchrun", "/work 'x' $HOME/实验")
    assert (dict(command.env), dict(command.files), command.bridge) == ({}, {}, ())
    started = launched(command, node(nodes, rank), "/tmp/ranks")
    assert started.argv == (
        *("python3", "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--node-rank={rank}"),
        *("--nproc-per-node=8", "--rdzv-backend=static", "--master-addr=10.0.0.1", "--master-port=29500"),
        *("--max-restarts=0", "--log-dir=/tmp/ranks", "--tee=3", "-m", "tuneplane.bridge"),
        *command.argv,
    )


def test_values_of_every_kind_become_words_that_argparse_reads_as_they_were() -> None:
    given = {"flag": False, "names": ["a b", "-c"], "none": None, "rate": -1e-05, "text": "--x 'y'", "o.p": 1}
    command = compile_command("pytorch", "train", dataclasses.replace(node(1, 0), bindings={}, params=given))
    words = ["--no-flag", "--names", "a b", "-c", "--rate=-1e-05", "--text=--x 'y'", "--o.p=1"]
    assert list(command.argv[1:]) == words


def test_a_module_is_started_by_its_name() -> None:
    of = dataclasses.replace(node(1, 0), module=True, entrypoint="my.train", params={}, bindings={})
    assert compile_command("pytorch", "train", of).argv == ("-m", "my.train")


def test_every_word_of_the_manifest_is_there_in_both_languages() -> None:
    for one in (*RECIPE.parameters, *RECIPE.bindings):
        assert one.help.en and one.help.zh and one.help.en != one.help.zh, one.name
    assert all(parameter.group for parameter in RECIPE.parameters)
    assert RECIPE.observability == "platform" and RECIPE.binding("train_data").required  # type: ignore[union-attr]
    assert RECIPE.objective is not None and (RECIPE.objective.metric, RECIPE.objective.goal) == (
        "validation/accuracy",
        "maximize",
    )


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """A committed lab with an unedited experiment `cls`."""
    assert tp(tmp_path, "init", "lab").returncode == 0
    made = tp(tmp_path / "lab", "new", "cls", "--method", METHOD)
    assert made.returncode == 0, made.stderr
    commit(tmp_path / "lab")
    return tmp_path / "lab"


def make(data: Path, *more: str) -> Path:
    """Two classes in both parts, and further files."""
    for path in ("train/a/1.png", "train/b/1.png", "validation/a/1.png", "validation/b/1.png", *more):
        (data / path).parent.mkdir(parents=True, exist_ok=True)
        (data / path).touch()
    return data


def commit(lab: Path) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["add", "-A"], [*who, "commit", "-qm", "x", "--allow-empty"]):
        subprocess.run(["git", *words], cwd=lab, check=True, timeout=30)


def tp(where: Path, *words: str) -> CompletedProcess[str]:
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(where.parent),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    return run_tp(words, cwd=where, env=environ)


@pytest.mark.contract("C1")
def test_an_unedited_experiment_has_nothing_wrong_and_its_config_counts(lab: Path) -> None:
    names = {"train.py", "data.py", "models.py", "config.yaml", "README.md", "recipe.lock.json"}
    assert {path.name for path in (lab / "experiments/cls").iterdir()} == names
    assert "{{" not in (lab / "experiments/cls/config.yaml").read_text()
    make(lab.parent / "data")
    words = ("cls", "--profile", "local:1", "--train-data", str(lab.parent / "data"))
    checked = tp(lab, "validate", *words)
    assert checked.returncode == 0, checked
    made = tp(lab, "render", *words, "--set", "epochs=3", "--json")
    assert made.returncode == 0, made
    spec = json.loads((Path(json.loads(made.stdout)["folder"]) / "job.json").read_text())["spec"]
    assert spec["hyperparams"] == {**DEFAULTS, "precision": "bf16", "warmup_steps": 100, "epochs": 3}
    assert list(spec["hyperparams"]) == list(DEFAULTS), "as declared: so are the arguments"
    assert spec["launch"] == "torchrun" and spec["bindings"] == {"train_data": str(lab.parent / "data")}


@pytest.mark.contract("C29")
def test_what_is_wrong_is_told_at_once_with_the_nearest_key(lab: Path) -> None:
    config = lab / "experiments/cls/config.yaml"
    config.write_text("architecture: resnet81\nbatchsize: 8\n")
    commit(lab)
    words = (
        "--set",
        "lr=fast",
        "--set",
        "learning_rte=1e-4",
        "--set",
        "dropout=2",
        "--train-data",
        "/no/data",
    )
    said = tp(lab, "validate", "cls", "--profile", "local:1", *words)
    assert said.returncode == 2 and "Traceback" not in said.stderr
    assert len([line for line in said.stderr.splitlines() if not line.startswith("  ")]) == 6, said.stderr
    for told in (
        f"{config}:1",
        "resnet18",
        f"{config}:2",
        "batch_size",
        f"{METHOD} has no parameter lr",
        "learning_rate",
        "dropout: 2",
        "train data '/no/data' is not there",
    ):
        assert told in said.stderr, told


@pytest.mark.contract("C30")
def test_data_is_looked_at_before_the_queue(lab: Path) -> None:
    def told(data: Path) -> str:
        said = tp(lab, "validate", "cls", "--profile", "local:1", "--train-data", str(data))
        assert said.returncode == 2 and "Traceback" not in said.stderr, said
        return said.stderr

    flat = lab.parent / "flat"
    (flat / "train").mkdir(parents=True)
    said = told(flat)
    assert f"{flat}/train: train data has no class" in said and "each class is a folder in it" in said
    assert f"{flat}: train data has no readable folder validation: No such file or directory" in said
    assert "it holds train/<class>/*, validation/<class>/*" in said
    other = make(lab.parent / "other", "train/c d/1.png", "validation/ü/1.png", "train/.cache/x")
    said = told(other)
    assert f"{other}: train data has class 'c d' in train and not in validation" in said
    assert "train data has class 'ü' in validation and not in train" in said and ".cache" not in said
    empty = make(lab.parent / "empty")
    for part in ("train", "validation"):
        (empty / part / "a").rename(empty / part / "z")
        (empty / part / "a").mkdir()
    said = told(empty)
    assert f"{empty}/train: train data has nothing of class 'a'" in said and f"{empty}/validation: " in said
    assert "has no readable folder train: Not a directory" in told(empty / "train/b/1.png")
