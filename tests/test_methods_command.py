"""`tp methods` shows a method so that its user needs no other page; `tp recipe` tells what a changed one means."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from test_recipe_catalog import FULL, site
from test_recipe_lock import MANIFEST

from tuneplane.cli.main import cli
from tuneplane.cli.method_page import wrapped
from tuneplane.cli.methods import language_of
from tuneplane.cli.show import columns_of

pytestmark = pytest.mark.timeout(60)

Tp = Callable[..., Result]


@pytest.fixture
def tp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tp:
    """`tp` with the configuration of a site in `tmp_path`, in a locale that says nothing of a language."""
    monkeypatch.setenv("TUNEPLANE_CONFIG_DIR", str(tmp_path))
    for name in ("LC_ALL", "LC_MESSAGES", "LANG", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def call(*words: str) -> Result:
        return CliRunner().invoke(cli, list(words), standalone_mode=False)

    return call


def shown(tp: Tp, *words: str) -> str:
    done = tp("methods", *words)
    assert done.exception is None, done.exception
    return done.stdout


def test_a_method_s_page_says_all_that_its_manifest_declares_in_80_columns(tmp_path: Path, tp: Tp) -> None:
    site(tmp_path, "demo/classify", FULL)
    page = shown(tp, "demo/classify")
    assert max(map(columns_of, page.splitlines())) <= 80 + len("sha256:") + 12  # a digest stays whole
    lines = [" ".join(line.split()) for line in page.splitlines()]
    for line in (
        "method demo/classify 2.3.1",
        "title Classify",
        "about Folders of classes",
        "entry train.py, in the experiment's folder",
        "metrics go to the platform",
        "operations train",
        "objective maximize validation/accuracy",
        "plugins needs opsd-patch",
        "parameters, optimizer",
        "PARAMETER TYPE DEFAULT VALUES",
        "learning_rate float 0.0001 0 to 1 (per step)",
        "Step size",
        "goes to argv:--lr",
        "optimizer.name str adam adam | sgd",
        "epochs int required at least 1",
        "sizes list[int] [1, 2] at most 64",
        "seed int null",
        "--train-data required a path Data",
        "train/loss loss, train_loss",
        "events tensorboard tb/*",
        "points jsonl, step in step points.jsonl",
        "checkpoints artifact checkpoints/* (every run)",
        "2.13 torch-2.13 (default)",
        "needs torch==2.13.0",
        "image docker.io/pytorch/pytorch:2.13.0 (not checked against a registry)",
        "pinned to sha256:" + "0" * 64,
        "2.12 torch-2.12",
        "image none pinned: the site's, or --image",
    ):
        assert line in lines, f"{line!r} is not in\n{page}"
    assert "分类" not in page


def test_the_columns_that_data_must_have_are_shown(tmp_path: Path, tp: Tp) -> None:
    columns = "{required: true, columns: [[messages], [prompt, completion]],"
    site(tmp_path, "demo/classify", FULL.replace("train_data: {required: true,", f"train_data: {columns}"))
    assert "(columns: messages | prompt, completion)" in " ".join(shown(tp, "demo/classify").split())


def test_every_published_method_fits_its_page(tp: Tp) -> None:
    for method in json.loads(tp("methods", "--json").stdout):
        for language in ("en", "zh"):
            lines = shown(tp, method["id"], "--lang", language).splitlines()
            assert [line for line in lines if columns_of(line) > 80 and "sha256:" not in line] == []


def test_parameters_stand_below_the_heading_of_their_group(tmp_path: Path, tp: Tp) -> None:
    site(tmp_path, "demo/classify", FULL)
    lines = shown(tp, "demo/classify").splitlines()
    of_group = lines[lines.index("parameters, optimizer") : lines.index("parameters")]
    assert any("learning_rate" in line for line in of_group)
    assert not any("epochs" in line for line in of_group)


@pytest.mark.parametrize(
    ("environ", "language"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_TW"}, "zh"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": ""}, "zh"),
    ],
)
def test_the_language_is_that_of_the_locale(environ: dict[str, str], language: str) -> None:
    assert language_of(environ) == language


def test_a_chinese_locale_reads_chinese_unless_told_otherwise(
    tmp_path: Path, tp: Tp, monkeypatch: pytest.MonkeyPatch
) -> None:
    site(tmp_path, "demo/classify", FULL)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    page = shown(tp, "demo/classify")
    assert all(words in page for words in ("分类", "按目录分类", "步长", "数据"))
    assert "Step size" not in page and "Folders of classes" not in page
    assert ["demo/classify", "2.3.1", "分类"] in [line.split() for line in shown(tp).splitlines()]
    assert "Step size" in shown(tp, "demo/classify", "--lang", "en")
    monkeypatch.delenv("LANG")
    assert "步长" in shown(tp, "demo/classify", "--lang", "zh")


def test_a_method_with_free_parameters_says_so(tp: Tp) -> None:
    page = shown(tp, "custom/custom")
    assert "parameters: any --set is taken" in page and "the image is yours, by --image" in page
    assert "to your own tracker, at --observability-url" in " ".join(page.split())


def test_a_broken_manifest_hides_no_other_method(tmp_path: Path, tp: Tp) -> None:
    site(tmp_path, "demo/classify", FULL.replace("adapter: custom", "adapter: nobody"))
    done = tp("methods")
    assert done.exception is None and "custom/custom" in done.stdout and "demo/classify" not in done.stdout
    assert "demo/classify is left out" in done.stderr and "there is no adapter nobody" in done.stderr
    told = {each["id"] for each in json.loads(tp("methods", "--json").stdout)}
    assert "custom/custom" in told and "demo/classify" not in told
    refused = tp("methods", "demo/classify")
    assert "there is no adapter nobody" in str(refused.exception)


def test_words_of_a_site_cannot_move_the_cursor(tmp_path: Path, tp: Tp) -> None:
    site(tmp_path, "demo/classify", FULL.replace("en: Step size", 'en: "Step\\e[2Jsize"'))
    assert "\x1b" not in shown(tp, "demo/classify")


@given(st.text(alphabet=st.sampled_from("ab 步，_/-.é\U0001f600"), max_size=80), st.integers(2, 30))
def test_a_wrapped_text_fits_and_loses_nothing_but_spaces(text: str, width: int) -> None:
    lines = wrapped(text, width)
    assert all(columns_of(line) <= width for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_a_long_name_is_broken_behind_a_separator() -> None:
    assert wrapped("cosine_with_restarts", 14) == ["cosine_with_", "restarts"]
    assert wrapped("训练数据，或其文件夹", 10) == ["训练数据，", "或其文件夹"]


# Locks


@pytest.fixture
def lab(tmp_path: Path, tp: Tp, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment of a site's method, and one of custom."""
    (tmp_path / "recipe" / "demo").mkdir(parents=True)
    (tmp_path / "recipe" / "demo" / "train.yaml").write_text(MANIFEST)
    for words in (("init", str(tmp_path / "lab")),):
        assert tp(*words).exception is None
    monkeypatch.chdir(tmp_path / "lab")
    for name, method in (("mine", "demo/train"), ("own", "custom/custom")):
        done = tp("new", name, "--method", method)
        assert done.exception is None, done.exception
    return tmp_path / "lab"


def publish(lab: Path, *changes: tuple[str, str]) -> None:
    text = MANIFEST
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (lab.parent / "recipe" / "demo" / "train.yaml").write_text(text)


def states(tp: Tp) -> dict[str, list[str]]:
    lines = tp("recipe", "status").stdout.splitlines()[1:]
    return {line.split()[0]: line.split(None, 4)[3:] for line in lines}


@pytest.mark.contract("C3")
def test_status_says_what_the_state_of_a_lock_means(lab: Path, tp: Tp) -> None:
    for name in ("mine", "own"):
        assert states(tp)[name] == ["current", "made against the catalog of today"]
    publish(lab, ("default: 0.1", "default: 0.2"))
    told = states(tp)["mine"]
    assert told == ["admitted", "the recipe changed since, but nothing that this experiment uses"]
    publish(lab, ("default: 0.1", "default: 0.2"), ("1.2.0", "1.3.0"))
    told = states(tp)["mine"]
    assert told == ["admitted", "the catalog has 1.3.0, and all that this experiment uses is unchanged"]
    publish(lab, ("epochs:", "passes:"))
    done = tp("recipe", "status")
    assert "refused  cannot be submitted: 1 reason below" in done.stdout
    assert "the parameter epochs is gone from demo/train" in done.stderr


@pytest.mark.contract("C3")
def test_an_upgrade_tells_what_changed_in_the_recipe_not_in_its_digests(lab: Path, tp: Tp) -> None:
    publish(
        lab,
        ("version: 1.2.0", "version: 2.0.0"),
        ("learning_rate: {type: float, default: 0.1,", "learning_rate: {type: float, default: 0.2,"),
        ("epochs: {type: int, default: 1, help: How long}", "steps: {type: int, help: How long}"),
        ('default_version: "2"', 'default_version: "1"'),
        (
            "observability",
            '  warm up: {type: bool, default: null, help: "?"}\nobservability'.replace("warm up", "warm"),
        ),
    )
    dry = tp("recipe", "upgrade", "mine", "--dry-run").stdout
    assert dry.splitlines() == [
        "mine: demo/train 2.0.0",
        "  version: 1.2.0 -> 2.0.0",
        "  runtime: demo 2 demo-2 -> demo 1 demo-1",
        "  default of learning_rate: 0.1 -> 0.2",
        "  parameter added: steps (int, needs a value)",
        "  parameter added: warm (bool, default null)",
        "  parameter gone: epochs",
        "  nothing was written (--dry-run)",
    ]
    done = tp("recipe", "upgrade", "mine").stdout
    assert done.splitlines()[:-1] == dry.splitlines()[:-1] and "commit it" in done
    assert tp("recipe", "upgrade").stdout.splitlines() == [
        "mine: nothing to change, the lock is current",
        "own: nothing to change, the lock is current",
    ]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("epochs: {type: int,", "epochs: {type: float,", "parameter epochs: int -> float"),
        ("epochs: {type: int, default: 1,", "epochs: {type: int,", "epochs needs a value now, its default was 1"),
        ("help: How far", "help: How far it goes", "of the recipe's words, ranges,"),
        ("default: 1,", "default: null,", "default of epochs: 1 -> null"),
        ("platform\n", 'platform\nrequires: {core: ">=0.1"}\n', "needs tuneplane: any -> >=0.1"),
    ],
)  # fmt: skip
def test_each_kind_of_change_has_its_sentence(lab: Path, tp: Tp, old: str, new: str, told: str) -> None:
    publish(lab, (old, new))
    assert told in tp("recipe", "upgrade", "mine", "--dry-run").stdout


def test_a_lock_that_cannot_be_read_is_written_anew_and_says_so(lab: Path, tp: Tp) -> None:
    lock = lab / "experiments" / "mine" / "recipe.lock.json"
    value = json.loads(lock.read_text())
    del value["framework"]
    lock.write_text(json.dumps(value))
    assert "what it was made against is not known" in tp("recipe", "upgrade", "mine").stdout
    assert states(tp)["mine"][0] == "current"


def test_a_lock_of_the_older_form_is_read_and_tells_no_defaults(lab: Path, tp: Tp) -> None:
    lock = lab / "experiments" / "mine" / "recipe.lock.json"
    value = json.loads(lock.read_text())
    value["bindings"]["params"] = {"learning_rate": "float", "epochs": "int"}
    lock.write_text(json.dumps(value))
    publish(lab, ("default: 0.1", "default: 0.2"))
    done = tp("recipe", "upgrade", "mine").stdout
    assert "default of" not in done and "wrote" in done
