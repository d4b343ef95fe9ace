"""Whole batch scripts, byte for byte, as a cluster's administrator would read them.

`TUNEPLANE_WRITE_GOLDEN=1 pytest tests/test_launch_golden.py` writes them anew; read the difference.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from launch_jobs import bare_slurm_job, changed, complete_job, local_job
from testbed_client import WEIRD_NAME

from tuneplane.launch.script import local_script
from tuneplane.launch.slurm import SlurmLauncher
from tuneplane.spec import JobSpec

GOLDEN = Path(__file__).parent / "golden"
RUN_ID = "ring-20260114-093012-x3k9"
IMAGE = {
    "reference": "/shared/images/trainer.sif",
    "source": "--image",
    "path": "/shared/images/trainer.sif",
    "sha256": "0123456789abcdef" * 4,
}
CONTAINER = {"spec.container.runtime": "apptainer", "spec.container.image": IMAGE}
WEIRD = f"/shared/{WEIRD_NAME}/runs/alice/ring/{RUN_ID}"

JOBS = {
    "one-node": bare_slurm_job(gpu_request="gpus-per-node"),
    "one-node-container": changed(bare_slurm_job(gpu_request="gpus-per-node"), CONTAINER),
    "four-nodes": changed(bare_slurm_job(gpu_request="gpus-per-node"), {"spec.resources.nodes": 4}),
    "four-nodes-container": changed(
        bare_slurm_job(gpu_request="gpus-per-node", signal_before_end_s=120),
        {**CONTAINER, "spec.resources.nodes": 4, "spec.resources.profile": "h200:32"},
    ),
    "gpus-per-node-of-a-type": bare_slurm_job(gpu_request="gpus-per-node", gpu_type="h200"),
    "gres": bare_slurm_job(gpu_request="gres"),
    "gres-of-a-type": bare_slurm_job(gpu_request="gres", gpu_type="h200"),
    "gpus-not-asked-for": bare_slurm_job(gpu_request="none", gpu_type="h200"),
    "cpu": changed(
        bare_slurm_job(gpu_request="gpus-per-node"),
        {
            "spec.resources.device": "cpu",
            "spec.resources.gpus_per_node": 2,
            "spec.resources.cpus_per_node": 4,
        },
    ),
    "modules": bare_slurm_job(modules=["gcc/12", "cuda/12.4"]),
    "extra-directives": bare_slurm_job(
        extra_directives={"comment": "a 'note' of 5%", "requeue": "", "mem": "0", "licenses": "matlab:1"}
    ),
    "no-signal": bare_slurm_job(signal_before_end_s=None),
    "everything": complete_job(),
    "weird-folder": changed(
        bare_slurm_job(job_name=WEIRD_NAME), {"metadata.folder": WEIRD, "metadata.lab": "a\nlab"}
    ),
    "local": local_job(f"/home/alice/tuneplane/runs/alice/ring/{RUN_ID}"),
    "local-weird-folder": local_job(f"/home/alice/two\nlines\\ {WEIRD_NAME}/{RUN_ID}"),
}


def script_of(job: JobSpec) -> str:
    return SlurmLauncher(job).render() if job.spec.slurm else local_script(job)


def test_every_golden_file_has_its_case() -> None:
    assert {p.stem for p in GOLDEN.glob("*.sbatch")} == set(JOBS)


@pytest.mark.parametrize("name", JOBS)
def test_a_script_is_what_it_was(name: str) -> None:
    path = GOLDEN / f"{name}.sbatch"
    text = script_of(JOBS[name])
    if os.environ.get("TUNEPLANE_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", JOBS)
def test_bash_and_shellcheck_find_nothing_to_fault(name: str) -> None:
    path = GOLDEN / f"{name}.sbatch"
    assert (
        subprocess.run(["/bin/bash", "-n", path], capture_output=True, timeout=20, check=True).stderr == b""
    )
    shellcheck = shutil.which("shellcheck")
    assert shellcheck, "apt-get install shellcheck"
    done = subprocess.run(
        [shellcheck, "--shell=bash", "--severity=style", path],
        env={**os.environ, "LANG": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", JOBS)
def test_a_script_holds_no_id_of_a_job_no_secret_and_no_line_that_is_too_much(name: str) -> None:
    text = (GOLDEN / f"{name}.sbatch").read_text(encoding="utf-8")
    assert "SLURM_JOB_ID" not in text and "TOKEN" not in text
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=.+)?", line) for line in directives)
    names = [line.partition("=")[0] for line in directives]
    assert len(set(names)) == len(names)
    assert "#SBATCH --wckey" not in names and "submitit" not in text.lower()


def test_what_nobody_asked_for_is_no_directive() -> None:
    directives = [line for line in script_of(bare_slurm_job()).splitlines() if line.startswith("#SBATCH")]
    folder = f"/shared/tp/runs/alice/ring/{RUN_ID}"
    assert directives == [
        f"#SBATCH --chdir={folder}",
        "#SBATCH --export=NONE",
        "#SBATCH --job-name=ring",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output={folder}/slurm/%j.out",
    ]


@pytest.mark.parametrize(
    ("name", "directive"),
    [
        ("one-node", "#SBATCH --gpus-per-node=8"),
        ("gpus-per-node-of-a-type", "#SBATCH --gpus-per-node=h200:8"),
        ("gres", "#SBATCH --gres=gpu:8"),
        ("gres-of-a-type", "#SBATCH --gres=gpu:h200:8"),
        ("gpus-not-asked-for", None),
        ("cpu", None),
    ],
)
def test_gpus_are_asked_for_as_the_site_says(name: str, directive: str | None) -> None:
    asked = [line for line in script_of(JOBS[name]).splitlines() if re.match(r"#SBATCH --.*(gpu|gres)", line)]
    assert asked == ([directive] if directive else [])
