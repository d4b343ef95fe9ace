"""What a user writes in configuration folders, and what `tp` makes of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tuneplane.compose.layers as layers_module
from tuneplane.compose import Composed, compose, list_profiles, machine, parse_mount, render_config
from tuneplane.compose.interpolation import resolve
from tuneplane.compose.tree import Statement, built_in
from tuneplane.kernel.errors import Fault, OperationError, TunePlaneError, UsageError

H200 = """\
defaults:
  - /container@container: apptainer
  - _self_
scheduler: slurm
device: gpu
gpus_per_node: 8
storage_root: /shared/runs
slurm:
  partition: gpu
"""


class Folders:
    """A site's, a user's and a lab's configuration, and the shell that `tp` is called from."""

    def __init__(self, root: Path) -> None:
        self.site, self.home, self.lab = root / "etc site", root / "home", root / "lab"
        self.user = self.home / ".config" / "tuneplane"
        for folder in (self.site, self.user, self.lab / "configs"):
            folder.mkdir(parents=True)
        self.environ = {"HOME": str(self.home), "USER": "alice", "TUNEPLANE_CONFIG_DIR": str(self.site)}

    def write(self, layer: str, name: str, text: str) -> Path:
        folder = {"site": self.site, "user": self.user, "lab": self.lab / "configs"}[layer]
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    def compose(self, profile: str = "h200", **flags: tuple[str, object]) -> Composed:
        given = {key.replace("__", "."): value for key, value in flags.items()}
        return compose(profile, lab_root=self.lab, flags=given, environ=self.environ)

    def refusal(self, profile: str = "h200", **flags: tuple[str, object]) -> str:
        with pytest.raises(UsageError) as caught:
            self.compose(profile, **flags)
        return str(caught.value)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


@pytest.fixture
def h200(folders: Folders) -> Folders:
    """A site with one cluster profile."""
    folders.write("site", "cluster/h200", H200)
    return folders


# --- layers


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


# --- profiles


def test_profiles_of_every_folder_are_listed_without_hydra(h200: Folders) -> None:
    h200.write("user", "cluster/mine", "defaults: [h200]\n")
    h200.write("site", "cluster/_parts", "heartbeat_s: 3\n")
    h200.write("site", "cluster/bad name", "heartbeat_s: 3\n")
    code = (
        "import json, os, sys; from pathlib import Path; from tuneplane.compose import list_profiles;"
        f"print(json.dumps(list_profiles(Path({str(h200.lab)!r}), dict(os.environ))));"
        "heavy = {'hydra', 'omegaconf', 'submitit', 'torch'} & set(sys.modules); assert not heavy, heavy"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=h200.environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == ["h200", "local", "mine"]


def test_an_unknown_profile_is_answered_with_the_nearest(h200: Folders) -> None:
    assert "there is no cluster profile 'h20'\n  → did you mean h200?" in h200.refusal("h20")
    assert "known: h200, local" in h200.refusal("zzz:8")


def test_a_file_that_ends_in_yml_is_pointed_at(h200: Folders) -> None:
    (h200.user / "cluster").mkdir()
    (h200.user / "cluster" / "mine.yml").write_text("scheduler: slurm\n")
    assert "mine.yml to mine.yaml" in h200.refusal("mine")


def test_the_example_is_documentation_and_says_where_to_copy_it(folders: Folders) -> None:
    message = folders.refusal("example")
    assert "configs/cluster/example.yaml: the profile `example` is documentation" in message
    assert f"copy it to {folders.site}/cluster/NAME.yaml" in message


def test_the_example_copied_asks_for_what_is_left_open_and_then_works(folders: Folders) -> None:
    from tuneplane.packaged import packaged_configs

    text = (packaged_configs() / "cluster" / "example.yaml").read_text()
    path = folders.write("site", "cluster/big", text)
    line = 1 + text.splitlines().index("  partition: ???")
    assert (
        folders.refusal("big") == f"{path}:{line}: cluster.slurm.partition is still ???\n  → give it a value"
    )
    cluster = folders.compose("big:16", cluster__slurm__partition=("--partition", "gpu")).config.cluster
    assert cluster.storage_root == "/scratch/alice/tuneplane"
    assert cluster.container.binary == "/usr/bin/apptainer"


def test_a_profile_is_called_as_its_file_is(h200: Folders) -> None:
    path = h200.write("user", "cluster/mine", "defaults: [h200]\nname: other\n")
    assert f"{path}:2: cluster.name is 'other'" in h200.refusal("mine")
    h200.write("user", "cluster/mine", "defaults: [h200]\nname: mine\n")
    assert h200.compose("mine").config.cluster.name == "mine"


def test_a_profile_that_never_says_where_it_runs_is_refused(folders: Folders) -> None:
    folders.write("user", "cluster/half", "slurm: {account: me}\n")
    message = folders.refusal("half")
    assert "cluster.scheduler is set by no file of profile half" in message
    assert "cluster.device is set by no file of profile half" in message


@pytest.mark.parametrize(
    ("profile", "runtime", "partition", "device"),
    [
        ("h200", "apptainer", "gpu", "gpu"),
        ("h200-bare", "none", "gpu", "gpu"),
        ("preempt", "apptainer", "preempt", "gpu"),
        ("cpu", "none", "gpu", "cpu"),
    ],
)
def test_the_testbeds_profiles_compose(
    tmp_path: Path, profile: str, runtime: str, partition: str, device: str
) -> None:
    source = Path(__file__).parent.parent / "slurm" / "testbed" / "config"
    for path in source.rglob("*.yaml"):
        target = tmp_path / "site" / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text().replace("@SHARED@", "/shared"))
    environ = {"HOME": "/home/alice", "USER": "alice", "TUNEPLANE_CONFIG_DIR": str(tmp_path / "site")}
    assert list_profiles(None, environ) == ["cpu", "h200", "h200-bare", "local", "preempt"]
    cluster = compose(profile, lab_root=None, flags={}, environ=environ).config.cluster
    assert (cluster.container.runtime, cluster.slurm.partition, cluster.device) == (
        runtime,
        partition,
        device,
    )
    assert cluster.storage_root == "/shared/home/alice/tuneplane"
    assert cluster.scheduler == "slurm"


# --- this machine


def test_this_machine_without_a_gpu_runs_processes(folders: Folders, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    composed = folders.compose("local")
    cpus = len(os.sched_getaffinity(0))
    assert composed.config.cluster.device == "cpu"
    assert composed.config.cluster.gpus_per_node == composed.config.cluster.cpus_per_node == cpus
    assert composed.origins["cluster.device"] == "this machine: no NVIDIA GPU"


def test_this_machine_with_gpus_runs_on_them(folders: Folders, tmp_path: Path, monkeypatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    composed = folders.compose("local")
    assert (composed.config.cluster.device, composed.config.cluster.gpus_per_node) == ("gpu", 2)
    assert composed.origins["cluster.device"] == "this machine: 2 NVIDIA GPUs"
    folders.environ["CUDA_VISIBLE_DEVICES"] = "1"
    assert folders.compose("local").config.cluster.gpus_per_node == 1
    folders.environ["CUDA_VISIBLE_DEVICES"] = ""
    assert folders.compose("local").config.cluster.device == "cpu"


def test_a_driver_without_device_files_is_asked(folders: Folders, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(machine, "DEVICES", tmp_path / "none")
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
    program.chmod(0o755)
    folders.environ["PATH"] = f"{program.parent}:/bin:/usr/bin"
    assert folders.compose("local").config.cluster.device == "gpu"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert folders.compose("local").config.cluster.device == "cpu"


def test_a_gpu_that_was_asked_for_and_is_not_here_is_told(
    folders: Folders, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    folders.write("user", "cluster/local", "device: gpu\n")
    assert "this machine: no NVIDIA GPU: cluster.gpus_per_node is 0" in folders.refusal("local")


# --- interpolation and secrets


def test_interpolations_become_plain_values_of_the_keys_type(h200: Folders) -> None:
    h200.environ["N"] = "6"
    h200.write(
        "user",
        "defaults",
        r"""
        cluster:
          storage_root: /scratch/${oc.env:USER}/runs
          scratch: ${oc.env:NOT_SET,/node}
          default_gpus: ${oc.env:N}
          max_nodes: ${cluster.default_gpus}
          cpus_per_node: ${.gpus_per_node}
          mounts: ['${cluster.scratch}:/s', '/a\${b}:/c']
          environment: {WHO: '${oc.env:USER}-${cluster.slurm.partition}'}
        """,
    )
    cluster = h200.compose(cluster__slurm__partition=("--partition", "flag")).config.cluster
    assert cluster.storage_root == "/scratch/alice/runs"
    assert (cluster.default_gpus, cluster.max_nodes, cluster.cpus_per_node) == (6, 6, 8)
    assert cluster.mounts == ["/node:/s", "/a${b}:/c"]
    assert cluster.environment == {"WHO": "alice-flag"}


def test_the_environment_that_is_read_is_the_users_not_the_processes(h200: Folders, monkeypatch) -> None:
    monkeypatch.setenv("USER", "somebody-else")
    h200.write("user", "defaults", "cluster: {storage_root: '/s/${oc.env:USER}'}\n")
    assert h200.compose().config.cluster.storage_root == "/s/alice"


def test_what_cannot_be_resolved_names_file_and_key(h200: Folders) -> None:
    path = h200.write(
        "user",
        "defaults",
        """
        cluster:
          storage_root: ${oc.env:NOWHERE}
          scratch: ${cluster.nothing}
          python: ${cluster.python}
          path: ${oc.env
          default_gpus: ${oc.env:USER}
          mounts: ${cluster.scheduler}
          environment: ${site.environment}
          description: ${nonsense:1}
        """,
    )
    message = h200.refusal()
    for line, words in (
        (3, "cluster.storage_root cannot be resolved: the environment has no variable NOWHERE"),
        (4, "cluster.scratch cannot be resolved"),
        (5, "cluster.python cannot be resolved"),
        (6, "cluster.path cannot be resolved"),
        (7, "cluster.default_gpus is, after interpolation, wrong: 'alice' is not a whole number"),
        (8, "cluster.mounts is, after interpolation, wrong: 'slurm' is not a list of texts"),
        (9, "cluster.environment is not a mapping of names to texts"),
        (10, "cluster.description cannot be resolved"),
    ):
        assert re.search(rf"{re.escape(str(path))}:{line}: .*{re.escape(words)}", message), words


@pytest.mark.contract("C11")
@pytest.mark.parametrize(
    "text",
    [
        "cluster: {environment: {A: '${oc.env:HF_TOKEN}'}}",
        "cluster: {environment: {A: '${oc.env:HF_TOKEN,none}'}}",
        "cluster: {environment: {A: 'x-${oc.decode:${oc.env:hf_token}}'}}",
        "cluster: {environment: {A: '${oc.env:${cluster.description}}'}, description: HF_TOKEN}",
        "cluster: {environment: {A: '${oc.env:HF_${cluster.description}}'}, description: TOKEN}",
        "cluster: {environment: {A: '${oc.select:none,${oc.env:\"HF_TOKEN\"}}'}}",
        "cluster: {environment: {A: '${${cluster.description}:HF_TOKEN}'}, description: oc.env}",
        "cluster: {mounts: ['/${oc.env:MY_PASSWORD_FILE}:/x']}",
        "cluster: {slurm: {account: '${oc.env:AWS_SECRET}'}}",
        "cluster: {slurm: {account: '${oc.env:deploy_key}'}}",
        "cluster: {slurm: {account: '${oc.env:GCP_CREDENTIALS}'}}",
        "cluster: {description: '${oc.env:SITES_OWN}'}",
        "defaults: [override /container@cluster.container: '${oc.env:HF_TOKEN}']",
    ],
)
def test_no_secret_is_interpolated_in_any_nesting(h200: Folders, text: str) -> None:
    names = ("HF_TOKEN", "hf_token", "MY_PASSWORD_FILE", "AWS_SECRET", "deploy_key", "GCP_CREDENTIALS")
    h200.environ.update(dict.fromkeys((*names, "SITES_OWN"), "none"))
    h200.write("site", "site/default", "secrets: [SITES_OWN]\n")
    path = h200.write("lab", "defaults", text + "\n")
    message = h200.refusal()
    assert f"{path}:1: " in message
    assert "whose name says that it is a secret" in message


@pytest.mark.contract("C11")
def test_a_secret_is_refused_where_its_value_would_not_even_be_used(h200: Folders) -> None:
    path = h200.write("user", "defaults", "cluster:\n  description: ${oc.env:HF_TOKEN}\n")
    h200.write("lab", "defaults", "cluster: {description: plain}\n")
    assert f"{path}:2: cluster.description interpolates HF_TOKEN" in h200.refusal()


def test_a_flag_and_an_environment_variable_are_no_templates(h200: Folders) -> None:
    h200.environ["SBATCH_JOB_NAME"] = "a\\${oc.env:USER}"
    h200.write("user", "defaults", "cluster: {description: '${cluster.slurm.job_name}'}\n")
    composed = h200.compose(
        cluster__mounts=("--mount", ["/we${ird}:/x"]), cluster__slurm__account=("--account", "${oc.env:USER}")
    )
    assert composed.config.cluster.mounts == ["/we${ird}:/x"]
    assert composed.config.cluster.slurm.account == "${oc.env:USER}"
    assert (
        composed.config.cluster.description == composed.config.cluster.slurm.job_name == "a\\${oc.env:USER}"
    )


# --- flags and SBATCH_*


def test_flags_have_the_last_word_and_lists_are_added_to(h200: Folders) -> None:
    h200.write("user", "defaults", "cluster: {mounts: ['/a:/a'], slurm: {time: 10, exclusive: false}}\n")
    composed = h200.compose(
        cluster__slurm__time=("--time", "02:00:00"),
        cluster__slurm__exclusive=("--exclusive", True),
        cluster__slurm__qos=("--qos", None),
        cluster__mounts=("--mount", ["/b:/b:ro"]),
    )
    slurm = composed.config.cluster.slurm
    assert (slurm.time, slurm.exclusive, slurm.qos) == ("02:00:00", True, None)
    assert composed.config.cluster.mounts == ["/a:/a", "/b:/b:ro"]
    assert composed.origins["cluster.slurm.time"] == "--time"
    assert composed.origins["cluster.mounts"].endswith("defaults.yaml:1 and --mount")


def test_a_wrong_flag_is_named(h200: Folders) -> None:
    message = h200.refusal(
        cluster__slurm__time=("--time", "soon"),
        cluster__mounts=("--mount", ["/a", "b:/c"]),
        cluster__slurm__dependency=("--dependency", "after:x"),
        cluster__slurm__mail_type=("--mail-type", "SOMETIMES"),
        cluster__slurm__job_name=("--job-name", "a\n#SBATCH --uid=0"),
        cluster__max_nodes=("--max", "many"),
    )
    for words in (
        "--time: cluster.slurm.time is 'soon': must be a time",
        "--mount: cluster.mounts: '/a' must be SRC:DST",
        "--mount: cluster.mounts: 'b:/c' must hold absolute paths",
        "--dependency: cluster.slurm.dependency is 'after:x'",
        "--mail-type: cluster.slurm.mail_type is 'SOMETIMES'",
        "--job-name: cluster.slurm.job_name holds a line break or control character ('\\n')",
        "--max: 'many' is not a whole number",
    ):
        assert words in message


def test_the_users_sbatch_variables_stand_over_files_and_under_flags(h200: Folders) -> None:
    h200.environ |= {
        "SBATCH_PARTITION": "mine",
        "SBATCH_TIMELIMIT": "1-0",
        "SBATCH_ACCOUNT": "acc",
        "SBATCH_QOS": "",
        "SBATCH_EXCLUSIVE": "exclusive",
        "SBATCH_WCKEY": "w",
        "SBATCH_MEM_PER_NODE": "4G",
        "SBATCH_EXPORT": "ALL",
        "SLURM_JOB_ID": "1",
    }
    composed = h200.compose(cluster__slurm__account=("--account", "flag"))
    slurm = composed.config.cluster.slurm
    assert (slurm.partition, slurm.time, slurm.account, slurm.qos) == ("mine", "1-0", "flag", None)
    assert slurm.exclusive
    assert slurm.extra_directives == {"wckey": "w"}
    assert composed.origins["cluster.slurm.partition"] == "$SBATCH_PARTITION"
    assert "# $SBATCH_PARTITION" in render_config(composed)
    assert [notice.split("=")[0] for notice in composed.notices] == ["$SBATCH_EXPORT", "$SBATCH_MEM_PER_NODE"]


def test_a_wrong_sbatch_variable_is_named(h200: Folders) -> None:
    h200.environ["SBATCH_TIMELIMIT"] = "a while"
    assert "$SBATCH_TIMELIMIT: cluster.slurm.time is 'a while'" in h200.refusal()


def test_sbatch_variables_mean_nothing_on_this_machine(folders: Folders) -> None:
    folders.environ |= {"SBATCH_PARTITION": "gpu", "SBATCH_EXPORT": "ALL"}
    composed = folders.compose("local")
    assert composed.config.cluster.slurm.partition is None
    assert composed.notices == ()


# --- files with faults


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("cluster:\n  slurm: {partition: gpu\n", 3, "not YAML"),
        ("cluster:\n\tslurm: 1\n", 2, "not YAML"),
        ("a: b: c\n", 1, "not YAML"),
        ("- cluster\n", 1, "must be a mapping"),
        ("just text\n", 1, "must be a mapping"),
        ("cluster: {}\n---\ncluster: {}\n", 2, "not YAML"),
        ("cluster:\n  scratch: /a\n  scratch: /b\n", 3, "the key scratch stands twice, first in line 2"),
        ("cluster: !!python/object:os.system {}\n", 1, "the YAML tag"),
        ("cluster: &a\n  slurm: *a\n", 1, "is nested in itself"),
        ("x: &x {a: 1}\ncluster:\n  <<: *x\n", 3, "<< is not read here"),
        ("? [a, b]\n: c\n", 1, "a key must be plain text"),
        (
            "cluster:\n  slurm:\n    partitoin: gpu\n",
            3,
            "unknown key cluster.slurm.partitoin\n  → did you mean",
        ),
        ("clutser: {}\n", 1, "unknown key clutser\n  → did you mean cluster?"),
        ("hydra:\n  run: {dir: x}\n", 1, "unknown key hydra"),
        ("cluster:\n  slurm: gpu\n", 2, "cluster.slurm is not a mapping of keys"),
        ("cluster:\n  mounts: /a:/a\n", 2, "cluster.mounts is not a list of texts\n  → write [a, b]"),
        ("cluster:\n  mounts: [[a]]\n", 2, "cluster.mounts has an item that is not text"),
        ("cluster:\n  mounts: [null]\n", 2, "cluster.mounts has an item that is not text"),
        ("cluster:\n  environment: [A=1]\n", 2, "cluster.environment is not a mapping of names to texts"),
        ("cluster:\n  environment: {A: [1]}\n", 2, "cluster.environment.A is not text"),
        ("cluster:\n  scratch: {a: b}\n", 2, "cluster.scratch is not text"),
        ("cluster:\n  gpus_per_node: eight\n", 2, "cluster.gpus_per_node: 'eight' is not a whole number"),
        ("cluster:\n  gpus_per_node: 8.5\n", 2, "'8.5' is not a whole number"),
        ("cluster:\n  gpus_per_node: true\n", 2, "'true' is not a whole number"),
        ("cluster:\n  heartbeat_s: .nan\n", 2, "'.nan' is not a number"),
        ("cluster:\n  slurm: {exclusive: maybe}\n", 2, "'maybe' is not true or false"),
        ("cluster:\n  scratch:\n", 2, "cluster.scratch has no value"),
    ],
)
def test_a_faulty_file_is_told_with_its_line(h200: Folders, text: str, line: int, words: str) -> None:
    path = h200.write("lab", "defaults", text)
    message = h200.refusal()
    assert any(fault.startswith(f"{path}:{line}: ") and words in fault for fault in split(message)), message


def split(message: str) -> list[str]:
    """The faults of a message, each with its remedy."""
    return re.split(r"\n(?!  → )", message)


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"a: \x00\n", b"cluster: {}\n" * 200_000, b"[" * 100_000])
def test_a_file_that_is_no_configuration_at_all(h200: Folders, data: bytes) -> None:
    path = h200.user / "defaults.yaml"
    path.write_bytes(data)
    assert str(path) in h200.refusal()


def test_aliases_that_would_explode_are_read_in_no_time(h200: Folders) -> None:
    lines = ["x0: &x0 [a, a]"] + [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, 30)]
    h200.write("user", "defaults", "\n".join(lines) + "\n")
    assert "unknown key x0" in h200.refusal()


def test_a_pipe_and_a_folder_in_place_of_a_file(h200: Folders) -> None:
    os.mkfifo(h200.user / "defaults.yaml")
    assert "is not a regular file" in h200.refusal()
    (h200.user / "defaults.yaml").unlink()
    (h200.user / "defaults.yaml").mkdir()
    with pytest.raises(TunePlaneError, match=r"defaults\.yaml"):
        h200.compose()


def test_a_link_to_nowhere_is_told(h200: Folders) -> None:
    (h200.user / "defaults.yaml").symlink_to("gone.yaml")
    with pytest.raises(OperationError, match=r"defaults\.yaml: cannot be read"):
        h200.compose()


def as_nobody(function) -> str:
    """What an ordinary user is told: tests run as root, whom no mode keeps out."""
    if os.geteuid() != 0:
        with pytest.raises(OperationError) as caught:
            function()
        return str(caught.value)
    os.setegid(65534)
    os.seteuid(65534)
    try:
        with pytest.raises(OperationError) as caught:
            function()
    finally:
        os.seteuid(0)
        os.setegid(0)
    return str(caught.value)


def test_an_unreadable_folder_or_file_ends_with_exit_1(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("unreadable")
    for folder in (root, *list(root.parents)[:2]):
        folder.chmod(0o755)
    folders = Folders(root)
    file = folders.write("site", "cluster/h200", H200)
    file.chmod(0o000)
    assert f"{file}: cannot be read: Permission denied" in as_nobody(folders.compose)
    file.chmod(0o644)
    (folders.site / "cluster").chmod(0o000)
    assert f"{file}: cannot be read: Permission denied" in as_nobody(folders.compose)
    (folders.site / "cluster").chmod(0o755)
    folders.site.chmod(0o000)
    assert f"{folders.site}: cannot be read: Permission denied" in as_nobody(folders.compose)
    folders.site.chmod(0o755)


@pytest.mark.parametrize(
    ("defaults", "words"),
    [
        (
            "[/container@container: aptainer]",
            "names container/aptainer, and no layer has a container/aptainer.yaml",
        ),
        ("[/container@container: aptainer]", "did you mean apptainer?"),
        ("[nowhere]", "names cluster/nowhere"),
        ("[h200]", "leads back to itself"),
        ("[../../../../etc/passwd]", "no layer has"),
        ("[override /fabric@environment: ib]", "cannot be followed"),
        ("[{a: b, c: d}]", "cannot be followed"),
        ("[[a]]", "cannot be followed"),
        ("{container: none}", "cannot be followed"),
        ("none", "cannot be followed"),
        ("[/container@container: none, /container@container: apptainer]", "cannot be followed"),
        ("[/container@slurm.nothing: none]", "would land under cluster.slurm.nothing"),
        ("['${oc.env']", "cannot be followed"),
        ("[/container@container: {a: b}]", "cannot be followed"),
        ("[_self_, _self_]", "cannot be followed"),
    ],
)
def test_a_defaults_list_that_leads_nowhere(h200: Folders, defaults: str, words: str) -> None:
    path = h200.write("lab", "cluster/h200", f"scratch: /lab\ndefaults: {defaults}\n")
    message = h200.refusal()
    assert words in message
    assert str(path) in message or words.startswith("would land")


def test_thirty_faults_are_told_at_once_from_the_top_of_each_file(h200: Folders) -> None:
    bad_site = h200.write(
        "site",
        "site/default",
        """
        locked: [cluster.conatiner]
        allowed_registries: [https://registry.example.com, ok.example.com:5000, user@host]
        image_folders: [images]
        default_images: {nonsense: x, '*': ''}
        secrets: [1A, PYTHONPATH, TUNEPLANE_JOB_TOKEN]
        environment: {HF_TOKEN: abc, HF_HOME: relative, PATH: /bin, SLURM_X: '1', TUNEPLANE_OUT_DIR: /x}
        capsule_limit_mb: 0
        run_folder_mode: 0777
        caps: {nodes: 0, gpus: -1, walltime: sometime}
        """,
    )
    bad_lab = h200.write(
        "lab",
        "cluster/h200",
        r"""
        gpus_per_node: 0
        max_nodes: 0
        cpus_per_node: lots
        memory_per_node: 1.5TB
        storage_root: runs
        scratch: /a/../b
        python: python3
        path: .:/bin
        mounts: [/a, /a:b, '/a:/b:rx', '/x:/']
        heartbeat_s: 0
        slurm:
          partition: a b
          time: 5 hours
          gpu_request: please
          signal_before_end_s: 0
          extra_directives: {output: x, Nodes: '1', partition: y, --comment: z}
          modules: [-foo]
          srun_options: [mpi, --output=x]
        container: {runtime: dokcer}
        """,
    )
    message = h200.refusal()
    for path, count in ((bad_site, 19), (bad_lab, 25)):
        told = [fault for fault in split(message) if fault.startswith(f"{path}:")]
        assert len(told) == count, message
        lines = [int(fault.removeprefix(f"{path}:").split(":")[0]) for fault in told]
        assert lines == sorted(lines)


@pytest.mark.contract("C11")
def test_a_secret_written_into_a_file_is_refused_and_not_repeated(h200: Folders) -> None:
    path = h200.write("lab", "defaults", "cluster: {environment: {WANDB_API_KEY: hunter2-abc}}\n")
    message = h200.refusal()
    assert f"{path}:1: cluster.environment.WANDB_API_KEY: 'WANDB_API_KEY' must not be a secret's" in message
    assert "hunter2" not in message


def test_faults_of_a_broken_file_and_of_a_sound_one_come_together(h200: Folders) -> None:
    h200.write("user", "defaults", "cluster: {\n")
    h200.write("lab", "defaults", "cluster: {scratch: relative}\n")
    message = h200.refusal()
    assert "not YAML" in message
    assert "must be an absolute path" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("default_gpus: 12", "neither part of one node of 8 nor whole nodes"),
        ("default_gpus: 16\nmax_nodes: 1", "the profile has 8 in all"),
        ("request_memory: true", "needs cluster.memory_per_node"),
        ("mounts: ['/a:/x', '/b:/x/']", "mount two things at /x"),
        ("container: {options: [--fakeroot]}\ndefaults: [/container@container: none]", "have no meaning"),
        ("slurm: {gpu_request: gres, extra_directives: {gres: 'gpu:2'}}", "says again"),
        ("environment: {ROUTE_X: '1'}", "both set ROUTE_X"),
        (
            "slurm: {time: UNLIMITED}",
            "the site allows 1-00:00:00 a run\n  → ask for less, or ask hpc@example.com",
        ),
        ("slurm: {time: 1-00:01}", "the site allows 1-00:00:00 a run"),
    ],
)
def test_values_that_do_not_agree(h200: Folders, text: str, words: str) -> None:
    h200.write(
        "site",
        "site/default",
        "secrets: [ROUTE_X]\ncontact: hpc@example.com\ncaps: {walltime: 1-00:00:00}\n",
    )
    h200.write("lab", "cluster/h200", text + "\n")
    assert words in h200.refusal()


def test_values_mean_what_was_written_not_what_yaml_1_1_makes_of_them(h200: Folders) -> None:
    h200.write("site", "site/default", "run_folder_mode: 0750\n")
    h200.write(
        "user",
        "defaults",
        """
        cluster:
          environment: {A: 1.10, B: on, C: 0x1F, D: 1_000, E: 2026-11-29, F: ~x, G: ''}
          memory_per_node: 1500
          slurm: {time: 12:00:00, account: 0123, partition: no, exclusive: yes, job_name: 1e3}
        """,
    )
    config = h200.compose().config
    assert config.site.run_folder_mode == "0750"
    assert config.cluster.environment == {
        "A": "1.10", "B": "on", "C": "0x1F", "D": "1_000", "E": "2026-11-29", "F": "~x", "G": "",
    }  # fmt: skip
    slurm = config.cluster.slurm
    assert (slurm.time, slurm.account, slurm.partition, slurm.job_name) == ("12:00:00", "0123", "no", "1e3")
    assert slurm.exclusive is True
    assert config.cluster.memory_per_node == "1500"


def test_homes_are_written_out(h200: Folders) -> None:
    h200.write("site", "site/default", "environment: {HF_HOME: ~/hf, X_DATA_DIR: /d//e/, OTHER: ~/x}\n")
    h200.write("user", "defaults", "cluster: {storage_root: '~', scratch: ~root/tmp, mounts: [~/d:/d]}\n")
    config = h200.compose().config
    assert config.cluster.storage_root == str(h200.home)
    assert config.cluster.scratch == "/root/tmp"
    assert config.cluster.mounts == [f"{h200.home}/d:/d"]
    assert config.site.environment == {"HF_HOME": f"{h200.home}/hf", "X_DATA_DIR": "/d/e", "OTHER": "~/x"}
    h200.write("user", "defaults", "cluster: {scratch: ~no-such-user-here/x}\n")
    assert "the home of no-such-user-here" in h200.refusal()


# --- tp config


def test_the_printed_configuration_is_yaml_of_the_same_values_with_origins(h200: Folders) -> None:
    h200.write(
        "user",
        "defaults",
        "cluster:\n  description: 'a: # \"quoted\" ünï'\n  environment: {NCCL_X: 'no', 'Y': '1'}\n"
        "  mounts: ['/a b:/c', '-x:/y']\n".replace(", '-x:/y'", ""),
    )
    composed = h200.compose("h200:16", cluster__slurm__time=("--time", "12:00:00"))
    text = render_config(composed)
    read = yaml.load(text, Loader=yaml.BaseLoader)
    assert read["cluster"]["description"] == 'a: # "quoted" ünï'
    assert read["cluster"]["environment"] == {"NCCL_X": "no", "Y": "1"}
    assert read["cluster"]["mounts"] == ["/a b:/c"]
    strict = yaml.safe_load(text)
    assert strict["cluster"]["environment"]["NCCL_X"] == "no"
    assert strict["cluster"]["slurm"]["time"] == "12:00:00"
    assert strict["cluster"]["gpus_per_node"] == 8
    assert strict["cluster"]["slurm"]["exclusive"] is False
    line = next(line for line in text.splitlines() if line.strip().startswith("partition:"))
    assert line.endswith(f"# {h200.site}/cluster/h200.yaml:9")
    columns = {line.index("  # ") for line in text.splitlines() if "built in" in line}
    assert len(columns) == 1


def test_the_configuration_as_json(h200: Folders) -> None:
    h200.environ["SBATCH_EXPORT"] = "NONE"
    value = json.loads(render_config(h200.compose("h200:16"), as_json=True))
    assert value["profile"] == "h200:16"
    assert value["config"]["cluster"]["slurm"]["partition"] == "gpu"
    assert value["origins"]["cluster.slurm.partition"] == f"{h200.site}/cluster/h200.yaml:9"
    assert [layer["name"] for layer in value["layers"]] == ["packaged", "site", "user", "lab"]
    assert len(value["notices"]) == 1


def test_every_key_has_an_origin(h200: Folders) -> None:
    composed = h200.compose()
    text = render_config(composed)
    headings = ("site:", "cluster:", "caps:", "slurm:", "container:")
    for line in text.splitlines():
        if not line.startswith("#") and line.strip() not in headings and not line.endswith("{}"):
            assert "  # " in line, line


# --- mounts


@pytest.mark.parametrize(
    ("text", "source", "target", "read_only"),
    [
        ("/a:/b", "/a", "/b", False),
        ("/a:/b:ro", "/a", "/b", True),
        ("/a:/b:rw", "/a", "/b", False),
        (r"/a\:1:/b\:2:ro", "/a:1", "/b:2", True),
        (r"/a\\:/b", "/a\\", "/b", False),
        (r"/a\x:/b", "/a\\x", "/b", False),
        ("/a $x'\"%数:/b c", "/a $x'\"%数", "/b c", False),
    ],
)
def test_a_mount_is_read(text: str, source: str, target: str, read_only: bool) -> None:
    mount = parse_mount(text)
    assert (mount.source, mount.target, mount.read_only) == (source, target, read_only)


@pytest.mark.parametrize(
    "text",
    ["", "/a", "/a:", ":/b", "/a:b", "a:/b", "/a:/b:", "/a:/b:x", "/a:/b:ro:ro", "/a/../b:/c", "/a:/", "::"],
)
def test_what_is_no_mount(text: str) -> None:
    with pytest.raises(ValueError, match=r"must|would"):
        parse_mount(text)


# --- anything at all

TEXT = st.sampled_from(
    ["h200", "local", "_self_", "/container@container", "override /site", "optional x", "../x", "", "???", "~",
     "a@b.c:d", "cluster", "hydra/launcher", "/site@cluster", "null", "${cluster}", "${oc.env:HF_TOKEN}", "a b"]
)  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    ANYTHING,
    st.dictionaries(
        st.sampled_from(["slurm", "container", "mounts", "environment", "device", "x"]), ANYTHING
    ),
)
def test_whatever_stands_in_a_file_the_answer_is_a_configuration_or_faults(
    tmp_path_factory: pytest.TempPathFactory, defaults: object, keys: dict[str, object]
) -> None:
    folders = Folders(tmp_path_factory.mktemp("anything"))
    folders.write("site", "cluster/h200", H200)
    text = yaml.safe_dump({"defaults": defaults, **keys}, allow_unicode=True)
    (folders.lab / "configs" / "cluster").mkdir()
    (folders.lab / "configs" / "cluster" / "h200.yaml").write_text(
        text, encoding="utf-8", errors="surrogateescape"
    )
    try:
        composed = folders.compose()
    except UsageError as error:
        assert error.faults
    else:
        assert yaml.safe_load(render_config(composed))


@given(st.text(alphabet="\\${}ab:'\"\n ", max_size=12))
@settings(max_examples=300, deadline=None)
def test_a_literal_value_survives_interpolation_of_others(text: str) -> None:
    key, other = ("cluster", "description"), ("cluster", "storage_root")
    tree = built_in()
    tree[key] = Statement(key, text, "--flag", "flags")
    tree[other] = Statement(other, "${cluster.description}", "file:1", "user", interpolated=True)
    faults: list[Fault] = []
    assert resolve(tree, {}, faults)[other].value == text
    assert not faults
