"""A lab of an ordinary user on the testbed, worked as that user would: by `tp` on the login host.

Used by the tests of the main job; every method is one command line.
"""

from __future__ import annotations

import json
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from testbed_client import Testbed

URL = "https://tracker.example.org/lab"

FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "LOST", "NOT_SUBMITTED"}


@dataclass
class SlurmLab:
    """A lab in a fresh folder below a user's home, with one experiment of `custom/custom`."""

    bed: Testbed
    user: str = "alice"
    folder_name: str = "lab"
    experiment: str = "mlp"
    root: Path = field(init=False)

    def __post_init__(self) -> None:
        base = self.bed.home(self.user) / f"t-{secrets.token_hex(4)}"
        self.sh(["mkdir", str(base)], cwd="/")
        self.root = base / self.folder_name
        self.sh(["tp", "init", str(self.root)], cwd=str(base))
        self.sh(["git", "config", "user.name", self.user])
        self.sh(["git", "config", "user.email", f"{self.user}@example.org"])
        self.sh(["tp", "new", self.experiment, "--method", "custom/custom"])

    def sh(
        self,
        argv: Sequence[str | Path],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = 60,
        input: str | None = None,
    ) -> CompletedProcess[str]:
        """A command of the user on the login host, in the lab where no other folder is said."""
        where = cwd if cwd is not None else str(self.root)
        return self.bed.exec(
            argv, user=self.user, cwd=where, env=env, check=check, timeout=timeout, input=input
        )

    def write(self, path: str, text: str) -> None:
        """A file of the lab, or one of the user's by absolute path."""
        target = path if path.startswith("/") else str(self.root / path)
        self.sh(["mkdir", "-p", str(Path(target).parent)])
        self.sh(["sh", "-c", 'cat >"$1"', "sh", target], input=text)

    def train_sh(self, text: str, *, keep_head: bool = True) -> None:
        """The experiment's train.sh: its scaffold's head, then `text` in place of its end."""
        path = f"experiments/{self.experiment}/train.sh"
        head = ""
        if keep_head:
            lines = self.sh(["cat", path]).stdout.splitlines()
            head = "\n".join(line for line in lines if line not in ("exit 1",) and "no training" not in line)
        self.write(path, f"{head}\n{text}\n")

    def commit(self) -> None:
        self.sh(["git", "add", "-A"])
        self.sh(["git", "commit", "-qm", "change"])

    def flags(self, profile: str, image: Path | None = None) -> list[str]:
        """What every submit of a custom experiment says."""
        words = ["--profile", profile, "--observability-url", URL]
        if not profile.startswith("h200-bare"):
            words += ["--image", str(image or self.bed.image)]
        return words

    def submit(
        self, profile: str, *more: str, image: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Run:
        """`tp submit`; the run it made."""
        words = ["tp", "submit", self.experiment, *self.flags(profile, image), *more, "--json"]
        said = json.loads(self.sh(words, env=env).stdout)
        return Run(self, said["run_id"], Path(said["folder"]), said["job_id"], said["notices"])

    def render(self, profile: str, *more: str, image: Path | None = None) -> Run:
        """`tp render`; the run it prepared."""
        words = ["tp", "render", self.experiment, *self.flags(profile, image), *more, "--json"]
        said = json.loads(self.sh(words).stdout)
        return Run(self, said["run_id"], Path(said["folder"]), "", said["notices"])


@dataclass
class Run:
    """One run, asked about by `tp job`."""

    lab: SlurmLab
    run_id: str
    folder: Path
    job_id: str
    notices: list[str]

    def status(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.tp("status", "--json").stdout)
        return value

    def tp(self, command: str, *more: str, check: bool = True) -> CompletedProcess[str]:
        return self.lab.sh(["tp", "job", command, self.run_id, *more], check=check)

    def wait(self, *states: str, timeout_s: float = 90) -> dict[str, Any]:
        """Wait for one of `states` (for any end where none is said). Fails with what is known of the run."""
        wanted = set(states) or FINAL
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if status["state"] in wanted:
                return status
            if status["state"] in FINAL or time.monotonic() > deadline:
                raise AssertionError(f"{status}\n{self.log()}\n{self.slurm_output()}")
            time.sleep(0.3)

    def log(self, *more: str) -> str:
        return self.tp("logs", *more, check=False).stdout

    def slurm_output(self) -> str:
        script = f"cat {shlex.quote(str(self.folder / 'slurm'))}/*.out"
        return self.lab.sh(["bash", "-c", script], check=False).stdout

    def read(self, path: str) -> str:
        """A file of the run folder, as its user reads it."""
        return self.lab.sh(["cat", str(self.folder / path)]).stdout
