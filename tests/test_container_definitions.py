"""The images that this project defines: each by Apptainer and by Docker alike, and pinned."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONTAINERS = ROOT / "containers"
IMAGES = ("minimal", "trainer")


def apptainer(name: str) -> str:
    return (CONTAINERS / name / f"{name}.def").read_text()


def docker(name: str) -> str:
    return (CONTAINERS / name / "Dockerfile").read_text()


def section(text: str, name: str) -> list[str]:
    """The lines of a section of a definition, comments apart."""
    found = re.search(rf"(?ms)^%{name}\n(.*?)(?=^%|\Z)", text)
    lines = [line.strip() for line in (found[1] if found else "").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def steps(text: str) -> list[str]:
    """The commands of all RUN lines of a Dockerfile."""
    text = "".join(line for line in text.splitlines(True) if not line.startswith("#")).replace("\\\n", " ")
    runs = [line[4:] for line in text.splitlines() if line.startswith("RUN ")]
    return [" ".join(command.split()) for run in runs for command in run.split("&&")]


@pytest.mark.parametrize("name", IMAGES)
def test_both_definitions_of_an_image_start_from_the_same(name: str) -> None:
    base = re.search(r"(?m)^From: (\S+)$", apptainer(name))
    assert base is not None
    assert f"\nFROM {base[1]}\n" in docker(name)


@pytest.mark.parametrize("name", IMAGES)
def test_both_definitions_of_an_image_run_the_same_commands(name: str) -> None:
    own = [line.replace('"{{ index }}"', '"$index"') for line in section(apptainer(name), "post")]
    assert own == steps(docker(name))


def test_both_definitions_of_the_trainer_have_the_same_environment_and_files() -> None:
    environment = section(apptainer("trainer"), "environment")
    assert [line.replace("export", "ENV") for line in environment] == [
        line for line in docker("trainer").splitlines() if line.startswith("ENV ")
    ]
    copied = [line.split()[1:] for line in docker("trainer").splitlines() if line.startswith("COPY ")]
    assert [shlex.split(line) for line in section(apptainer("trainer"), "files")] == copied
    assert all((ROOT / source).exists() for source, _ in copied if source != "dist")


def test_what_a_trainer_image_installs_is_pinned() -> None:
    lines = (CONTAINERS / "trainer" / "requirements.txt").read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert [line.partition("==")[0] for line in wanted] == ["torch", "numpy"]
    assert all(re.fullmatch(r"[a-z]+==[0-9]+(\.[0-9]+)+", line) for line in wanted)


def test_the_page_names_every_image() -> None:
    page = (CONTAINERS / "README.md").read_text()
    assert {f"`{path.parent.name}/`" for path in CONTAINERS.glob("*/Dockerfile")} <= set(
        re.findall(r"`\w+/`", page)
    )


def test_commands_of_the_trainer_image_are_started_by_its_own_python(tmp_path: Path) -> None:
    """pip gives them the Python that pip itself runs under, which the image does not have."""
    source, target = tmp_path / "site/bin", tmp_path / "bin"
    for folder in (source, target):
        folder.mkdir(parents=True)
    (source / "torchrun").write_text("#!/elsewhere/.venv/bin/python3\nimport sys\nprint(sys.argv)\n")
    (source / "tool").write_bytes(b"#!/bin/sh\nexit 0\n")
    (target / "tool").write_text("the venv's own")
    script = "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path;"
    script += "from images import move_commands; move_commands(Path(sys.argv[2]), Path(sys.argv[3]))"
    testbed = str(ROOT / "slurm/testbed")
    subprocess.run([sys.executable, "-c", script, testbed, source, target], check=True, timeout=30)
    assert (target / "torchrun").read_text().splitlines()[:2] == ["#!/opt/trainer/bin/python3", "import sys"]
    assert (target / "tool").read_text() == "the venv's own"
    assert not source.exists()
