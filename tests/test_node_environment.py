"""A job's environment is the table's, built from nothing: no more, no less, whatever the agent itself has."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_fixture import SLURM, SYSTEM_PATH, TOKEN, USER, Run, job_spec, make_run

from tuneplane.kernel import env
from tuneplane.kernel.errors import OperationError
from tuneplane.kernel.unpack import KERNEL_FOLDER as KERNEL_FOLDER_OF_CAPSULE
from tuneplane.node.allocation import read_allocation
from tuneplane.node.environment import (
    KERNEL_FOLDER,
    Place,
    data_folders,
    job_environment,
    read_secrets,
    render_secrets,
)
from tuneplane.spec import Container, Image, JobSpec

OF_BASH = {"PWD", "SHLVL", "_"}
SITE = {
    "HF_HOME": "/cache/hf",
    "IMAGENET_DATA_DIR": "/data/imagenet",
    "TUNEPLANE_JOB_JUDGE_URL": "http://judge",
}
SHELL = {
    "PATH": "/home/ada/bin",
    "PYTHONPATH": "/home/ada/lib",
    "VIRTUAL_ENV": "/home/ada/venv",
    "LD_LIBRARY_PATH": "/home/ada/lib",
    "CONDA_PREFIX": "/home/ada/conda",
    "TUNEPLANE_OUT_DIR": "/home/ada/out",
    "TUNEPLANE_CONFIG_DIR": "/home/ada/config",
    "AWS_SECRET_ACCESS_KEY": "planted",
    "CUDA_VISIBLE_DEVICES": "5",
    "BASH_FUNC_ls%%": "() { echo planted; }",
}
"""What a careless submitting shell has; none of it may arrive."""


def place(work: str = "/scratch/run/work", attempt: int = 0) -> Place:
    return Place(Path(work), "/tmp", "/home/ada", attempt, "10.0.0.1", 20_001, "/s/runs/ada/ring/r/out")


def environment(job: JobSpec, agent: dict[str, str] | None = None, **more: str) -> dict[str, str]:
    agent = agent or {}
    secrets = {**dict.fromkeys(job.spec.node.secrets, "a secret"), env.TOKEN: TOKEN}
    given = read_allocation(job, agent, "n1")
    return job_environment(job, given, place(), {**agent, **more}, secrets)


def spec(folder: Path = Path("/s/runs/ada/ring/r"), **more: Any) -> JobSpec:
    return job_spec(folder, "ring-20261129-120000-0000", scratch=Path("/scratch"), **more)


IMAGE = Container("apptainer", image=Image("/i.sif", "--image", "/i.sif", "2" * 64))
SLURM_SAYS = {
    "SLURM_JOB_ID": "4242",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_CPUS_ON_NODE": "16",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_ACCOUNT": "not-in-the-table",
}

CASES: dict[str, dict[str, Any]] = {
    "a plain run here": {"scheduler": "local"},
    "on Slurm": {},
    "on Slurm with GPUs": {"device": "gpu", "per_node": 2},
    "in a container": {"container": IMAGE},
    "a platform recipe": {"observability": "platform", "url": None},
    "a platform recipe in a container": {"observability": "platform", "url": None, "container": IMAGE},
    "without ingest": {"reporting": False},
    "with an empty URL": {"url": ""},
    "with what a site sets": {"environment": SITE, "secrets": ["HF_TOKEN", "TUNEPLANE_JOB_SANDBOX_KEY"]},
}


def promised(job: JobSpec) -> set[str]:
    """The names that the table promises this job, the patterns of what a site sets left to the test."""
    held = {
        env.ALWAYS: True,
        env.INGEST: job.spec.reporting.enabled,
        env.URL: job.spec.framework.observability_url is not None,
        env.PLATFORM: job.spec.framework.observability == "platform",
        env.BARE: job.spec.container.runtime == "none",
        env.SLURM: job.spec.resources.scheduler == "slurm",
        env.GPU: job.spec.resources.device == "gpu",
        env.SITE: False,
        env.BRIDGE: job.spec.framework.observability == "platform" and job.spec.reporting.enabled,
    }
    return {variable.name for variable in env.VARIABLES if held[variable.when]}


@pytest.mark.contract("C9")
@pytest.mark.parametrize("case", CASES)
def test_a_job_has_every_variable_of_the_table_and_no_other(case: str) -> None:
    job = spec(**CASES[case])
    agent = dict(SHELL)
    if job.spec.resources.scheduler == "slurm":
        agent |= SLURM_SAYS
    values = environment(job, agent)
    site = {*job.spec.node.environment, *job.spec.node.secrets}
    assert set(values) - site == promised(job)
    assert site <= set(values)


def test_each_name_of_the_table_is_reached_by_one_of_these_cases() -> None:
    reached = set().union(*(promised(spec(**case)) for case in CASES.values()))
    by_site = {v.name for v in env.VARIABLES if v.when in (env.SITE,)}
    assert reached == {v.name for v in env.VARIABLES} - by_site


@pytest.mark.contract("C9")
def test_what_each_variable_says() -> None:
    job = spec(nodes=2, per_node=8, device="gpu", profile="h200:16")
    agent = {**SLURM_SAYS, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    values = environment(job, agent)
    assert {name: values[name] for name in promised(job)} == {
        "TUNEPLANE_WORK_DIR": "/scratch/run/work",
        "TUNEPLANE_EXP_DIR": "/scratch/run/work/experiments/ring",
        "TUNEPLANE_OUT_DIR": "/s/runs/ada/ring/r/out",
        "TUNEPLANE_FRAMEWORK": "custom",
        "TUNEPLANE_RECIPE": "custom",
        "TUNEPLANE_CLUSTER_NUM_NODES": "2",
        "TUNEPLANE_CLUSTER_GPUS_PER_NODE": "4",  # given, not asked
        "TUNEPLANE_MACHINE_RANK": "1",
        "TUNEPLANE_MACHINE_COUNT": "2",
        "TUNEPLANE_MAIN_PROCESS_IP": "10.0.0.1",
        "TUNEPLANE_MAIN_PROCESS_PORT": "20001",
        "CLUSTER_PROFILE": "h200:16",
        "TUNEPLANE_RECIPE_VERSION": "1.0.0",
        "TUNEPLANE_RECIPE_DIGEST": "sha256:" + "1" * 64,
        "TUNEPLANE_CAPSULE_DIGEST": "sha256:" + "0" * 64,
        "TUNEPLANE_PARAMS_FILE": "/s/runs/ada/ring/r/attempts/0/params.json",
        "TUNEPLANE_STOP_FILE": "/s/runs/ada/ring/r/attempts/0/stop",
        "TUNEPLANE_JOB_ATTEMPT": "0",
        "TUNEPLANE_JOB_ENDPOINT": "file:///s/runs/ada/ring/r/ingest",
        "TUNEPLANE_JOB_RUN_ID": "ring-20261129-120000-0000",
        "TUNEPLANE_JOB_TOKEN": TOKEN,
        "TUNEPLANE_JOB_ENABLED": "1",
        "TUNEPLANE_EXTERNAL_OBSERVABILITY_URL": "https://wandb.example/my-proj",
        "NRL_RUN_ID": "ring-20261129-120000-0000",
        "HOME": "/home/ada",
        "USER": USER,
        "LOGNAME": USER,
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "PATH": SYSTEM_PATH,
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_CPUS_ON_NODE": "16",
    }


@pytest.mark.contract("C10")
def test_nothing_of_the_shell_that_submitted_reaches_the_job() -> None:
    values = environment(spec(), {**SHELL, **SLURM_SAYS})
    assert values["PATH"] == SYSTEM_PATH
    assert not set(SHELL.values()) & set(values.values())


def test_an_empty_list_of_gpus_is_passed_on_as_it_is() -> None:
    """Left away, it would show the trainer every GPU of the node."""
    job = spec(device="gpu", per_node=2)
    assert environment(job, {**SLURM_SAYS, "CUDA_VISIBLE_DEVICES": ""})["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.contract("C24")
def test_a_platform_recipe_finds_the_kernel_first_on_pythonpath() -> None:
    job = spec(observability="platform", url=None)
    values = environment(job, SLURM_SAYS)
    assert values["PYTHONPATH"] == "/scratch/run/work/.tuneplane/kernel"
    assert KERNEL_FOLDER == KERNEL_FOLDER_OF_CAPSULE


def test_what_modules_made_reaches_a_job_without_a_container_and_nothing_else_does() -> None:
    slurm = dataclasses.replace(SLURM, modules=["cuda"])
    made = {"CUDA_HOME": "/sw/cuda", "PATH": "/sw/cuda/bin:/usr/bin", "LD_LIBRARY_PATH": "/sw/cuda/lib64"}
    agent = {
        **SLURM_SAYS,
        **made,
        "SRUN_DEBUG": "3",
        "PMIX_RANK": "0",
        "SLURMD_NODENAME": "n1",
        "CUDA_VISIBLE_DEVICES": "0",
        "PWD": "/somewhere",
        "SHLVL": "2",
        "_": "/usr/bin/srun",
        "BASH_FUNC_module%%": "() {  eval `modulecmd bash $*`\n}",  # no program could be given such a name
        "BASH_FUNC_ml()": "() {  module $*\n}",
    }
    job = spec(slurm=slurm)
    values = environment(job, agent)
    assert set(values) == promised(job) | set(made)
    assert {name: values[name] for name in made} == made
    platform = spec(slurm=slurm, observability="platform", url=None)
    values = environment(platform, {**agent, "PYTHONPATH": "/sw/python/lib"})
    assert values["PYTHONPATH"] == "/scratch/run/work/.tuneplane/kernel:/sw/python/lib"
    contained = spec(slurm=slurm, container=IMAGE)
    assert not set(made) & set(environment(contained, agent))


def test_a_site_changes_nothing_that_the_agent_sets() -> None:
    job = spec(
        environment={"TUNEPLANE_OUT_DIR": "/elsewhere", "NCCL_SOCKET_IFNAME": "ib0", "HOME": "/nowhere"}
    )
    values = environment(job, SLURM_SAYS)
    assert values["TUNEPLANE_OUT_DIR"] == "/s/runs/ada/ring/r/out"
    assert (values["NCCL_SOCKET_IFNAME"], values["HOME"]) == ("ib0", "/home/ada")


def test_a_secret_that_is_not_in_the_file_is_told_with_its_name_and_the_remedy() -> None:
    job = spec(secrets=["HF_TOKEN"])
    given = read_allocation(job, SLURM_SAYS, "n1")
    with pytest.raises(OperationError) as refused:
        job_environment(job, given, place(), SLURM_SAYS, {"OTHER": "x"})
    assert str(refused.value) == (
        "HF_TOKEN, TUNEPLANE_JOB_TOKEN not in secrets.env\n  → tp job retry ring-20261129-120000-0000"
    )


NASTY = {
    "PLAIN": "x",
    "EMPTY": "",
    "QUOTES": 'it\'s "so" $HOME `id` \\',
    "LINES": "-----BEGIN-----\nabc=\n#no comment\n-----END-----\n",
    "UNICODE": "秘密 ключ",
    "BYTES": os.fsdecode(b"\xff\xfe key"),
    "EQUALS": "a=b=c==",
}


def test_secrets_of_any_form_come_back_from_the_file_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "secrets.env"
    path.write_bytes(render_secrets(NASTY).encode("utf-8", "surrogateescape"))
    assert read_secrets(path) == NASTY
    assert read_secrets(tmp_path / "none") == {}


def test_a_damaged_secrets_file_is_told_without_its_text(tmp_path: Path) -> None:
    path = tmp_path / "ring-20261129-120000-0000" / "secrets.env"
    path.parent.mkdir()
    path.write_text("HF_TOKEN='hf_planted")
    with pytest.raises(OperationError) as refused:
        read_secrets(path)
    assert "hf_planted" not in str(refused.value)
    assert "tp job retry ring-20261129-120000-0000" in str(refused.value)


def test_the_folders_of_site_variables_are_those_to_mount() -> None:
    values = {
        **SITE,
        "WMT_DATA_DIR": "/data/wmt",
        "RELATIVE_DATA_DIR": "data",
        "DATA_DIRS": "/x",
        "A_DATA_DIR_B": "/y",
    }
    assert data_folders(values) == ["/cache/hf", "/data/imagenet", "/data/wmt"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = make_run(
        tmp_path,
        'env -0 >"$TUNEPLANE_OUT_DIR/env"; cat "$TUNEPLANE_PARAMS_FILE" >"$TUNEPLANE_OUT_DIR/params"',
        hyperparams={"lr": 0.1, "name": "a b\n实验", "deep": [1, None]},
        secrets={"HF_TOKEN": NASTY["LINES"]},
        environment=SITE,
    )
    yield made
    made.kill_all()


@pytest.mark.contract("C10")
def test_a_real_job_prints_the_table_and_what_bash_adds(run: Run) -> None:
    assert run.run_once(**SHELL).returncode == 0, run.log()
    printed = (run.folder.out / "env").read_bytes().decode().split("\0")
    values = dict(word.split("=", 1) for word in printed if word)
    assert set(values) == promised(run.job) | set(SITE) | {"HF_TOKEN"} | OF_BASH
    assert values["HF_TOKEN"] == NASTY["LINES"]
    assert values["TUNEPLANE_OUT_DIR"] == str(run.folder.out)
    assert values["PWD"] == values["TUNEPLANE_WORK_DIR"] == str(run.scratch().work)


def test_parameters_are_a_json_file(run: Run) -> None:
    assert run.run_once().returncode == 0
    assert json.loads((run.folder.out / "params").read_text()) == run.job.spec.hyperparams
