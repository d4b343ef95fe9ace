"""What a site keeps for itself: no user, lab, variable or flag loosens it."""

from __future__ import annotations

import pytest
from compose_folders import H200, Folders, folders, h200

__all__ = ["folders", "h200"]


@pytest.fixture
def locked(h200: Folders) -> Folders:
    h200.write(
        "site",
        "site/default",
        "contact: hpc@example.com\n"
        "allowed_registries: [registry.example.com]\n"
        "locked: [cluster.container, cluster.slurm.partition, cluster.mounts, cluster.environment.NCCL_A]\n",
    )
    h200.write(
        "site", "cluster/h200", H200 + "container: {options: [--no-privs]}\nenvironment: {NCCL_A: '1'}\n"
    )
    return h200


def test_what_the_site_says_itself_passes(locked: Folders) -> None:
    config = locked.compose().config
    assert config.cluster.container.options == ["--no-privs"]


def test_the_same_value_and_other_keys_pass(locked: Folders) -> None:
    locked.write("lab", "cluster/h200", "slurm: {partition: gpu, qos: high}\nenvironment: {NCCL_B: '2'}\n")
    locked.environ["SBATCH_PARTITION"] = "gpu"
    assert locked.compose().config.cluster.slurm.qos == "high"


@pytest.mark.parametrize("layer", ["user", "lab"])
def test_a_file_that_changes_a_locked_key_is_named(locked: Folders, layer: str) -> None:
    path = locked.write(layer, "cluster/h200", "scratch: /x\ncontainer:\n  options: [--writable]\n")
    message = locked.refusal()
    assert f"{path}:3: cluster.container.options is locked by {locked.site}/site/default.yaml:3" in message
    assert f"it stays ['--no-privs'] ({locked.site}/cluster/h200.yaml:10)" in message
    assert "['--writable'] is refused" in message
    assert "ask hpc@example.com" in message


def test_a_flag_that_changes_a_locked_key_is_named(locked: Folders) -> None:
    message = locked.refusal(
        cluster__slurm__partition=("--partition", "preempt"), cluster__mounts=("--mount", ["/a:/a"])
    )
    assert "--partition: cluster.slurm.partition is locked by" in message
    assert "--mount: cluster.mounts is locked by" in message


def test_a_variable_that_changes_a_locked_key_is_named(locked: Folders) -> None:
    locked.environ["SBATCH_PARTITION"] = "preempt"
    assert "$SBATCH_PARTITION: cluster.slurm.partition is locked by" in locked.refusal()


def test_a_locked_name_cannot_be_taken_out(locked: Folders) -> None:
    locked.write("lab", "defaults", "cluster: {environment: {NCCL_A: null}}\n")
    assert "cluster.environment.NCCL_A is locked by" in locked.refusal()


@pytest.mark.parametrize(
    "text",
    [
        "defaults: [/container@container: none]\n",
        "defaults: []\n",
        "defaults: [local]\n",
    ],
)
def test_another_choice_in_a_defaults_list_does_not_get_around_a_lock(locked: Folders, text: str) -> None:
    path = locked.write("lab", "cluster/h200", text)
    message = locked.refusal()
    assert f"{path}:1: cluster.container" in message
    assert "is locked by" in message


def test_a_profile_of_ones_own_does_not_get_around_a_lock(locked: Folders) -> None:
    locked.write("user", "cluster/mine", H200.replace("partition: gpu", "partition: other"))
    message = locked.refusal("mine")
    assert "cluster.slurm.partition is locked by" in message
    assert "cluster.container.runtime is locked by" in message


def test_a_profile_that_extends_a_locked_one_keeps_its_locks(locked: Folders) -> None:
    locked.write("user", "cluster/mine", "defaults: [h200]\nscratch: /mine\n")
    assert locked.compose("mine").config.cluster.scratch == "/mine"
    locked.write("user", "cluster/mine", "defaults: [h200]\ncontainer: {options: []}\n")
    assert "cluster.container.options is locked by" in locked.refusal("mine")


def test_an_interpolation_does_not_get_around_a_lock(locked: Folders) -> None:
    locked.write("site", "defaults", "cluster: {container: {binary: '${cluster.scratch}/apptainer'}}\n")
    locked.write("lab", "defaults", "cluster: {scratch: /evil}\n")
    assert "cluster.container.binary is locked by" in locked.refusal()


def test_a_misspelt_lock_is_told(h200: Folders) -> None:
    path = h200.write("site", "site/default", "locked: [cluster.conatiner, cluster.slurm, site.caps.nodes]\n")
    message = h200.refusal()
    assert f"{path}:1: site.locked names cluster.conatiner, which is no key" in message
    assert "cluster.slurm," not in message


@pytest.mark.contract("C28")
@pytest.mark.parametrize(
    "text",
    [
        "site: {allowed_registries: [evil.example.com]}\n",
        "site: {image_folders: null}\n",
        "site: {secrets: [AWS_SESSION]}\n",
        "site: {run_folder_mode: 0750}\n",
        "site: {caps: {gpus: 1000}}\n",
        "site: {locked: []}\n",
        "site: {name: mine}\n",
    ],
)
@pytest.mark.parametrize("layer", ["user", "lab"])
def test_only_the_site_sets_the_sites_keys(locked: Folders, layer: str, text: str) -> None:
    path = locked.write(layer, "defaults", text)
    message = locked.refusal()
    assert f"{path}:1: site." in message
    assert "is the site's to set" in message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("site/default", "allowed_registries: [evil.example.com]\n"),
        ("cluster/h200", "# @package _global_\nsite: {allowed_registries: [evil.example.com]}\n"),
    ],
)
def test_no_other_place_of_a_lab_sets_them_either(locked: Folders, name: str, text: str) -> None:
    locked.write("lab", name, text)
    assert (
        "site.allowed_registries is the site's to set" in locked.refusal()
        or "differ in their" in locked.refusal()
    )


@pytest.mark.contract("C28")
@pytest.mark.parametrize("choice", ["open", "null"])
def test_a_lab_cannot_choose_another_site_file(locked: Folders, choice: str) -> None:
    locked.write("site", "site/open", "allowed_registries: null\n")
    path = locked.write("lab", "defaults", f"defaults: [override /site: {choice}]\n")
    message = locked.refusal()
    assert f"{path}:1: site.allowed_registries is the site's to set" in message


def test_a_user_without_a_site_is_told_how_to_be_one(h200: Folders) -> None:
    h200.write("user", "defaults", "site: {secrets: [HF_TOKEN]}\n")
    assert "be the site: name a folder in TUNEPLANE_CONFIG_DIR" in h200.refusal()
