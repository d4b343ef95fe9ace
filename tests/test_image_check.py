"""`tp image check`: what an image has of what a run needs, asked of real shells and interpreters."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

sys.path.append(str(Path(__file__).parent / "fakes"))

import box
from slurm_lab import SlurmLab
from testbed_client import Testbed

from tuneplane import __version__, image_check
from tuneplane.cli import progress
from tuneplane.cli.image_check import check_command
from tuneplane.containers.probe import (
    FAIL,
    OK,
    UNCHECKED,
    WARN,
    Answer,
    Python,
    judge,
    probe_argv,
    read_answer,
)
from tuneplane.image_check import package_findings
from tuneplane.kernel.errors import Exit, OperationError, UsageError
from tuneplane.kernel.process import is_alive

FAKES = Path(__file__).parent / "fakes"
SYSTEM = "/usr/local/bin:/usr/bin:/bin"


def ask(path: str = SYSTEM, packages: tuple[str, ...] = (), **environ: str) -> Answer | None:
    """The probe on this machine, as it would be in a container."""
    done = subprocess.run(
        probe_argv(packages),
        env={"PATH": path, "LANG": "C.UTF-8", **environ},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return read_answer(done.stdout)


def told(answer: Answer | None, **how: bool) -> dict[str, str]:
    """What is said → its level."""
    assert answer is not None
    return {finding.what: finding.level for finding in judge(answer, __version__, **how)}


def programs(folder: Path, *names: str) -> str:
    """A PATH with these programs of the system alone."""
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(shutil.which(name, path=SYSTEM) or "")
    return str(folder)


def distribution(folder: Path, name: str, version: str, summary: str = "", **files: str) -> Path:
    """A package as pip leaves it."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n"
    (info / "METADATA").write_text(text)
    for path, content in files.items():
        file = folder / path.replace("__", "/").replace("/init/", "/__init__")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return folder


def module(folder: Path, path: str, content: str = "") -> None:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)


def test_a_machine_with_all_of_it_is_fine() -> None:
    found = told(ask())
    assert [level for what, level in found.items() if what.startswith(("bash ", "python3 is "))] == [OK, OK]


def test_an_image_without_bash_fails(tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", "python3", "tr")
    assert told(ask(path))[f"no bash on the image's PATH ({path})"] == FAIL


@pytest.mark.parametrize(("custom", "level"), [(True, WARN), (False, FAIL)])
def test_an_image_without_python_is_a_warning_where_the_script_need_not_be_python(
    tmp_path: Path, custom: bool, level: str
) -> None:
    path = programs(tmp_path / "bin", "bash", "tr")
    assert told(ask(path), custom=custom)[f"no python3 on the image's PATH ({path})"] == level


def test_a_python_that_does_not_run_is_told_apart_from_none(tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", "bash", "tr")
    broken = Path(path, "python3")
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    done = subprocess.run(probe_argv(), env={"PATH": path}, capture_output=True, text=True, check=False)
    assert told(read_answer(done.stdout))[f"python3 at {broken} does not run"] == WARN


def test_an_old_python_is_told_with_what_needs_a_newer() -> None:
    answer = ask()
    assert answer is not None and answer.interpreter is not None
    old = dataclasses.replace(answer, interpreter=dataclasses.replace(answer.interpreter, version=(3, 8, 10)))
    what = f"python3 is 3.8.10 at {answer.python}, and tuneplane.report needs 3.9 or newer"
    assert told(old)[what] == WARN
    assert told(old, custom=False)[what] == FAIL


def test_a_python_that_is_another_than_python3_is_told(tmp_path: Path) -> None:
    """The one that train.sh runs need not be the one that has the packages."""
    path = programs(tmp_path / "bin", "bash", "tr")
    other = Path(path, "python3")
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    Path(path, "python").symlink_to("/usr/bin/python3")
    found = [what for what in told(ask(path)) if "another interpreter" in what]
    assert found == [f"python ({path}/python) is another interpreter than python3 ({other})"]


def test_the_same_interpreter_by_two_names_is_one(tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", "bash", "tr", "python3")
    Path(path, "python").symlink_to("/usr/bin/python3")
    assert not [what for what in told(ask(path)) if "another interpreter" in what]


@pytest.mark.contract("C25")
def test_another_projects_package_of_the_name_tuneplane_is_detected_and_named(tmp_path: Path) -> None:
    site = distribution(tmp_path / "site", "tuneplane", "0.4.2", "Client of a console")
    module(site, "tuneplane/__init__.py", "raise SystemExit('never imported')")
    what = (
        "the image's tuneplane 0.4.2 (Client of a console) is another project's of that name:"
        " it has no tuneplane.report"
    )
    assert told(ask(PYTHONPATH=str(site)))[what] == FAIL
    assert told(ask(PYTHONPATH=str(site)), in_capsule=True)[what] == WARN


@pytest.mark.contract("C25")
def test_another_projects_package_is_told_though_it_has_a_module_report(tmp_path: Path) -> None:
    """Its import works and its calls succeed, and no point ever arrives."""
    site = distribution(tmp_path / "site", "tuneplane", "0.4.2", "Client of a console")
    module(site, "tuneplane/__init__.py")
    module(site, "tuneplane/report/__init__.py", "def log(*_, **__): ...")
    what = (
        "the image's tuneplane 0.4.2 (Client of a console) is another project's of that name:"
        " its tuneplane.report writes no points here"
    )
    assert told(ask(PYTHONPATH=str(site)))[what] == FAIL


def test_a_folder_that_is_merely_called_so_is_told(tmp_path: Path) -> None:
    module(tmp_path, "tuneplane/__init__.py")
    found = told(ask(PYTHONPATH=str(tmp_path)))
    assert found[f"import tuneplane finds {tmp_path}/tuneplane, which has no tuneplane.report"] == FAIL


@pytest.mark.parametrize(
    ("version", "what", "level"),
    [
        (__version__, f"tuneplane {__version__}", OK),
        ("0.1.0", f"the image has tuneplane 0.1.0, this is {__version__}", WARN),
    ],
)
def test_this_projects_wheel_is_told_with_its_version(
    tmp_path: Path, version: str, what: str, level: str
) -> None:
    site = distribution(tmp_path / "site", "tuneplane", version)
    module(site, "tuneplane/__init__.py")
    module(site, "tuneplane/report/__init__.py")
    module(site, "tuneplane/report/lines.py")
    assert told(ask(PYTHONPATH=str(site)))[what] == level


def test_no_wheel_is_a_warning_and_none_where_the_capsule_brings_it() -> None:
    path = f"{SYSTEM}"
    assert told(ask(path))["no tuneplane in the image: import tuneplane fails there"] == WARN
    assert told(ask(path), in_capsule=True)["tuneplane.report comes with the capsule"] == OK


def test_a_methods_packages_are_compared_with_what_is_installed(tmp_path: Path) -> None:
    site = distribution(tmp_path / "site", "torch", "2.6.0")
    distribution(site, "trl", "1.16.0rc1")
    wanted = ("torch>=2.13", "trl>=1.15", "accelerate")
    answer = ask(packages=("torch", "trl", "accelerate"), PYTHONPATH=str(site))
    assert answer is not None
    found = [(finding.level, finding.what) for finding in package_findings(wanted, answer)]
    assert found == [
        (FAIL, "torch is 2.6.0, and the method needs torch>=2.13"),
        (OK, "trl 1.16.0rc1"),
        (FAIL, "accelerate is not installed, and the method needs accelerate"),
    ]


def cuda(
    torch: Mapping[str, str | None] | None, driver: int | None, image: str = ""
) -> list[tuple[str, str]]:
    python = Python((3, 11, 2), "/usr/bin/python3", "3 /usr", torch=torch, driver=driver)
    answer = Answer(path="/usr/bin", bash="/bin/bash", bash_version="5", cuda=image, interpreter=python)
    return [(f.level, f.what) for f in judge(answer, __version__) if "CUDA" in f.what]


def test_torchs_cuda_is_read_without_importing_it(tmp_path: Path) -> None:
    module(tmp_path, "torch/__init__.py", "raise SystemExit('never imported')")
    module(
        tmp_path,
        "torch/version.py",
        "from typing import Optional\n__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n",
    )
    answer = ask(PYTHONPATH=str(tmp_path))
    assert answer is not None and answer.interpreter is not None
    assert answer.interpreter.torch == {"version": "2.13.0+cu130", "cuda": "13.0"}
    module(tmp_path, "torch/version.py", "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    answer = ask(PYTHONPATH=str(tmp_path))
    assert answer is not None
    assert told(answer)["torch 2.13.0+cpu is built without CUDA"] == OK


@pytest.mark.parametrize(
    ("torch", "driver", "image", "level", "words"),
    [
        ("12.4", 12040, "", OK, "torch 2 has CUDA 12.4, the driver here runs up to 12.4"),
        ("12.4", 13000, "", OK, "runs up to 13.0"),
        ("12.9", 12040, "", WARN, "most of it works"),
        ("13.0", 12080, "", FAIL, "torch 2 has CUDA 13.0, and the driver here runs 12.8 at most"),
        ("13.0", None, "", UNCHECKED, "not checked against a driver, no GPU here"),
        (None, 12040, "11.8.0", OK, "the image has CUDA 11.8.0, the driver here runs up to 12.4"),
    ],
)
def test_the_images_cuda_is_compared_with_the_driver(
    torch: str | None, driver: int | None, image: str, level: str, words: str
) -> None:
    ((found, what),) = cuda({"version": "2", "cuda": torch} if torch else None, driver, image)
    assert found == level and words in what


def test_without_cuda_nothing_is_said_of_it() -> None:
    assert cuda(None, 12040) == []


def test_noise_of_the_image_is_no_answer() -> None:
    assert read_answer("Welcome to the image\ntuneplane-probe broken\n") is None


def check(*words: str | Path, **environ: str) -> Result:
    path = f"{FAKES}:{SYSTEM}"
    words = tuple(map(str, words))
    return CliRunner().invoke(check_command, words, env={"PATH": path, **environ}, standalone_mode=False)


@pytest.mark.usefixtures("boxes")
class TestByTheFakeEnroot:
    def test_it_starts_the_image_and_says_that_this_runtime_is_never_tested_here(
        self, tmp_path: Path
    ) -> None:
        image = box.write_image(tmp_path / "image.sqsh")
        done = check(image)
        assert done.return_value == Exit.DONE, done.output
        assert "ok         bash 5" in done.output
        assert (
            "enroot is checked against its documentation: this project's own tests never run it"
            in done.output
        )

    def test_for_programs_it_is_json(self, tmp_path: Path) -> None:
        done = check(box.write_image(tmp_path / "image.sqsh"), "--json")
        found = json.loads(done.output)
        assert found["runtime"] == "enroot" and found["never_run_by_this_projects_tests"] is True
        assert {"level", "what", "remedy"} == set(found["findings"][0])

    def test_what_fails_is_told_by_the_exit_code(self, tmp_path: Path) -> None:
        folder = tmp_path / "bin"
        programs(folder, "python3", "tr")
        image = box.write_image(tmp_path / "image.sqsh", {"PATH": "/nowhere"})
        done = check(image)
        assert done.return_value == Exit.FAILED
        assert "fail       no bash on the image's PATH (/nowhere)" in done.output

    def test_an_image_that_does_not_start_is_told_in_the_runtimes_own_words(self, tmp_path: Path) -> None:
        image = tmp_path / "image.sqsh"
        image.write_bytes(box.MAGIC + b"\nSHELL=/no/such/shell\n")
        done = check(image)
        assert done.return_value == Exit.FAILED
        assert "fail       the image does not start (exit code 1): [ERROR] /no/such/shell" in done.output


@pytest.mark.slow
def test_of_an_image_that_hangs_nothing_goes_on_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_check, "START_S", 1.0)
    monkeypatch.setattr(progress, "QUICK_S", 0.3)
    pid_file = tmp_path / "pid"
    program = tmp_path / "apptainer"
    program.write_text(f"#!/bin/bash\nset -m\nsleep 300 &\necho $! >{pid_file}\necho starting\nwait\n")
    program.chmod(0o755)
    image = tmp_path / "x.sif"
    image.write_bytes(b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0")
    done = check(image, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.return_value == Exit.FAILED
    assert "(exit code 124): starting; it did not answer within 1 s" in done.output
    assert done.output.count(f"waiting for apptainer to start {image}\n") == 1, "told once, while it waits"
    deadline = time.monotonic() + 10
    while is_alive(int(pid_file.read_text())):
        assert time.monotonic() < deadline, "what the image started is still there"
        time.sleep(0.05)


def test_a_file_that_is_no_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.sqsh").write_text("text")
    done = check(tmp_path / "x.sqsh")
    assert isinstance(done.exception, UsageError)
    assert "is neither a SIF nor a squashfs file" in str(done.exception)


def test_a_host_without_the_runtime_says_that_nothing_was_checked(tmp_path: Path) -> None:
    image = tmp_path / "x.sif"
    image.write_bytes(b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0")
    done = check(image, PATH="/nowhere")
    assert isinstance(done.exception, OperationError)
    assert str(done.exception).startswith(
        f"PATH: nothing was checked: apptainer or singularity is not on this host ({os.uname().nodename})"
    )


@pytest.mark.parametrize("runtime", ["enroot", "pyxis"])
def test_a_sif_for_enroot_or_pyxis_is_refused(tmp_path: Path, runtime: str) -> None:
    site = tmp_path / "site"
    module(
        site,
        "cluster/x.yaml",
        "scheduler: slurm\ndevice: cpu\ngpus_per_node: 1\ncontainer:\n"
        f"  runtime: {runtime}\nslurm:\n  gpu_request: none\n",
    )
    image = tmp_path / "x.sif"
    image.write_bytes(b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0")
    done = check(image, "--profile", "x", TUNEPLANE_CONFIG_DIR=str(site), HOME=str(tmp_path))
    assert isinstance(done.exception, UsageError), done.output
    assert f"{runtime} starts squashfs files (.sqsh), and {image} is a SIF" in str(done.exception)


def test_a_registrys_image_needs_a_profile_and_is_judged_by_the_sites_rules(tmp_path: Path) -> None:
    site = tmp_path / "site"
    module(site, "site/default.yaml", "allowed_registries: [registry.example.com]\n")
    module(
        site,
        "cluster/x.yaml",
        "scheduler: slurm\ndevice: cpu\ngpus_per_node: 1\ncontainer:\n"
        "  runtime: apptainer\nslurm:\n  gpu_request: none\n",
    )
    environ = {"TUNEPLANE_CONFIG_DIR": str(site), "HOME": str(tmp_path)}
    done = check("registry.example.com/team/trainer:v1", **environ)
    assert "lies in a registry, and each runtime has files of its own form" in str(done.exception)
    done = check("other.example.com/team/trainer:v1", "--profile", "x", **environ)
    assert isinstance(done.exception, UsageError)
    assert "image registry other.example.com is not in TUNEPLANE_ALLOWED_IMAGE_REGISTRIES" in str(
        done.exception
    )


@pytest.mark.testbed
def test_a_job_that_fails_at_once_tells_what_the_check_tells_beforehand(testbed: Testbed) -> None:
    """By a real Apptainer: on the login host first, then in the node's log."""
    lab = SlurmLab(testbed)
    lab.train_sh("no-such-trainer --epochs 3")
    lab.commit()
    said = lab.tp("image", "check", str(testbed.image), "--profile", "h200", "--method", "custom/custom")
    lines = [" ".join(line.split()) for line in said.splitlines() if "→" not in line]
    assert [line.split()[0] for line in lines] == ["ok", "ok", "warn"]
    run = lab.submit("h200:1", image=testbed.image)
    run.wait("FAILED")
    log = [" ".join(line.removeprefix("tuneplane:").split()) for line in run.log().splitlines()]
    at = log.index("the command failed at once; what its image has:")
    assert any("no-such-trainer: command not found" in line for line in log[:at])
    assert [line for line in log[at + 1 :] if "→" not in line][: len(lines)] == lines
