"""Folders over folders: who has the last word, and where files are looked for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from compose_folders import H200, Folders, folders, h200

import tuneplane.compose.layers as layers_module
from tuneplane.compose import compose, list_profiles

__all__ = ["folders", "h200"]


def test_this_machine_needs_no_configuration_at_all(folders: Folders) -> None:
    composed = folders.compose("local")
    assert composed.config.cluster.scheduler == "local"
    assert composed.config.cluster.name == "local"
    assert composed.config.cluster.storage_root == f"{folders.home}/tuneplane"
    assert composed.config.cluster.container.runtime == "none"


def test_without_any_folder_of_a_site_user_or_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_module, "SITE_FOLDER", tmp_path / "no such folder")
    composed = compose("local", lab_root=None, flags={}, environ={"HOME": str(tmp_path)})
    assert [layer.name for layer in composed.layers if layer.present] == ["packaged"]
    assert list_profiles(None, {"HOME": str(tmp_path)}) == ["local"]


def test_the_last_folder_has_the_last_word_key_by_key(h200: Folders) -> None:
    h200.write("site", "defaults", "cluster: {heartbeat_s: 1, stop_grace_s: 1, scratch: /site}\n")
    h200.write("user", "cluster/h200", "slurm: {account: mine}\nheartbeat_s: 2\nscratch: /user\n")
    lab = h200.write("lab", "cluster/h200", "scratch: /lab\n")
    cluster = h200.compose().config.cluster
    assert (cluster.stop_grace_s, cluster.heartbeat_s, cluster.scratch) == (1.0, 2.0, "/lab")
    assert (cluster.slurm.account, cluster.slurm.partition) == ("mine", "gpu")
    assert h200.compose().origins["cluster.scratch"] == f"{lab}:1"


def test_within_a_folder_a_cluster_stands_over_the_defaults_of_all(h200: Folders) -> None:
    h200.write("site", "defaults", "cluster: {slurm: {partition: every, qos: normal}}\n")
    h200.write("user", "defaults", "cluster: {slurm: {qos: mine, account: general}}\n")
    h200.write("user", "cluster/h200", "slurm: {account: special}\n")
    slurm = h200.compose().config.cluster.slurm
    assert (slurm.partition, slurm.qos, slurm.account) == ("gpu", "mine", "special")


def test_a_users_defaults_stand_over_a_sites_cluster(h200: Folders) -> None:
    h200.write("user", "defaults", "cluster: {slurm: {partition: long}}\n")
    assert h200.compose().config.cluster.slurm.partition == "long"


def test_a_file_without_a_defaults_list_keeps_the_runtime_that_the_site_chose(h200: Folders) -> None:
    h200.write("lab", "cluster/h200", "scratch: /lab\n")
    assert h200.compose().config.cluster.container.runtime == "apptainer"


def test_a_later_defaults_list_decides(h200: Folders) -> None:
    h200.write("lab", "cluster/h200", "defaults:\n  - /container@container: none\n  - _self_\n")
    assert h200.compose().config.cluster.container.runtime == "none"


def test_a_profile_may_extend_another_under_a_name_of_its_own(h200: Folders) -> None:
    h200.write("user", "cluster/mine", "defaults: [h200]\nslurm: {partition: short}\n")
    composed = h200.compose("mine:4")
    assert composed.config.cluster.name == "mine"
    assert composed.config.cluster.slurm.partition == "short"
    assert composed.config.cluster.gpus_per_node == 8
    assert (composed.request.name, composed.request.total) == ("mine", 4)


def test_a_user_may_choose_a_runtime_for_every_profile(h200: Folders) -> None:
    h200.write("user", "defaults", "defaults:\n  - override /container@cluster.container: none\n")
    assert h200.compose().config.cluster.container.runtime == "none"


def test_a_group_of_a_sites_own_lands_where_a_defaults_list_puts_it(h200: Folders) -> None:
    h200.write("site", "fabric/ib", "NCCL_IB_HCA: mlx5\n")
    text = H200.replace("  - _self_", "  - /fabric@environment: ib\n  - _self_")
    h200.write("site", "cluster/h200", text)
    assert h200.compose().config.cluster.environment == {"NCCL_IB_HCA": "mlx5"}


def test_lists_are_replaced_and_mappings_merged_and_null_takes_a_name_out(h200: Folders) -> None:
    h200.write("site", "defaults", "cluster: {mounts: ['/a:/a'], environment: {NCCL_A: '1', NCCL_B: '2'}}\n")
    h200.write("lab", "defaults", "cluster: {mounts: ['/b:/b'], environment: {NCCL_A: null, NCCL_C: '3'}}\n")
    cluster = h200.compose().config.cluster
    assert cluster.mounts == ["/b:/b"]
    assert cluster.environment == {"NCCL_B": "2", "NCCL_C": "3"}


def test_a_labs_own_hydra_files_are_left_alone(h200: Folders) -> None:
    h200.write("lab", "config", "defaults: [model: big]\nlearning_rate: 1\n")
    h200.write("lab", "model/big", "layers: 3\n")
    h200.write("lab", "hydra/job_logging/default", "nonsense: [\n")
    assert h200.compose().config.cluster.name == "h200"


def test_a_heading_whose_keys_are_all_commented_out_says_nothing(h200: Folders) -> None:
    h200.write("lab", "defaults", "cluster:\n  environment:\n  #  NCCL_DEBUG: INFO\n  slurm:\n")
    h200.write("user", "defaults", "# nothing yet\n")
    assert h200.compose().config.cluster.slurm.partition == "gpu"


def test_the_users_folder_follows_xdg(h200: Folders, tmp_path: Path) -> None:
    folder = tmp_path / "xdg" / "tuneplane" / "cluster"
    folder.mkdir(parents=True)
    (folder / "h200.yaml").write_text("scratch: /xdg\n")
    h200.environ["XDG_CONFIG_HOME"] = str(tmp_path / "xdg")
    assert h200.compose().config.cluster.scratch == "/xdg"
    h200.environ["XDG_CONFIG_HOME"] = "not/absolute"  # to be ignored, by the specification
    assert h200.compose().config.cluster.scratch == "/tmp"


def test_a_user_who_is_the_site_has_one_folder_that_counts_once(h200: Folders) -> None:
    h200.write("user", "site/default", "name: mine\n")
    h200.write("user", "cluster/h200", H200)
    h200.environ["TUNEPLANE_CONFIG_DIR"] = str(h200.user)
    composed = h200.compose()
    assert composed.config.site.name == "mine"
    assert [layer.name for layer in composed.layers] == ["packaged", "site", "lab"]


def test_a_named_site_folder_that_is_not_there_is_told(folders: Folders) -> None:
    for wrong in ("/no/such/folder", "relative"):
        folders.environ["TUNEPLANE_CONFIG_DIR"] = wrong
        assert "$TUNEPLANE_CONFIG_DIR" in folders.refusal("local")


def test_folders_with_names_that_no_shell_likes(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "a b:$HOME %d 'q' \"d\" 数据 =x ${y} #z")
    folders.write("site", "cluster/h200", H200)
    path = folders.write("lab", "cluster/h200", "defaults: [/container@container: none]\nscratch: /lab\n")
    composed = folders.compose()
    assert composed.config.cluster.container.runtime == "none"
    assert composed.origins["cluster.scratch"] == f"{path}:2"


def test_composing_twice_in_one_process_from_different_folders(tmp_path: Path) -> None:
    seen = []
    for name in ("one", "two", "one"):
        folders = Folders(tmp_path / str(len(seen)))
        folders.write("site", "cluster/h200", H200 + f"  account: {name}\n")
        seen.append(folders.compose().config.cluster.slurm.account)
    assert seen == ["one", "two", "one"]


def test_composing_inside_somebodys_hydra_program_leaves_it_alone(h200: Folders, tmp_path: Path) -> None:
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "app.yaml").write_text("a: 1\nhome: ${oc.env:HOME}\n")
    with hydra.initialize_config_dir(str(tmp_path / "theirs"), version_base="1.2"):
        h200.compose()
        assert GlobalHydra.instance().is_initialized()
        assert str(hydra.version.getbase()) == "1.2"
        theirs = hydra.compose("app")
        assert theirs.a == 1
        assert theirs.home == os.environ["HOME"]


@pytest.mark.contract("C41")
def test_editing_files_afterwards_changes_nothing_composed(h200: Folders) -> None:
    h200.write("user", "defaults", "cluster: {scratch: '${cluster.storage_root}/x'}\n")
    composed = h200.compose()
    h200.write("site", "cluster/h200", H200.replace("/shared/runs", "/elsewhere"))
    (h200.user / "defaults.yaml").unlink()
    assert composed.config.cluster.scratch == "/shared/runs/x"
    assert "$" not in json.dumps(composed.origins)
