"""`tp new`, `tp ls` and the entrypoint: an experiment is made whole or not at all, and starts what is its own."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tuneplane.kernel.errors import OperationError, UsageError
from tuneplane.lab import experiments
from tuneplane.lab.experiments import (
    LONGEST_NAME,
    find_entrypoint,
    find_experiment,
    list_experiments,
    new_experiment,
)
from tuneplane.lab.marker import Lab, init_lab
from tuneplane.packaged import packaged_configs
from tuneplane.recipes.catalog import Catalog, load_catalog
from tuneplane.recipes.compatibility import LockStatus
from tuneplane.recipes.lock import Lock, read_lock

ESCAPES = "custom entrypoint is missing or escapes the experiment directory"


@pytest.fixture
def catalog() -> Catalog:
    return load_catalog([packaged_configs()])


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return init_lab(tmp_path / "lab with $HOME 'quotes\" and 实验").lab


@pytest.fixture
def lock(lab: Lab, catalog: Catalog) -> Lock:
    """The lock of an experiment named `mine`."""
    return read_lock(new_experiment(lab, "mine", "custom/custom", catalog) / "recipe.lock.json")


@pytest.mark.contract("C1")
def test_a_new_custom_experiment_has_its_four_files(lab: Lab, catalog: Catalog) -> None:
    folder = new_experiment(lab, "first.try_2-x", "custom/custom", catalog)
    assert folder == lab.root / "experiments" / "first.try_2-x"
    assert {p.name for p in folder.iterdir()} == {"train.sh", "config.yaml", "recipe.lock.json", "README.md"}
    assert stat.S_IMODE((folder / "train.sh").stat().st_mode) & stat.S_IXUSR
    assert not stat.S_IMODE((folder / "config.yaml").stat().st_mode) & 0o111


@pytest.mark.contract("C3")
def test_its_lock_has_the_published_form(lab: Lab, catalog: Catalog) -> None:
    recipe = catalog.get("custom/custom")
    text = (new_experiment(lab, "one", "custom/custom", catalog) / "recipe.lock.json").read_text()
    written = json.loads(text)
    digests = {k: written["recipe"].pop(k) for k in ("digest", "manifest_digest", "template_digest")}
    core = written["created_by"].pop("core_version")
    assert written == {
        "apiVersion": "tuneplane/recipe-lock/v1",
        "recipe": {"name": "custom/custom", "version": recipe.version},
        "framework": {"kind": "custom", "version": "user-managed", "runtime_id": "user-managed"},
        "bindings": {"entrypoint": {"kind": "experiment", "value": "train.sh"}, "params": {}},
        "created_by": {},
        "requires": {"core": ">=0.4"},
    }
    assert all(d.startswith("sha256:") and len(d) == 71 for d in digests.values()) and core
    assert len(set(digests.values())) == 3


@pytest.mark.contract("C5")
def test_its_config_holds_comments_alone(lab: Lab, catalog: Catalog) -> None:
    text = (new_experiment(lab, "one", "custom/custom", catalog) / "config.yaml").read_text()
    assert yaml.safe_load(text) is None
    assert all(line.startswith("#") for line in text.splitlines())


def test_its_readme_names_the_next_three_commands_of_this_very_experiment(lab: Lab, catalog: Catalog) -> None:
    text = (new_experiment(lab, "one", "custom/custom", catalog) / "README.md").read_text()
    for command in ("experiments/one/train.sh", "git add -A && git commit", "tp submit one --profile h200:8"):
        assert command in text
    assert "{{" not in text


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../out",
        "a/b",
        "/etc",
        "Upper",
        "-flag",
        ".hidden",
        "_x",
        "a b",
        "a\n",
        "a$x",
        "实验",
        "a" * (LONGEST_NAME + 1),
        "a\0b",
    ],
)
def test_a_bad_name_is_refused_and_nothing_is_made(lab: Lab, catalog: Catalog, name: str) -> None:
    with pytest.raises(UsageError, match="is not a name for an experiment") as caught:
        new_experiment(lab, name, "custom/custom", catalog)
    assert caught.value.exit_code == 2
    assert [p.name for p in lab.experiments.iterdir()] == [".gitkeep"]


def test_an_unknown_method_is_told_with_the_nearest_along_with_the_bad_name(
    lab: Lab, catalog: Catalog
) -> None:
    with pytest.raises(UsageError) as caught:
        new_experiment(lab, "Bad", "custom/costum", catalog)
    name, method = caught.value.faults
    assert "'Bad'" in name.what
    assert method.what == "there is no method custom/costum" and "custom/custom" in method.remedy


@pytest.mark.parametrize("kind", ["folder", "empty folder", "file", "dead link"])
def test_nothing_that_exists_is_overwritten(lab: Lab, catalog: Catalog, kind: str) -> None:
    there = lab.experiments / "mine"
    if kind == "file":
        there.write_text("mine")
    elif kind == "dead link":
        there.symlink_to("nowhere")
    else:
        there.mkdir()
        if kind == "folder":
            (there / "train.sh").write_text("mine")
    before = subprocess.run(["ls", "-lR", lab.root], capture_output=True, timeout=20, check=True).stdout
    with pytest.raises(UsageError, match="exists, and nothing is overwritten"):
        new_experiment(lab, "mine", "custom/custom", catalog)
    assert (
        before == subprocess.run(["ls", "-lR", lab.root], capture_output=True, timeout=20, check=True).stdout
    )


def test_of_many_at_once_with_one_name_exactly_one_is_made(lab: Lab, catalog: Catalog) -> None:
    made: list[Path] = []
    refused: list[UsageError] = []

    def make() -> None:
        try:
            made.append(new_experiment(lab, "mine", "custom/custom", catalog))
        except UsageError as error:
            refused.append(error)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert (len(made), len(refused)) == (1, 7)
    assert sorted(p.name for p in lab.experiments.iterdir()) == [".gitkeep", "mine"]
    assert len(list(made[0].iterdir())) == 4


@pytest.mark.parametrize("when", ["write_lock", "_write_files", "_move"])
def test_a_full_disk_leaves_nothing_half_made(
    lab: Lab, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    real: Callable[..., object] = getattr(experiments, when)

    def full(*arguments: object) -> None:
        if when != "_move":
            real(*arguments)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(experiments, when, full)
    with pytest.raises(OperationError, match="No space left on device") as caught:
        new_experiment(lab, "mine", "custom/custom", catalog)
    assert caught.value.exit_code == 1
    assert [p.name for p in lab.experiments.iterdir()] == [".gitkeep"]


def test_a_lab_whose_experiments_folder_is_gone_gets_it_back(lab: Lab, catalog: Catalog) -> None:
    (lab.experiments / ".gitkeep").unlink()
    lab.experiments.rmdir()
    assert list_experiments(lab, catalog) == []
    assert new_experiment(lab, "mine", "custom/custom", catalog).is_dir()


def test_experiments_do_not_leave_the_lab_by_a_link(lab: Lab, catalog: Catalog, tmp_path: Path) -> None:
    (lab.experiments / ".gitkeep").unlink()
    lab.experiments.rmdir()
    lab.experiments.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="experiments is a link"):
        new_experiment(lab, "mine", "custom/custom", catalog)
    assert not (tmp_path / "mine").exists()


def test_the_umask_of_a_group_lab_is_kept(lab: Lab, catalog: Catalog) -> None:
    before = os.umask(0o007)
    try:
        folder = new_experiment(lab, "mine", "custom/custom", catalog)
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (folder, *folder.iterdir())}
    assert modes["mine"] == 0o770 and modes["train.sh"] == 0o770 and modes["config.yaml"] == 0o660


def test_every_experiment_is_listed_with_its_method_and_what_its_lock_is_worth(
    lab: Lab, lock: Lock, catalog: Catalog
) -> None:
    (lab.experiments / "no-lock").mkdir()
    broken = new_experiment(lab, "broken", "custom/custom", catalog) / "recipe.lock.json"
    broken.write_text("<<<<<<< HEAD\n{}")
    (lab.experiments / ".hidden").mkdir()
    (lab.experiments / "a-file").write_text("")
    listed = {e.name: e for e in list_experiments(lab, catalog)}
    assert list(listed) == ["broken", "mine", "no-lock"]
    assert (listed["mine"].method, listed["mine"].state.status) == ("custom/custom", LockStatus.CURRENT)
    assert listed["no-lock"].state.status is LockStatus.REFUSED
    assert "missing" in listed["no-lock"].state.faults[0].what
    fault = listed["broken"].state.faults[0]
    assert fault.where == f"{broken}:1" and "tp recipe upgrade broken" in fault.remedy


def test_a_misspelt_experiment_is_told_with_the_nearest(lab: Lab, lock: Lock) -> None:
    assert find_experiment(lab, "mine") == lab.experiments / "mine"
    with pytest.raises(UsageError) as caught:
        find_experiment(lab, "mien")
    assert caught.value.faults[0].what == "there is no experiment mien"
    assert "did you mean mine?" in caught.value.faults[0].remedy
    with pytest.raises(UsageError, match="is not a name"):
        find_experiment(lab, "../experiments/mine")


def test_the_entrypoint_is_the_file_by_that_name(lab: Lab, lock: Lock) -> None:
    assert find_entrypoint(lab, "mine", lock) == lab.experiments / "mine" / "train.sh"


def test_a_link_that_stays_inside_the_experiment_is_an_entrypoint(lab: Lab, lock: Lock) -> None:
    script = lab.experiments / "mine" / "train.sh"
    script.rename(script.with_name("real.sh"))
    script.symlink_to("real.sh")
    assert find_entrypoint(lab, "mine", lock) == script


def renamed(script: Path) -> None:
    script.rename(script.with_name("run.sh"))


def missing(script: Path) -> None:
    script.unlink()


def folder(script: Path) -> None:
    script.unlink()
    script.mkdir()


def pipe(script: Path) -> None:
    script.unlink()
    os.mkfifo(script)


def link_out_of_the_experiment(script: Path) -> None:
    script.rename(script.parents[2] / "common" / "train.sh")
    script.symlink_to("../../common/train.sh")


def link_out_of_the_lab(script: Path) -> None:
    script.unlink()
    script.symlink_to("/bin/true")


def dead_link(script: Path) -> None:
    script.unlink()
    script.symlink_to("nowhere")


def loop(script: Path) -> None:
    script.unlink()
    script.symlink_to("train.sh")


def linked_experiment(script: Path) -> None:
    script.parent.rename(script.parents[2] / "common" / "mine")
    script.parent.symlink_to("../common/mine")


@pytest.mark.contract("C4")
@pytest.mark.parametrize(
    "change",
    [
        renamed,
        missing,
        folder,
        pipe,
        link_out_of_the_experiment,
        link_out_of_the_lab,
        dead_link,
        loop,
        linked_experiment,
    ],
)
def test_an_entrypoint_that_is_gone_or_leads_out_stops_the_submit(
    lab: Lab, lock: Lock, change: Callable[[Path], None]
) -> None:
    change(lab.experiments / "mine" / "train.sh")
    with pytest.raises(UsageError) as caught:
        find_entrypoint(lab, "mine", lock)
    assert caught.value.faults[0].what == ESCAPES


@pytest.mark.parametrize(
    "value", ["../mine/train.sh", "/bin/true", "../../common/x", ".", "a\0b", "x" * 5000]
)
def test_a_lock_that_names_an_entrypoint_elsewhere_stops_the_submit(lab: Lab, lock: Lock, value: str) -> None:
    import dataclasses

    from tuneplane.recipes.recipe import Entrypoint

    elsewhere = dataclasses.replace(lock, entrypoint=Entrypoint("experiment", value))
    with pytest.raises(UsageError) as caught:
        find_entrypoint(lab, "mine", elsewhere)
    assert caught.value.faults[0].what == ESCAPES
