"""Values that no cluster takes: all of them told at once, by file and line."""

from __future__ import annotations

import pytest
from compose_folders import Folders, folders, h200, split

__all__ = ["folders", "h200"]


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
