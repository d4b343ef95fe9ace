"""A site's, a user's and a lab's configuration folders, for tests that write into them and compose."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tuneplane.compose import Composed, compose
from tuneplane.kernel.errors import UsageError

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


def split(message: str) -> list[str]:
    """The faults of a message, each with its remedy."""
    return re.split(r"\n(?!  → )", message)
