"""What a profile's container runtime cannot start or be told is refused before anything is queued."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from warm_tp import run_tp

SIF = b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0"
SQUASHFS = b"hsqs" + bytes(92)

TP = (sys.executable, "-m", "tuneplane.cli.main")


class Lab:
    """A lab with one experiment, and a configuration with a profile for each runtime."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.images = where / "images"
        self.images.mkdir()
        (self.images / "x.sif").write_bytes(SIF)
        (self.images / "x.sqsh").write_bytes(SQUASHFS)
        self.programs = where / "bin"  # for want of Slurm; nothing here is queued
        self.programs.mkdir()
        (self.programs / "sbatch").write_text("#!/bin/sh\nexit 1\n")
        (self.programs / "sbatch").chmod(0o755)
        self.site = where / "site"
        (self.site / "cluster").mkdir(parents=True)
        for runtime in ("apptainer", "singularity", "enroot", "pyxis"):
            self.profile(runtime)
        for words in (["init", "lab"], ["new", "exp", "--method", "custom/custom", "--lab", "lab"]):
            self.tp(*words, cwd=where)
        self.git("config", "user.name", "a")
        self.git("config", "user.email", "a@example.org")
        self.git("add", "-A")
        self.git("commit", "-qm", "x")

    def profile(self, runtime: str, **more: str) -> None:
        keys = {"storage_root": str(self.where / "storage"), "scratch": "/tmp", **more}
        text = (
            f"defaults:\n  - /container@container: {runtime}\n  - _self_\n"
            "scheduler: slurm\ndevice: gpu\ngpus_per_node: 8\nslurm: {gpu_request: none}\n"
        )
        text += "".join(f"{key}: {value!r}\n" for key, value in keys.items())
        (self.site / "cluster" / f"{runtime}.yaml").write_text(text)

    def tp(self, *words: str, cwd: Path | None = None) -> CompletedProcess[str]:
        environ = {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "HOME": str(self.where),
            "TUNEPLANE_CONFIG_DIR": str(self.site),
        }
        environ["PYTHONPATH"] = str(Path(__file__).parents[1])
        return run_tp(words, cwd=cwd or self.where / "lab", env=environ)

    def git(self, *words: str) -> None:
        subprocess.run(["git", *words], cwd=self.where / "lab", check=True, timeout=60)

    def validate(self, profile: str, image: str, *more: str) -> CompletedProcess[str]:
        words = [
            "--profile",
            profile,
            "--image",
            str(self.images / image),
            "--observability-url",
            "https://x",
        ]
        return self.tp("validate", "exp", *words, *more)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.mark.parametrize(
    ("profile", "image", "refused"),
    [
        ("apptainer", "x.sif", False),
        ("apptainer", "x.sqsh", False),
        ("singularity", "x.sif", False),
        ("enroot", "x.sqsh", False),
        ("pyxis", "x.sqsh", False),
        ("enroot", "x.sif", True),
        ("pyxis", "x.sif", True),
    ],
)
def test_an_image_of_the_wrong_form_is_refused(lab: Lab, profile: str, image: str, refused: bool) -> None:
    done = lab.validate(f"{profile}:8", image)
    assert done.returncode == (2 if refused else 0), done.stderr
    words = f"--image: {profile} starts squashfs files (.sqsh), and {lab.images}/x.sif is a SIF"
    assert (words in done.stderr) == refused


@pytest.mark.parametrize("profile", ["enroot", "pyxis"])
def test_paths_that_the_runtime_cannot_be_told_are_all_found_at_once(lab: Lab, profile: str) -> None:
    lab.profile(profile, storage_root=str(lab.where / "my storage"), scratch="/tmp/a:b")
    done = lab.validate(profile, "x.sqsh", "--mount", "/data set:/data", "--mount", "/x:/y z:ro")
    assert done.returncode == 2
    for path in ("/data set", "/y z", f"{lab.where}/my storage/runs"):
        assert f"{profile} cannot mount {path!r}: white space" in done.stderr
    assert f"{profile} cannot be given the path '/tmp/a:b/runtime'" in done.stderr


def test_apptainer_can_be_told_them(lab: Lab) -> None:
    lab.profile("apptainer", storage_root=str(lab.where / "my storage"))
    done = lab.validate("apptainer", "x.sif", "--mount", "/data set:/data", "--mount", r"/a\:b:/y z:ro")
    assert done.returncode == 0, done.stderr


def test_a_profile_of_this_machine_alone_cannot_say_pyxis(lab: Lab) -> None:
    text = "scheduler: local\ndevice: cpu\ngpus_per_node: 1\ncontainer: {runtime: pyxis}\n"
    (lab.site / "cluster" / "here.yaml").write_text(text)
    done = lab.validate("here", "x.sqsh")
    assert done.returncode == 2
    assert "cluster.container.runtime is pyxis, a plugin of Slurm: here enroot starts the same" in done.stderr


def test_a_machine_without_sbatch_is_told_before_anything_is_submitted(lab: Lab) -> None:
    (lab.programs / "sbatch").unlink()
    done = lab.validate("apptainer:8", "x.sif")
    assert done.returncode == 1
    assert done.stderr.startswith("sbatch is not on this machine's PATH\n  → run tp on a login node")
    assert done.stdout == "exp: 1 fault\n"
