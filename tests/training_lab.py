"""Labs on the testbed whose jobs have torch, transformers and TRL in their container. For tests that train there.

    def test_it_trains(testbed: Testbed, training: Training) -> None:
        lab = training.lab("pytorch/image-classification", files={"train.py": "…"})
        run = lab.submit_words(*training.flags(ranks=4, nodes=2), "--train-data", str(data))

`training` is a fixture of conftest.py. What tests/requirements-training.txt names, and all that this needs, is
linked once from this environment's packages to a folder of the testbed that users can read (3 s, no download,
no space). `flags` mounts it read-only where Debian's python3 in `minimal.sif` looks for packages that were added,
so `python3`, `python3 -m torch.distributed.run` and `python3 -m lm_eval` just work there; `tuneplane` is not among
them. The profile is `cpu-image`: processes are counted in place of GPUs, so `--profile cpu-image:4 --nodes 2` is
two ranks on each of two nodes, by gloo. Ranks are slow here: two cores serve all of them.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock
from packaging.requirements import Requirement
from slurm_lab import SlurmLab, unique
from testbed_client import Testbed

REQUIREMENTS = Path(__file__).parent / "requirements-training.txt"

IMAGE_PYTHON = (3, 11)
"""Debian 12's, in minimal.sif: compiled packages of another Python are none there."""

ADDED_PACKAGES = "/usr/local/lib/python3.11/dist-packages"
"""Where Debian's python3 looks for packages besides its own."""

PROFILE = "cpu-image"
PROFILE_TEXT = """\
# Processes on CPUs, as the testbed's profile cpu, and the trainer in an Apptainer image.
defaults:
  - cpu
  - override /container@container: apptainer
  - _self_

description: processes on CPUs, in a container
"""


@dataclass(frozen=True)
class Training:
    """The packages as the testbed's users see them."""

    bed: Testbed
    packages: Path

    def lab(self, method: str, *, files: Mapping[str, str] | None = None, name: str = "trains") -> SlurmLab:
        """A committed lab with one experiment of that method and the profile; `files` go into its folder."""
        lab = SlurmLab(self.bed, experiment=unique(name), method=method)
        lab.write(f"configs/cluster/{PROFILE}.yaml", PROFILE_TEXT)
        for path, text in (files or {}).items():
            lab.write(f"experiments/{lab.experiment}/{path}", text)
        lab.commit()
        return lab

    def flags(self, ranks: int, nodes: int = 1) -> list[str]:
        """What a submit says: so many ranks in all, on so many nodes, in the image with the packages."""
        mount = f"{self.packages}:{ADDED_PACKAGES}:ro"
        words = ["--profile", f"{PROFILE}:{ranks}", "--image", str(self.bed.image), "--mount", mount]
        return [*words, "--nodes", str(nodes)] if nodes > 1 else words


def missing_because() -> str | None:
    """Why no job can have the packages here, or None where it can."""
    if sys.version_info[:2] != IMAGE_PYTHON:
        wanted = ".".join(map(str, IMAGE_PYTHON))
        return f"the image's Python is {wanted}, and this one is {sys.version.split()[0]}"
    absent = [str(wanted) for wanted in _requirements() if not _is_installed(wanted.name)]
    if absent:
        return f"{', '.join(absent)} of {REQUIREMENTS.name} not installed: `make test` does so"
    return None


def install_training(bed: Testbed) -> Training:
    """Link the packages to the testbed's shared folder, where this has not been done."""
    reason = missing_because()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(f"{reason}, and this is a CI run: it must not be skipped")
        pytest.skip(reason)
    found = distributions(_requirements())
    target = bed.shared / "training"
    is_of = "\n".join(sorted(f"{one.name} {one.version} {one.locate_file('')}" for one in found))
    with FileLock(bed.state / "training.lock"):
        note = target / "packages.txt"
        if not note.exists() or note.read_text() != is_of:
            shutil.rmtree(target, ignore_errors=True)
            link_files(found, target / "packages")
            note.write_text(is_of)
    return Training(bed, target / "packages")


def distributions(wanted: Iterable[Requirement]) -> list[importlib.metadata.Distribution]:
    """What is installed of these requirements, and of theirs, for this platform."""
    todo, asked, found = list(wanted), set(), {}
    while todo:
        requirement = todo.pop()
        if str(requirement) in asked or not _is_installed(requirement.name):
            continue
        asked.add(str(requirement))
        one = importlib.metadata.distribution(requirement.name)
        found[re.sub(r"[-_.]+", "-", requirement.name).lower()] = one
        for text in one.requires or ():
            needed = Requirement(text)
            extras = ("", *requirement.extras)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(needed)
    return list(found.values())


def link_files(found: Iterable[importlib.metadata.Distribution], target: Path) -> None:
    """The distributions' modules below `target`: hard links, copies where it is another file system."""
    folders: set[Path] = set()
    link = os.link
    for one in found:
        for path in one.files or ():
            source, copy = str(one.locate_file(path)), target / path
            if ".." in path.parts or not os.path.exists(source):  # noqa: PTH110 (60,000 files)
                continue
            if copy.parent not in folders:
                copy.parent.mkdir(parents=True, exist_ok=True)
                folders.add(copy.parent)
            try:
                link(source, copy)
            except FileExistsError:  # a file that two distributions have
                continue
            except OSError:
                link = shutil.copy2  # with its time, which compiled modules are held against
                link(source, copy)


def _requirements() -> list[Requirement]:
    lines = REQUIREMENTS.read_text().splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
