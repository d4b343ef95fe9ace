"""The lock records, compatibility admits: what a lock is worth as the catalog moves on, and upgrading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuneplane.kernel.errors import UsageError
from tuneplane.lab.experiments import list_experiments, new_experiment
from tuneplane.lab.marker import Lab, init_lab
from tuneplane.packaged import packaged_configs
from tuneplane.recipes import compatibility
from tuneplane.recipes.catalog import Catalog, load_catalog
from tuneplane.recipes.compatibility import LockState, LockStatus, lock_state
from tuneplane.recipes.lock import LOCK_NAME, read_lock
from tuneplane.recipes.upgrade import plan_upgrade, write_upgrade

MANIFEST = """\
schema: tuneplane/recipe/v1
id: demo/train
version: 1.2.0
title: Demo
adapter: custom
entrypoint: {kind: experiment, value: train.sh}
scaffold: custom/custom
parameters:
  learning_rate: {type: float, default: 0.1, help: How far}
  epochs: {type: int, default: 1, help: How long}
observability: platform
runtime:
  default_version: "2"
  versions:
    "1": {id: demo-1}
    "2": {id: demo-2}
"""

PUBLIC = {
    "apiVersion": "tuneplane/recipe-lock/v1",
    "recipe": {
        "name": "custom/custom",
        "version": "3",
        "digest": "sha256:" + "1" * 64,
        "manifest_digest": "sha256:" + "2" * 64,
        "template_digest": "sha256:" + "3" * 64,
        "published_at": "2026-05-01",
    },
    "framework": {"kind": "custom", "version": "user-managed", "runtime_id": "custom-any"},
    "bindings": {"entrypoint": {"kind": "experiment", "value": "train.sh"}, "params": {"lr": 0.1}},
    "created_by": {"core_version": "0.4.2", "host": "console"},
    "requires": {"core": ">=0.4,<0.5"},
    "signature": None,
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The manifest of a site's method, to be changed by the test."""
    manifest = tmp_path / "site" / "recipe" / "demo" / "train.yaml"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(MANIFEST)
    return manifest


@pytest.fixture
def catalog(tmp_path: Path, site: Path) -> Catalog:
    return load_catalog([packaged_configs(), tmp_path / "site"])


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return init_lab(tmp_path / "lab").lab


@pytest.fixture
def demo(lab: Lab, catalog: Catalog) -> Path:
    return new_experiment(lab, "mine", "demo/train", catalog)


@pytest.fixture
def custom(lab: Lab, catalog: Catalog) -> Path:
    return new_experiment(lab, "own", "custom/custom", catalog)


def change(path: Path, *keys: str, to: Any) -> None:
    """Set one key of a lock, or take it away where `to` is `...`."""
    value = holder = json.loads(path.read_text())
    for key in keys[:-1]:
        holder = holder[key]
    if to is ...:
        del holder[keys[-1]]
    else:
        holder[keys[-1]] = to
    path.write_text(json.dumps(value))


def refusal(state: LockState) -> str:
    assert state.status is LockStatus.REFUSED
    assert all("tp recipe upgrade" in fault.remedy for fault in state.faults)
    return " / ".join(fault.what for fault in state.faults)


def test_a_lock_just_made_is_current_and_reads_back_as_written(demo: Path, catalog: Catalog) -> None:
    state = lock_state(demo, catalog)
    assert (state.status, state.faults, state.advice) == (LockStatus.CURRENT, (), ())
    assert read_lock(demo / LOCK_NAME).as_json() == json.loads((demo / LOCK_NAME).read_text())
    assert state.lock is not None
    assert state.lock.params == {"learning_rate": "float", "epochs": "int"}


@pytest.mark.contract("C3")
def test_a_changed_comment_in_the_catalog_invalidates_nobody(
    demo: Path, site: Path, catalog: Catalog
) -> None:
    site.write_text("# a new comment\n" + MANIFEST + "# the end\n")
    assert lock_state(demo, catalog).status is LockStatus.CURRENT


@pytest.mark.contract("C3")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("How far", "The size of a step"),
        ("default: 0.1", "default: 0.2"),
        ("version: 1.2.0", "version: 1.4.0"),
        ("observability: platform", "observability: external"),
        ("  epochs:", "  warmup: {type: int, default: 0, help: New}\n  epochs:"),
        ('default_version: "2"', 'default_version: "1"'),
        ('    "2":', '    "3": {id: demo-3}\n    "2":'),
    ],
)
def test_a_recipe_that_changed_beside_what_was_bound_admits(
    demo: Path, site: Path, catalog: Catalog, old: str, new: str
) -> None:
    site.write_text(MANIFEST.replace(old, new))
    state = lock_state(demo, catalog)
    assert (state.status, state.faults, state.advice) == (LockStatus.ADMITTED, (), ())


@pytest.mark.contract("C3")
@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ("  epochs: {type: int, default: 1, help: How long}\n", "", "the parameter epochs is gone"),
        ("epochs: {type: int", "epochs: {type: float", "epochs was int, in demo/train it is float now"),
        ("value: train.sh", "value: config.yaml", "the entrypoint was experiment train.sh"),
        ('"2": {id: demo-2}', '"2": {id: demo-2b}', "the runtime demo-2 is gone"),
    ],
)
def test_what_was_bound_and_is_gone_or_changed_is_refused_with_the_difference(
    demo: Path, site: Path, catalog: Catalog, old: str, new: str, difference: str
) -> None:
    assert old in MANIFEST
    site.write_text(MANIFEST.replace(old, new))
    assert difference in refusal(lock_state(demo, catalog))


def test_all_differences_are_told_at_once(demo: Path, site: Path, catalog: Catalog) -> None:
    site.write_text(
        MANIFEST.replace("type: int", "type: str")
        .replace("default: 1,", "default: x,")
        .replace("demo-2", "z")
    )
    assert len(lock_state(demo, catalog).faults) == 2


def test_a_recipe_that_is_gone_is_refused(demo: Path, site: Path, catalog: Catalog) -> None:
    site.unlink()
    gone = load_catalog(catalog.folders)
    assert "the recipe demo/train is gone" in refusal(lock_state(demo, gone))
    with pytest.raises(UsageError, match="there is no method demo/train"):
        plan_upgrade(demo, gone)
    assert plan_upgrade(demo, gone, "custom/custom").lock.recipe == "custom/custom"


@pytest.mark.parametrize("version", ["2.0.0", "1.5.0", "1.1.0", "0.9"])
def test_a_lock_far_from_the_catalog_is_admitted_with_advice(
    demo: Path, site: Path, catalog: Catalog, version: str
) -> None:
    site.write_text(MANIFEST.replace("version: 1.2.0", f"version: '{version}'"))
    state = lock_state(demo, catalog)
    assert state.status is LockStatus.ADMITTED
    assert [a for a in state.advice if version in a and "tp recipe upgrade mine" in a]


@pytest.mark.contract("C3")
def test_a_lock_written_by_the_public_client_is_read_and_admitted(custom: Path, catalog: Catalog) -> None:
    (custom / LOCK_NAME).write_text(json.dumps(PUBLIC))
    state = lock_state(custom, catalog)
    assert (state.status, state.faults) == (LockStatus.ADMITTED, ())
    assert state.lock is not None and state.lock.digest == "sha256:" + "1" * 64
    assert any("requires.core" in a for a in state.advice)


@pytest.mark.parametrize(
    ("params", "read"),
    [
        (None, {}),
        ([], {}),
        (["a"], {"a": None}),
        ({"a": "float"}, {"a": "float"}),
        ({"a": {"type": "int", "default": 3}}, {"a": "int"}),
        ({"a": 3}, {"a": None}),
        ({"a": "adam"}, {"a": None}),
    ],
)
def test_bound_parameters_are_read_in_any_form_met(custom: Path, params: Any, read: dict[str, Any]) -> None:
    change(custom / LOCK_NAME, "bindings", "params", to=params)
    assert read_lock(custom / LOCK_NAME).params == read


def test_a_public_lock_of_a_runtime_that_is_gone_is_refused(demo: Path, catalog: Catalog) -> None:
    change(demo / LOCK_NAME, "framework", "runtime_id", to="demo-0")
    assert "the runtime demo-0 is gone from demo/train, which has demo-2, demo-1" in refusal(
        lock_state(demo, catalog)
    )


@pytest.mark.parametrize(
    ("keys", "to", "words"),
    [
        (("apiVersion",), "tuneplane/recipe-lock/v2", "apiVersion is 'tuneplane/recipe-lock/v2'"),
        (("apiVersion",), ..., "apiVersion is None"),
        (("recipe",), [], "recipe.name is missing"),
        (("recipe", "name"), "custom", "not a method's name in full"),
        (("recipe", "name"), "../../etc", "not a method's name in full"),
        (("recipe", "version"), 1.0, "recipe.version is a float, not text"),
        (("recipe", "digest"), ..., "recipe.digest is missing"),
        (("recipe", "manifest_digest"), "", "recipe.manifest_digest is empty"),
        (("recipe", "template_digest"), None, "recipe.template_digest is null"),
        (("framework",), ..., "framework.kind is missing"),
        (("framework", "version"), 2, "framework.version is an int"),
        (("framework", "runtime_id"), ..., "framework.runtime_id is missing"),
        (("bindings",), "x", "bindings.entrypoint.kind is missing"),
        (("bindings", "entrypoint", "value"), None, "bindings.entrypoint.value is null"),
        (("bindings", "params"), "lr", "bindings.params is text"),
        (("bindings", "params"), [1], "bindings.params is a list"),
        (("created_by", "core_version"), ..., "created_by.core_version is missing"),
        (("requires", "core"), "new", "'new' is not a version specifier"),
        (("requires", "core"), 5, "requires.core is an int"),
    ],
)
def test_a_malformed_lock_is_refused_with_what_is_wrong(
    custom: Path, catalog: Catalog, keys: tuple[str, ...], to: Any, words: str
) -> None:
    change(custom / LOCK_NAME, *keys, to=to)
    state = lock_state(custom, catalog)
    assert words in refusal(state) and state.lock is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ":1: is not JSON"),
        (b"{\n<<<<<<< HEAD\n}", ":2: is not JSON"),
        (b"[]", "the lock is a list, not an object"),
        (b"null", "the lock is null"),
        (b'{"apiVersion": "a", "apiVersion": "b"}', "stands twice"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b" " * (1 << 21), "larger than"),
    ],
)
def test_a_file_that_is_no_lock_is_refused_in_one_sentence(
    custom: Path, catalog: Catalog, content: bytes, words: str
) -> None:
    (custom / LOCK_NAME).write_bytes(content)
    state = lock_state(custom, catalog)
    refusal(state)
    assert words in str(state.faults[0])


def test_a_missing_lock_or_a_link_in_its_place_is_refused(custom: Path, catalog: Catalog) -> None:
    lock = custom / LOCK_NAME
    lock.rename(custom / "elsewhere.json")
    assert "missing" in refusal(lock_state(custom, catalog))
    lock.symlink_to("elsewhere.json")
    assert "not a file" in refusal(lock_state(custom, catalog))


@pytest.mark.parametrize(
    ("specifier", "status", "advised"),
    [
        ("", LockStatus.CURRENT, False),
        (">=0.4", LockStatus.CURRENT, False),
        (">=0.5", LockStatus.CURRENT, False),
        ("~=0.4", LockStatus.CURRENT, False),
        (">=0.4,<0.5", LockStatus.CURRENT, True),
        ("==0.4.*", LockStatus.CURRENT, True),
        ("!=0.5", LockStatus.CURRENT, True),
        (">=0.6", LockStatus.REFUSED, False),
        (">0.5", LockStatus.REFUSED, False),
        ("~=0.7.1", LockStatus.REFUSED, False),
        ("==1.*", LockStatus.REFUSED, False),
        (">=0.4,<0.5,!=0.4.1,>=9", LockStatus.REFUSED, False),
    ],
)
def test_a_lock_that_needs_a_newer_tuneplane_is_refused_and_one_of_an_older_is_not(
    custom: Path,
    catalog: Catalog,
    monkeypatch: pytest.MonkeyPatch,
    specifier: str,
    status: LockStatus,
    advised: bool,
) -> None:
    monkeypatch.setattr(compatibility, "__version__", "0.5.0.dev0")
    change(custom / LOCK_NAME, "requires", "core", to=specifier)
    state = lock_state(custom, catalog)
    assert (state.status, bool(state.advice)) == (status, advised)
    if status is LockStatus.REFUSED:
        assert "0.5.0.dev0" in refusal(state)


@pytest.mark.contract("C3")
def test_an_upgrade_shows_what_changed_writes_it_and_is_then_current(
    demo: Path, site: Path, catalog: Catalog
) -> None:
    site.write_text(MANIFEST.replace("1.2.0", "2.0.0").replace("epochs: {type: int", "epochs: {type: float"))
    before = (demo / LOCK_NAME).read_bytes()
    upgrade = plan_upgrade(demo, catalog)
    assert (demo / LOCK_NAME).read_bytes() == before, "planning writes nothing"
    changed = {c.key: (c.before, c.after) for c in upgrade.changes}
    assert changed.pop("recipe.version") == ("1.2.0", "2.0.0")
    assert changed.pop("bindings.params.epochs.type") == ("int", "float")
    assert set(changed) == {"recipe.digest", "recipe.manifest_digest"}
    write_upgrade(upgrade)
    assert lock_state(demo, catalog).status is LockStatus.CURRENT
    assert plan_upgrade(demo, catalog).changes == ()


def test_an_upgrade_of_a_current_lock_touches_nothing(demo: Path, catalog: Catalog) -> None:
    stamp = (demo / LOCK_NAME).stat().st_mtime_ns
    write_upgrade(plan_upgrade(demo, catalog))
    assert (demo / LOCK_NAME).stat().st_mtime_ns == stamp


def test_an_upgrade_keeps_what_another_wrote_into_the_lock(demo: Path, site: Path, catalog: Catalog) -> None:
    change(demo / LOCK_NAME, "notes", to={"reviewed": "by me"})
    assert plan_upgrade(demo, catalog).changes == ()
    site.write_text(MANIFEST.replace("1.2.0", "2.0.0"))
    write_upgrade(plan_upgrade(demo, catalog))
    value = json.loads((demo / LOCK_NAME).read_text())
    assert (value["notes"], value["recipe"]["version"]) == ({"reviewed": "by me"}, "2.0.0")


def test_a_malformed_lock_that_still_names_its_recipe_is_upgraded(custom: Path, catalog: Catalog) -> None:
    change(custom / LOCK_NAME, "bindings", to=...)
    write_upgrade(plan_upgrade(custom, catalog))
    assert lock_state(custom, catalog).status is LockStatus.CURRENT


@pytest.mark.parametrize("content", [None, "<<<<<<<", "{}", '{"recipe": {"name": 3}}', "[]"])
def test_a_lock_that_names_no_recipe_is_upgraded_where_the_method_is_said(
    custom: Path, catalog: Catalog, content: str | None
) -> None:
    (custom / LOCK_NAME).unlink()
    if content is not None:
        (custom / LOCK_NAME).write_text(content)
    with pytest.raises(UsageError, match="--method METHOD"):
        plan_upgrade(custom, catalog)
    write_upgrade(plan_upgrade(custom, catalog, "custom/custom"))
    assert lock_state(custom, catalog).status is LockStatus.CURRENT


def test_one_experiment_whose_recipe_is_broken_hides_no_other(
    lab: Lab, demo: Path, custom: Path, site: Path, catalog: Catalog
) -> None:
    site.write_text("broken: [")
    listed = [(e.name, e.method, e.state.status) for e in list_experiments(lab, catalog)]
    assert listed == [
        ("mine", "demo/train", LockStatus.REFUSED),
        ("own", "custom/custom", LockStatus.CURRENT),
    ]
