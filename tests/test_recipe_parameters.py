"""`--set` and config.yaml against what a recipe declares: every fault at once, and values as users meant them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuneplane.kernel.errors import Fault, UsageError
from tuneplane.packaged import packaged_configs
from tuneplane.recipes.catalog import load_catalog
from tuneplane.recipes.documents import scalar
from tuneplane.recipes.parameters import (
    check_parameters,
    ignored_bindings,
    overrides_of,
    parse_set,
    parse_sets,
)
from tuneplane.recipes.recipe import Recipe

MANIFEST = """\
schema: tuneplane/recipe/v1
id: demo/train
version: 1.0.0
title: Demo
adapter: custom
entrypoint: {kind: experiment, value: train.sh}
scaffold: custom/custom
parameters:
  learning_rate: {type: float, default: 1e-3, min: 0, max: 1, help: How far a step goes}
  optimizer.name: {type: str, default: adam, choices: [adam, sgd], help: Which}
  epochs: {type: int, min: 1, help: Passes over the data}
  warmup: {type: int, default: 0, unit: seconds, help: Before the first step}
  amp: {type: bool, default: true, help: Mixed precision}
  tag: {type: str, default: null, help: Any text}
  sizes: {type: "list[int]", default: [1], max: 64, help: Sizes}
bindings:
  model: {help: Where weights come from}
observability: platform
runtime: {default_version: user-managed}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    root = tmp_path_factory.mktemp("site")
    (root / "recipe" / "demo").mkdir(parents=True)
    (root / "recipe" / "demo" / "train.yaml").write_text(MANIFEST)
    return load_catalog([root]).get("demo/train")


@pytest.fixture(scope="module")
def custom() -> Recipe:
    return load_catalog([packaged_configs()]).get("custom/custom")


def submit(recipe: Recipe, *sets: str) -> tuple[list[Fault], dict[str, Any]]:
    faults, overrides = parse_sets(sets)
    more, values = check_parameters(recipe, overrides)
    return [*faults, *more], values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        (".5", 0.5),
        ("-3", -3),
        ("1_000", 1000),
        ("true", True),
        ("False", False),
        ("null", None),
        ("NULL", None),
        ("", ""),
        ("yes", "yes"),
        ("on", "on"),
        ("~", "~"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("1,2", "1,2"),
        ("a=b=c", "a=b=c"),
        ("hello: world", "hello: world"),
        ("x # y", "x # y"),
        ("*.txt", "*.txt"),
        ("&a", "&a"),
        ("!tag x", "!tag x"),
        ("- a", "- a"),
        ("${oc.env:HOME}", "${oc.env:HOME}"),
        ("https://h/x?a=1&b=2#c", "https://h/x?a=1&b=2#c"),
        ("  padded ", "padded"),
        ("two\nlines", "two\nlines"),
        ("实验", "实验"),
        ("'1e-4'", "1e-4"),
        ('"null"', "null"),
        ('"a\\tb"', "a\tb"),
        ("''", ""),
        ("[1e-4, 2, x y, true, null, '3']", [1e-4, 2, "x y", True, None, "3"]),
        ("[]", []),
        ("{}", {}),
        ("[{a: 1}]", [{"a": 1}]),
    ],
)
def test_a_value_means_what_its_writer_meant(custom: Recipe, text: str, value: object) -> None:
    faults, values = submit(custom, f"key={text}")
    assert (faults, values) == ([], {"key": value})
    assert type(values["key"]) is type(value)
    assert json.loads(json.dumps(values)) == values


NUMBERS_AND_WORDS = st.one_of(
    st.from_regex(r"[+-]?[0-9_.]{1,6}([eE][+-]?[0-9_]{1,3})?", fullmatch=True),
    st.sampled_from(
        ["true", "TRUE", "False", "null", "Null", "yes", "no", "off", "inf", "-inf", "NaN", "+nan"]
    ),
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,6}", fullmatch=True),
)


@settings(max_examples=300, deadline=None)
@given(NUMBERS_AND_WORDS)
def test_scalars_are_those_of_hydra_itself(text: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    theirs = OverridesParser.create().parse_override(f"key={text}").value()
    ours = scalar(text)
    assert type(ours) is type(theirs)
    assert repr(ours) == repr(theirs)  # nan is not equal to itself


def test_a_dotted_key_is_flat_and_a_mapping_becomes_so(custom: Recipe) -> None:
    faults, values = submit(custom, "opt.lr=1", "model={hidden: 8, act: {name: relu}, none: {}}", "x-y.0.z=2")
    assert faults == []
    assert values == {
        "opt.lr": 1,
        "model.hidden": 8,
        "model.act.name": "relu",
        "model.none": {},
        "x-y.0.z": 2,
    }


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        ("lr", "has no =", "KEY=VALUE"),
        ("", "has no =", "KEY=VALUE"),
        ("=3", "has no key", "words joined by dots"),
        ("+lr=3", "'+lr' is not a key", "write --set lr="),
        ("~lr=", "'~lr' is not a key", "write --set lr="),
        (" lr =3", "' lr ' is not a key", "write --set lr="),
        (".lr=3", "is not a key", "words joined by dots"),
        ("lr.=3", "is not a key", "words joined by dots"),
        ("a..b=3", "is not a key", "words joined by dots"),
        ("a b=3", "is not a key", "words joined by dots"),
        ("a/b=3", "is not a key", "words joined by dots"),
        ("lr\n=3", "is not a key", "write --set lr="),
        ("实=3", "is not a key", "words joined by dots"),
        ("x=[1, 2", "YAML", ""),
        ("x=[1] 2", "YAML", ""),
        ("x='a' b", "YAML", ""),
        ("x='a': b", "is not one str", "quotes"),
        ("x=[a]: b", "a key is a single word", ""),
        ("x={a: 1, a: 2}", "stands twice", ""),
        ("x={a b: 1}", "is not a key", ""),
        ("x=[*a]", "aliases", ""),
        ("x=[!!python/name:os.system '']", "tag", ""),
        ("x=nan", "not a finite number", "quotes"),
        ("x=-inf", "not a finite number", "quotes"),
        ("x=1e999", "not a finite number", "quotes"),
        ("x=[1, [inf]]", "not a finite number", "quotes"),
        ("x=9223372036854775808", "does not fit in 64 bits", "quotes"),
        ("x=" + "9" * 5000, "digits", "quotes"),
        ("x=" + "[" * 5000, "nested too deeply", ""),
        ("x=\udce9", "is not UTF-8", ""),
        ("x=['\udce9']", "", ""),
    ],
)
def test_a_set_that_cannot_be_understood_names_itself(text: str, what: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_set(text)
    fault = caught.value.faults[0]
    assert what in fault.what and remedy in fault.remedy
    assert fault.where.startswith("--set ") and len(fault.where) < 80
    assert fault.where.isprintable()


def test_integers_of_64_bits_are_taken(custom: Recipe) -> None:
    values = submit(custom, "a=9223372036854775807", "b=-9223372036854775807")[1]
    assert values == {"a": 2**63 - 1, "b": -(2**63) + 1}


def test_every_bad_set_is_told_at_once_and_a_key_given_twice_too() -> None:
    faults, overrides = parse_sets(["lr", "=1", "a=1", "a=2", "b={c: 1}", "b.c=2", "x=nan"])
    assert [o.key for o in overrides] == ["a", "b.c"]
    assert [f.what for f in faults] == [
        "has no =",
        "has no key",
        "a was given by --set a=1 already",
        "b.c was given by --set b={c: 1} already",
        "nan is not a finite number, and JSON has no word for it",
    ]


def test_a_key_cannot_be_a_value_and_a_group(custom: Recipe) -> None:
    faults, _ = submit(custom, "a=1", "a.b.c=2")
    assert [f.what for f in faults] == ["a cannot have a value and be the group of a.b.c"]


@pytest.mark.contract("C29")
def test_custom_takes_any_key(custom: Recipe) -> None:
    faults, values = submit(custom, "anything.at-all=1", "__proto__=x", "learning_rate=fast")
    assert faults == []
    assert values == {"anything.at-all": 1, "__proto__": "x", "learning_rate": "fast"}


@pytest.mark.contract("C29")
def test_an_undeclared_key_or_a_wrong_value_is_told_with_the_nearest_all_at_once(recipe: Recipe) -> None:
    faults, _ = submit(
        recipe, "learning_rte=1e-4", "learning_rate=fast", "sizes=[1, 65]", "epochs=0", "amp=yes"
    )
    assert [f.what for f in faults] == [
        "demo/train has no parameter learning_rte",
        "learning_rate: fast is text, not float",
        "sizes: 65 is above the largest value 64",
        "epochs: 0 is below the smallest value 1",
        "amp: yes is text, not bool",
    ]
    assert faults[0].remedy.startswith("did you mean learning_rate?")
    assert faults[0].where == "--set learning_rte=1e-4"


def test_defaults_are_filled_in_and_a_parameter_without_one_is_asked_for(recipe: Recipe) -> None:
    faults, values = submit(recipe)
    assert [f.what for f in faults] == ["demo/train needs a value for epochs"]
    assert "--set epochs=… (int: Passes over the data)" in faults[0].remedy
    assert values == {
        "learning_rate": 0.001,
        "optimizer.name": "adam",
        "warmup": 0,
        "amp": True,
        "tag": None,
        "sizes": [1],
    }
    assert submit(recipe, "epochs=3")[0] == []


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("learning_rate=1", "learning_rate", 1.0),
        ("tag=007", "tag", "007"),
        ("tag=1e3", "tag", "1e3"),
        ("tag=true", "tag", "true"),
        ("tag=null", "tag", None),
        ("tag='null'", "tag", "null"),
        ("optimizer={name: sgd}", "optimizer.name", "sgd"),
        ("sizes=[]", "sizes", []),
    ],
)
def test_a_value_becomes_what_the_parameter_is(recipe: Recipe, text: str, key: str, value: object) -> None:
    faults, values = submit(recipe, "epochs=1", text)
    assert faults == []
    assert values[key] == value and type(values[key]) is type(value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("warmup=1.5", "warmup: 1.5 is a float, not int"),
        ("warmup=true", "warmup: True is a bool, not int"),
        ("learning_rate=null", "learning_rate: null is not float"),
        ("learning_rate=[1]", "learning_rate: [1] is a list, not float"),
        ("amp=1", "amp: 1 is an int, not bool"),
        ("sizes=3", "sizes: 3 is an int, not list[int]: write it in [ ]"),
        ("sizes=[1, x]", "sizes: x is text, not int"),
        ("sizes=[null]", "sizes: None is null, not int"),
        ("optimizer.name=lion", "optimizer.name: lion is none of adam, sgd"),
    ],
)
def test_a_value_of_the_wrong_type_is_told(recipe: Recipe, text: str, what: str) -> None:
    assert [f.what for f in submit(recipe, "epochs=1", text)[0]] == [what]


def test_the_unit_of_a_parameter_is_told_with_the_fault(recipe: Recipe) -> None:
    assert submit(recipe, "epochs=1", "warmup=soon")[0][0].remedy == "Before the first step (in seconds)"


def test_a_config_file_is_checked_like_flags_and_flags_win(recipe: Recipe) -> None:
    file = overrides_of(
        {"epochs": 2, "optimizer": {"nam": "sgd"}, "warmup": "x"}, "experiments/a/config.yaml"
    )
    faults, values = check_parameters(recipe, [*file, *parse_set("epochs=5")])
    assert values["epochs"] == 5
    assert [(f.where, f.what) for f in faults] == [
        ("experiments/a/config.yaml: optimizer.nam", "demo/train has no parameter optimizer.nam"),
        ("experiments/a/config.yaml: warmup", "warmup: x is text, not int"),
    ]
    assert "optimizer.name" in faults[0].remedy


@pytest.mark.parametrize("value", [float("nan"), 2**70, "\udce9", {"a": float("inf")}, [2**70]])
def test_what_json_cannot_hold_is_refused_from_a_file_too(custom: Recipe, value: Any) -> None:
    faults, values = check_parameters(custom, overrides_of({"x": value}, "config.yaml"))
    assert len(faults) == 1 and values == {}


def test_flags_that_a_recipe_does_not_bind_are_said_to_be_ignored(recipe: Recipe, custom: Recipe) -> None:
    flags = {"model": "org/m", "train_data": "d.jsonl", "validation_data": None}
    assert ignored_bindings(custom, flags) == [
        "custom/custom ignores --model: its recipe binds no model",
        "custom/custom ignores --train-data: its recipe binds no train data",
    ]
    assert [n.partition(":")[0] for n in ignored_bindings(recipe, flags)] == [
        "demo/train ignores --train-data"
    ]


def test_a_manifest_path_with_odd_characters_reads(tmp_path: Path) -> None:
    root = tmp_path / "site $HOME 'q\" 实验\n"
    (root / "recipe" / "demo").mkdir(parents=True)
    (root / "recipe" / "demo" / "train.yaml").write_text(MANIFEST)
    assert load_catalog([root]).get("demo/train").id == "demo/train"
