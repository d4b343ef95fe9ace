"""Where the testbed keeps things and what its machines and people are called.

Read by every other module of the testbed; holds no behaviour beyond naming paths.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent.parent

#: The interpreter of the machine, which ordinary users can run; the first ``python3`` on root's PATH may
#: live in root's home.
PYTHON = "/usr/bin/python3"

CONTROLLER = "ctl"
NODES = ("n1", "n2", "n3", "n4")
ADDRESSES = {CONTROLLER: "10.77.0.1", **{name: f"10.77.0.{11 + i}" for i, name in enumerate(NODES)}}
PREFIX_LENGTH = 24
GPUS_PER_NODE = 8

#: Ordinary users, present in the testbed's own /etc/passwd alone. The ids lie above what ``adduser`` hands out.
USERS = {"alice": 64101, "bob": 64102, "carol": 64103}
GROUP, GROUP_ID = "lab", 64100
ACCOUNT = "research"

#: Argument that marks the first process of each host, so that it is found without any file.
HOST_MARK = "tuneplane-testbed-host"

DEFAULT_STATE = "/var/lib/tuneplane-testbed"
DEFAULT_CACHE = "/var/cache/tuneplane-testbed"


class TestbedError(Exception):
    """What stops a command of the testbed, in one sentence with its remedy."""


@dataclass(frozen=True)
class Layout:
    """Paths below the state folder (gone after ``down``) and below the cache (kept)."""

    state: Path
    cache: Path

    @property
    def shared(self) -> Path:
        return self.state / "shared"

    @property
    def home(self) -> Path:
        return self.shared / "home"

    @property
    def venv(self) -> Path:
        return self.shared / "venv"

    @property
    def images(self) -> Path:
        return self.shared / "images"

    @property
    def config(self) -> Path:
        return self.state / "config"

    @property
    def overlay(self) -> Path:
        return self.state / "overlay"

    @property
    def slurm(self) -> Path:
        return self.state / "slurm"

    @property
    def devices(self) -> Path:
        return self.state / "dev"

    @property
    def log(self) -> Path:
        return self.state / "log"

    @property
    def settings(self) -> Path:
        return self.state / "settings.json"

    @property
    def apptainer(self) -> Path:
        return self.cache / "apptainer"

    def host(self, name: str) -> Path:
        """The folder of what is local to one host: its /tmp, /var/tmp, spool."""
        return self.state / "hosts" / name

    @property
    def cgroup(self) -> str:
        """Name of the testbed's group in the freezer hierarchy; one for each state folder."""
        return "tuneplane-testbed" + str(self.state).replace("/", "-")


def read_layout() -> Layout:
    """The layout that ``TUNEPLANE_TESTBED_DIR`` and ``TUNEPLANE_TESTBED_CACHE`` choose."""
    state = os.environ.get("TUNEPLANE_TESTBED_DIR") or DEFAULT_STATE
    cache = os.environ.get("TUNEPLANE_TESTBED_CACHE") or DEFAULT_CACHE
    for variable, value in (("TUNEPLANE_TESTBED_DIR", state), ("TUNEPLANE_TESTBED_CACHE", cache)):
        # Overlay mount options and slurm.conf both give commas, colons, spaces and % a meaning.
        if not re.fullmatch(r"(/[A-Za-z0-9._+-]+){2,}", value) or "/.." in value:
            raise TestbedError(
                f"{variable}={value!r}: give an absolute path of plain letters, two folders deep or more"
            )
    if state.startswith(cache + "/") or cache.startswith(state + "/") or state == cache:
        raise TestbedError("the state folder and the cache folder must not lie in one another")
    return Layout(Path(state), Path(cache))
