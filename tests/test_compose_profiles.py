"""Which profiles there are, and what this machine answers when it is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compose_folders import Folders, folders, h200

from tuneplane.compose import compose, list_profiles, machine

__all__ = ["folders", "h200"]


def test_profiles_of_every_folder_are_listed_without_hydra(h200: Folders) -> None:
    h200.write("user", "cluster/mine", "defaults: [h200]\n")
    h200.write("site", "cluster/_parts", "heartbeat_s: 3\n")
    h200.write("site", "cluster/bad name", "heartbeat_s: 3\n")
    code = (
        "import json, os, sys; from pathlib import Path; from tuneplane.compose import list_profiles;"
        f"print(json.dumps(list_profiles(Path({str(h200.lab)!r}), dict(os.environ))));"
        "heavy = {'hydra', 'omegaconf', 'submitit', 'torch', 'yaml'} & set(sys.modules); assert not heavy, heavy"
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
