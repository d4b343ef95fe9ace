"""The catalog: what it ships, what a site adds, and how it tells the author of a manifest what is wrong."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tuneplane.kernel.errors import UsageError
from tuneplane.packaged import packaged_configs
from tuneplane.recipes.catalog import Catalog, load_catalog
from tuneplane.recipes.documents import Document
from tuneplane.recipes.manifest import PARAMETER_KEYS, RECIPE_KEYS, recipe_of
from tuneplane.recipes.recipe import Recipe

FULL = """\
schema: tuneplane/recipe/v1
id: demo/classify
version: 2.3.1
title: {en: Classify, zh: 分类}
summary: {en: Folders of classes, zh: 按目录分类}
adapter: custom
entrypoint: {kind: experiment, value: train.py}
scaffold: demo/classify
requires: {core: ">=0.4"}
parameters:
  learning_rate: {type: float, default: 1e-4, min: 0, max: 1, unit: per step, help: {en: Step size, zh: 步长},
    group: optimizer, to: "argv:--lr"}
  optimizer.name: {type: str, default: adam, choices: [adam, sgd], help: {en: Which, zh: 哪个}}
  epochs: {type: int, min: 1, help: {en: Passes, zh: 轮数}}
  sizes: {type: "list[int]", default: [1, 2], max: 64, help: {en: Sizes, zh: 尺寸}}
  seed: {type: int, default: null, help: {en: Seed, zh: 种子}}
bindings:
  train_data: {required: true, to: "argv:--data", help: {en: Data, zh: 数据}}
observability: platform
outputs:
  events: {path: "tb/*", kind: tensorboard}
  points: {path: points.jsonl, kind: jsonl, step_key: step}
operations: [train]
metrics:
  train/loss: [loss, train_loss]
  validation/accuracy: [acc]
objective: {metric: validation/accuracy, goal: maximize}
plugins: [opsd-patch]
runtime:
  default_version: "2.13"
  versions:
    "2.12": {id: torch-2.12, requirements: [torch==2.12.0]}
    "2.13":
      id: torch-2.13
      requirements: [torch==2.13.0]
      image:
        reference: docker.io/pytorch/pytorch:2.13.0
        digest: sha256:0000000000000000000000000000000000000000000000000000000000000000
        checked: false
"""


def site(root: Path, method: str, text: str) -> Path:
    """A site's configuration folder with one manifest and its scaffold."""
    manifest = root / "recipe" / f"{method}.yaml"
    scaffold = manifest.with_suffix(".scaffold")
    scaffold.mkdir(parents=True, exist_ok=True)
    manifest.write_text(text)
    for name in ("train.py", "train.sh", "config.yaml", "README.md"):
        (scaffold / name).write_text(f"# {{{{experiment}}}} {name}\n")
    return root


def recipe(tmp_path: Path, text: str = FULL) -> Recipe:
    return load_catalog([site(tmp_path, "demo/classify", text)]).get("demo/classify")


@pytest.fixture
def catalog() -> Catalog:
    return load_catalog([packaged_configs()])


@pytest.mark.contract("C22")
def test_the_published_custom_recipe_is_external(catalog: Catalog) -> None:
    custom = catalog.get("custom/custom")
    assert custom.observability == "external"
    assert (custom.adapter, custom.operations, custom.free_parameters) == ("custom", ("train",), True)
    assert custom.entrypoint.kind == "experiment" and custom.entrypoint.value == "train.sh"
    assert custom.user_managed and custom.runtime.version == "user-managed" and custom.runtime.image is None
    assert custom.title.en and custom.title.zh


def test_every_published_recipe_reads_and_has_its_scaffold(catalog: Catalog) -> None:
    assert "custom/custom" in catalog.methods()
    for method in catalog.methods():
        assert catalog.scaffold(catalog.get(method)).files


def test_a_whole_manifest_is_read_as_it_stands(tmp_path: Path) -> None:
    found = recipe(tmp_path)
    rate = found.parameter("learning_rate")
    assert rate is not None and (rate.type, rate.default, rate.minimum, rate.maximum) == ("float", 1e-4, 0, 1)
    assert (rate.unit, rate.group, rate.to, rate.help.zh) == ("per step", "optimizer", "argv:--lr", "步长")
    epochs, seed = found.parameter("epochs"), found.parameter("seed")
    assert epochs is not None and epochs.required and not epochs.nullable
    assert seed is not None and seed.nullable and not seed.required
    assert [r.version for r in found.runtimes] == ["2.13", "2.12"]
    assert found.runtime.image is not None and not found.runtime.image.checked
    assert found.metrics["train/loss"] == ("loss", "train_loss")
    assert found.objective is not None and found.objective.goal == "maximize"
    assert [(o.name, o.kind, o.step_key) for o in found.outputs] == [
        ("events", "tensorboard", ""),
        ("points", "jsonl", "step"),
    ]
    assert found.plugins == ("opsd-patch",) and found.bindings[0].required


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("observability: platform", "observability: internal", "observability cannot be 'internal'"),
        ("operations: [train]", "operations: [train, export]", "custom adapter does not compile export"),
        ("operations: [train]", "operations: [sing]", "sing is none of train, export, eval"),
        ("adapter: custom", "adapter: costum", "did you mean custom?"),
        ("version: 2.3.1", "version: 2.3", "version is a float, not text"),
        ("version: 2.3.1", "version: latest", "version cannot be 'latest'"),
        ("id: demo/classify", "id: demo/other", "the file's place says demo/classify"),
        ("value: train.py", "value: ../train.py", "leaves the experiment folder"),
        ("value: train.py", "value: /bin/true", "leaves the experiment folder"),
        ("schema: tuneplane/recipe/v1", "schema: tuneplane/recipe/v2", "schema cannot be"),
        ("plugins:", "plugin:", "unknown key plugin"),
        ("group: optimizer", "gruop: optimizer", "unknown key parameters.learning_rate.gruop"),
        ("max: 64", "max: sixty", "parameters.sizes.max is text, not a number"),
        ("min: 0, max: 1", "min: 2, max: 1", "min 2 is above max 1"),
        ("default: 1e-4", "default: 2.5", "default 2.5 is above the largest value 1"),
        ("default: 1e-4", "default: fast", "default fast is text, not float"),
        ("default: adam", "default: adma", "default adma is none of adam, sgd"),
        ("choices: [adam, sgd]", "choices: [adam, 3]", "choice 3 is an int, not str"),
        ("  optimizer.name:", "  learning_rate.x:", "cannot be a parameter and the group of"),
        ("  seed:", "  'se ed':", "is not a name for parameters"),
        ("{type: int, min: 1", "{type: integer, min: 1", "did you mean int?"),
        ("{type: int, min: 1, help", "{type: str, min: 1, help", "min and max belong to numbers"),
        ("help: {en: Seed, zh: 种子}", "help: {en: Seed}", "parameters.seed.help.zh is missing"),
        ("  train_data:", "  tokenizer:", "tokenizer is none of model, train_data"),
        ("required: true", "required: maybe", "is text, not true or false"),
        ('path: "tb/*"', 'path: "../tb"', "leaves the output folder"),
        (", step_key: step", "", "jsonl needs one"),
        ("[acc]", "[acc, loss]", "loss names two metrics"),
        ("{metric: validation/accuracy,", "{metric: validation/acuracy,", "did you mean validation/accuracy"),
        ('default_version: "2.13"', 'default_version: "2.14"', "2.14 is none of the runtime's versions"),
        ("digest: sha256:00", "digest: sha256:zz", "digest cannot be"),
        ("checked: false", "checked: 0", "is an int, not true or false"),
        ('core: ">=0.4"', "core: newest", "'newest' is not a version specifier"),
        ("title: {en: Classify, zh: 分类}", "title: [x]", "title is a list, not a mapping"),
    ],
)
def test_what_is_wrong_in_a_manifest_is_told_with_its_line(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    line = FULL[: FULL.index(old)].count("\n") + 1
    assert FULL.count(old) == 1, "the test changes one place"
    with pytest.raises(UsageError) as caught:
        recipe(tmp_path, FULL.replace(old, new))
    text = str(caught.value)
    assert words in text
    assert f"{tmp_path}/recipe/demo/classify.yaml:{line}: " in text


def test_a_user_managed_runtime_pins_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a user-managed runtime has no versions"):
        recipe(tmp_path, FULL.replace('default_version: "2.13"', "default_version: user-managed"))


def test_all_faults_of_a_manifest_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        recipe(tmp_path, "schema: tuneplane/recipe/v1\nid: 7\ncolour: red\nparameters: [a]\n")
    text = str(caught.value)
    for words in (
        "id is an int",
        "unknown key colour",
        "parameters is a list",
        "version is missing",
        "title is missing",
        "adapter is missing",
        "entrypoint is missing",
        "observability is missing",
        "runtime is missing",
    ):
        assert words in text
    assert len(caught.value.faults) == 9


@pytest.mark.parametrize("text", ["", "[]", "words", "a: 1\na: 2", "x: *y", "x: !!python/name:os.system ''"])
def test_a_file_that_is_no_manifest_at_all_is_told_so(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"classify\.yaml"):
        recipe(tmp_path, text)


def test_every_value_of_the_wrong_kind_is_a_fault_and_never_a_crash() -> None:
    def places(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        below = (
            [p for k, v in value.items() for p in places(v, (*path, k))] if isinstance(value, dict) else []
        )
        return [path, *below] if path else below

    wrongs: tuple[Any, ...] = (None, 7, -0.5, "words", [], [[]], [None], {}, {"x": {}}, True)
    whole = yaml.safe_load(FULL)
    for place in places(whole):
        for wrong in wrongs:
            changed = copy.deepcopy(whole)
            holder = changed
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]] = wrong
            try:
                recipe_of(Document(Path("x.yaml"), changed, {}), "demo/classify")
            except UsageError as error:
                assert error.faults and all(fault.where == "x.yaml" for fault in error.faults)


def test_an_unknown_method_is_told_with_the_nearest(catalog: Catalog) -> None:
    with pytest.raises(UsageError) as caught:
        catalog.get("custom/costum")
    assert caught.value.faults[0].remedy.startswith("did you mean custom/custom?")
    with pytest.raises(UsageError, match="there is no method \\.\\./x"):
        catalog.get("../x")


def test_a_site_adds_methods_and_shadows_published_ones(tmp_path: Path) -> None:
    shadow = (packaged_configs() / "recipe/custom/custom.yaml").read_text().replace("1.0.0", "1.0.1")
    site(tmp_path, "demo/classify", FULL)
    (tmp_path / "recipe/custom").mkdir()
    (tmp_path / "recipe/custom/custom.yaml").write_text(shadow)
    both = load_catalog([packaged_configs(), tmp_path])
    assert set(both.methods()) == {*load_catalog([packaged_configs()]).methods(), "demo/classify"}
    assert both.get("custom/custom").version == "1.0.1"
    published = load_catalog([packaged_configs()])
    assert both.scaffold(both.get("custom/custom")) == published.scaffold(published.get("custom/custom"))


def test_a_variant_takes_the_scaffold_of_another_method(tmp_path: Path) -> None:
    """An observability variant of custom, as tests and sites make one (C5, C24)."""
    text = (packaged_configs() / "recipe/custom/custom.yaml").read_text()
    text = text.replace("id: custom/custom", "id: site/platform\nscaffold: custom/custom")
    text = text.replace("observability: external", "observability: platform")
    (tmp_path / "recipe/site").mkdir(parents=True)
    (tmp_path / "recipe/site/platform.yaml").write_text(text)
    both = load_catalog([packaged_configs(), tmp_path])
    variant = both.get("site/platform")
    assert variant.observability == "platform"
    assert {f.path for f in both.scaffold(variant).files} == {"train.sh", "config.yaml", "README.md"}


def test_a_broken_manifest_stops_its_own_method_alone(tmp_path: Path) -> None:
    site(tmp_path, "demo/classify", "broken: [")
    (tmp_path / "recipe" / "demo" / "Not A Method.yaml").write_text("")
    (tmp_path / "recipe" / "README.md").write_text("")
    both = load_catalog([packaged_configs(), tmp_path, tmp_path / "missing"])
    assert set(both.methods()) == {*load_catalog([packaged_configs()]).methods(), "demo/classify"}
    assert both.get("custom/custom").id == "custom/custom"
    with pytest.raises(UsageError, match=r"classify\.yaml:1: is not the YAML"):
        both.get("demo/classify")


@pytest.mark.contract("C3")
def test_a_changed_comment_or_order_in_the_catalog_changes_no_digest(tmp_path: Path) -> None:
    before = recipe(tmp_path / "a")
    reordered = yaml.safe_dump(yaml.safe_load(FULL.replace("1e-4", "0.0001")), allow_unicode=True)
    after = recipe(tmp_path / "b", "# a comment\n" + reordered)
    assert (after.digest, after.manifest_digest) == (before.digest, before.manifest_digest)


def test_words_change_the_digest_and_the_interface_changes_the_manifest_digest_too(tmp_path: Path) -> None:
    before = recipe(tmp_path / "a")
    words = recipe(tmp_path / "b", FULL.replace("Step size", "How far"))
    assert words.digest != before.digest and words.manifest_digest == before.manifest_digest
    for number, (old, new) in enumerate(
        [("train.py", "run.py"), ("torch-2.13", "torch-2.14"), ("  seed: {type: int", "  seed: {type: float")]
    ):
        changed = recipe(tmp_path / str(number), FULL.replace(old, new))
        assert changed.manifest_digest != before.manifest_digest, new


def test_a_scaffold_has_one_digest_under_any_umask_and_after_compilation(tmp_path: Path) -> None:
    site(tmp_path, "demo/classify", FULL)
    place = tmp_path / "recipe/demo/classify.scaffold"
    catalog = load_catalog([tmp_path])
    before = catalog.scaffold(catalog.get("demo/classify"))
    for path in place.iterdir():
        path.chmod(0o640)
    subprocess.run([sys.executable, "-m", "compileall", "-q", place], timeout=60, check=True)
    assert (place / "__pycache__").is_dir()
    (place / "link").symlink_to("/etc/passwd")
    assert catalog.scaffold(catalog.get("demo/classify")) == before
    assert before.digest.startswith("sha256:")
    (place / "train.py").write_text("#!/usr/bin/env python3\n")
    assert catalog.scaffold(catalog.get("demo/classify")).digest != before.digest


def test_a_scaffold_without_its_entry_or_with_a_lock_is_told(tmp_path: Path) -> None:
    site(tmp_path, "demo/classify", FULL)
    place = tmp_path / "recipe/demo/classify.scaffold"
    (place / "train.py").unlink()
    (place / "recipe.lock.json").write_text("{}")
    catalog = load_catalog([tmp_path])
    with pytest.raises(UsageError) as caught:
        catalog.scaffold(catalog.get("demo/classify"))
    assert "the scaffold has no train.py" in str(caught.value)
    assert "recipe.lock.json" in str(caught.value)


def test_listing_the_catalog_reads_no_manifest_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from tuneplane.packaged import packaged_configs;"
        "from tuneplane.recipes.catalog import load_catalog;"
        "print(load_catalog([packaged_configs()]).methods());"
        "heavy = {'yaml', 'hydra', 'omegaconf', 'submitit', 'msgspec', 'rich', 'packaging'};"
        "sys.exit(','.join(heavy & set(sys.modules)) or 0)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=packaged_configs().parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "'custom/custom'" in done.stdout


@pytest.mark.parametrize("place", ["tuneplane/configs", "configs"])
def test_the_packaged_catalog_is_found_inside_the_wheel_and_beside_a_checkout(
    tmp_path: Path, place: str
) -> None:
    package = packaged_configs().parent / "tuneplane"
    package = package if package.is_dir() else packaged_configs().parent
    root = tmp_path / "site packages"
    shutil.copytree(package, root / "tuneplane", ignore=shutil.ignore_patterns("configs", "__pycache__"))
    ask = [sys.executable, "-c", "from tuneplane.packaged import *; print(packaged_configs())"]

    def answer() -> subprocess.CompletedProcess[str]:
        return subprocess.run(ask, cwd=root, capture_output=True, text=True, timeout=60, check=False)

    (root / "configs").mkdir()  # somebody else's folder of that name
    lost = answer()
    assert lost.returncode == 1 and "has no configs folder" in lost.stderr
    shutil.copytree(packaged_configs(), root / place, dirs_exist_ok=True)
    assert answer().stdout == f"{root / place}\n"


def test_the_variant_that_the_documentation_shows_is_a_method(tmp_path: Path) -> None:
    page = (packaged_configs().parent / "docs" / "adapters.md").read_text()
    example = page.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "recipe/site").mkdir(parents=True)
    (tmp_path / "recipe/site/reported.yaml").write_text(example)
    both = load_catalog([packaged_configs(), tmp_path])
    assert both.get("site/reported").observability == "platform"
    assert both.scaffold(both.get("site/reported")).files


def test_the_documentation_explains_every_key_of_a_manifest() -> None:
    page = (packaged_configs().parent / "docs" / "adapters.md").read_text()
    part = page.partition("## The manifest, key by key\n")[2].partition("\n## ")[0]
    named: set[str] = set()
    for row in part.splitlines():
        if row.startswith("| `"):
            named.update(re.findall(r"`([a-z_.]+)`", row.split("|")[1]))
    assert {name.partition(".")[0] for name in named} == set(RECIPE_KEYS)
    for key in PARAMETER_KEYS:
        assert re.search(rf"\b{key}\b", page)
