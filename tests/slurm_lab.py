"""A lab of an ordinary user on the testbed, worked as that user would: by `tp` on the login host.

Used by the tests of the main job; every method is one command line.
"""

from __future__ import annotations

import copy
import json
import secrets
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from filelock import FileLock
from testbed_client import Testbed

URL = "https://tracker.example.org/lab"

WAIT_FOR_GO = 'while [ ! -e "$TUNEPLANE_OUT_DIR/go" ]; do sleep 0.05; done'
"""A line of train.sh that waits for `Run.release`."""

ASK_AGAIN_S = 1.0

MADE: list[Run] = []
"""Every run that the tests of this process have made."""

FINAL = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "LOST",
    "NOT_SUBMITTED",
    "NOT_RUN",
}


@contextmanager
def login_profile(bed: Testbed, user: str, text: str) -> Iterator[None]:
    """`~/.profile` of a user, which Slurm reads for jobs with `--export=NONE`; gone afterwards.

    Others who want one for the same user wait.
    """
    path = str(bed.home(user) / ".profile")
    with FileLock(Path(tempfile.gettempdir()) / f"tuneplane-testbed-profile-{user}.lock"):
        bed.exec(["sh", "-c", 'cat >"$1"', "sh", path], user=user, input=text)
        try:
            yield
        finally:
            bed.exec(["rm", "-f", path], user=user)


def unique(name: str) -> str:
    """A name of an experiment that no other test has: its runs are this test's alone."""
    return f"{name}-{secrets.token_hex(3)}"


@dataclass
class SlurmLab:
    """A lab in a fresh folder below a user's home, with one experiment."""

    bed: Testbed
    user: str = "alice"
    folder_name: str = "lab"
    experiment: str = "mlp"
    env: dict[str, str] = field(default_factory=dict)  # of every command, on top of a fresh login's
    method: str = "custom/custom"
    base: Path = field(init=False)  # the folder around the lab, of this test alone
    root: Path = field(init=False)

    def __post_init__(self) -> None:
        self.base = self.bed.home(self.user) / f"t-{secrets.token_hex(4)}"
        self.sh(["mkdir", str(self.base)], cwd="/")
        self.root = self.base / self.folder_name
        self.sh(["tp", "init", str(self.root)], cwd=str(self.base))
        self.sh(["git", "config", "user.name", self.user])
        self.sh(["git", "config", "user.email", f"{self.user}@example.org"])
        self.sh(["tp", "new", self.experiment, "--method", self.method])

    def copied(self, folder_name: str = "lab") -> SlurmLab:
        """A lab like this one, git and all, in a fresh folder."""
        other = copy.copy(self)
        other.env = dict(self.env)
        other.base = self.bed.home(self.user) / f"t-{secrets.token_hex(4)}"
        other.root = other.base / folder_name
        self.sh(["mkdir", str(other.base)], cwd="/")
        self.sh(["cp", "-a", str(self.root), str(other.root)], cwd="/")
        return other

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
        values = {**self.env, **(env or {})}
        return self.bed.exec(
            argv, user=self.user, cwd=where, env=values, check=check, timeout=timeout, input=input
        )

    def tp(self, *words: str | Path, code: int = 0, env: Mapping[str, str] | None = None) -> str:
        """`tp …`, which must leave with `code`: what it printed on standard error, then on standard output."""
        done = self.sh(["tp", *words], env=env, check=False)
        said = done.stderr + done.stdout
        assert done.returncode == code, f"tp {shlex.join(map(str, words))}: {done.returncode}\n{said}"
        assert "Traceback" not in said, said
        return said

    def refused(
        self, *words: str | Path, code: int = 2, env: Mapping[str, str] | None = None, faults: int = 1
    ) -> str:
        """`tp …`, which must refuse with so many messages and leave no run behind: what it said."""
        before = self.run_folders()
        said = self.tp(*words, code=code, env=env)
        assert len([line for line in said.splitlines() if line.startswith("tp: ")]) == faults, said
        assert self.run_folders() == before
        return said

    def run_folders(self, root: Path | None = None) -> list[str]:
        """Whatever there is of runs of this lab's experiments, half-made ones too."""
        runs = (root or self.bed.home(self.user) / "tuneplane") / "runs" / self.user
        names = self.sh(["ls", "experiments"]).stdout.split()
        return self.sh(["find", *(str(runs / name) for name in names)], check=False).stdout.splitlines()

    def own_site(self) -> Path:
        """A copy of the site's configuration that is this lab's alone; every command uses it from here on."""
        folder = self.base / "site-config"
        self.sh(["cp", "-r", str(self.bed.config), str(folder)], cwd="/")
        self.env["TUNEPLANE_CONFIG_DIR"] = str(folder)
        return folder

    def own_user_config(self, path: str, text: str) -> None:
        """A file of the user's configuration folder, which is this lab's alone from here on."""
        self.env["XDG_CONFIG_HOME"] = str(self.base / "user-config")
        self.write(str(self.base / "user-config" / "tuneplane" / path), text)

    def write(self, path: str, text: str) -> None:
        """A file of the lab, or one of the user's by absolute path."""
        target = path if path.startswith("/") else str(self.root / path)
        script = 'mkdir -p "$(dirname -- "$1")" && cat >"$1"'
        self.sh(["sh", "-c", script, "sh", target], input=text)

    def train_sh(self, text: str, *, keep_head: bool = True) -> None:
        """The experiment's train.sh: its scaffold's head, then `text` in place of its end."""
        path = f"experiments/{self.experiment}/train.sh"
        head = ""
        if keep_head:
            lines = self.sh(["cat", path]).stdout.splitlines()
            head = "\n".join(line for line in lines if line not in ("exit 1",) and "no training" not in line)
        self.write(path, f"{head}\n{text}\n")

    def commit(self) -> None:
        self.sh(["sh", "-c", "git add -A && git commit -qm change"])

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
        return self.submit_words(*self.flags(profile, image), *more, env=env)

    def submit_words(self, *words: str, env: Mapping[str, str] | None = None) -> Run:
        """`tp submit` with these flags alone; the run it made."""
        said = json.loads(self.sh(["tp", "submit", self.experiment, *words, "--json"], env=env).stdout)
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

    def __post_init__(self) -> None:
        MADE.append(self)

    def status(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.tp("status", "--json").stdout)
        return value

    def tp(self, command: str, *more: str, check: bool = True) -> CompletedProcess[str]:
        return self.lab.sh(["tp", "job", command, self.run_id, *more], check=check)

    def release(self, name: str = "go") -> None:
        """Let a train.sh that waits by `WAIT_FOR_GO` go on."""
        self.lab.sh(["touch", str(self.folder / "out" / name)])

    def wait_for(self, wanted: Callable[[], Any], what: str, timeout_s: float = 60) -> Any:
        """The first true answer of `wanted`. Fails with what is known of the run."""
        deadline = time.monotonic() + timeout_s
        while not (answer := wanted()):
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}\n{self.known()}")
            time.sleep(0.4)
        return answer

    def known(self) -> str:
        """What a failure shows of the run: its status, and the ends of what it printed."""
        lines = [*self.log().splitlines()[-15:], "---", *self.slurm_output().splitlines()[-15:]]
        return "\n".join([str(self.status()), *(line[:200] for line in lines)])

    def sbatch(self, env: Mapping[str, str] | None = None) -> str:
        """`sbatch` of the run's script by hand; the job's id."""
        return self.lab.sh(["sbatch", "--parsable", str(self.folder / "job.sbatch")], env=env).stdout.strip()

    def wait(self, *states: str, timeout_s: float = 90) -> dict[str, Any]:
        """Wait for one of `states` (for any end where none is said). Fails with what is known of the run."""
        wanted = set(states) or FINAL
        deadline = time.monotonic() + timeout_s
        while True:
            seen, asked_at = self._records(), time.monotonic()
            status = self.status()
            if status["state"] in wanted:
                return status
            if status["state"] in FINAL or time.monotonic() > deadline:
                raise AssertionError(f"not {' or '.join(sorted(wanted))}\n{self.known()}")
            # Asking starts a Python; it is done when the job wrote something, and from time to time.
            while self._records() == seen and time.monotonic() - asked_at < ASK_AGAIN_S:
                time.sleep(0.05)

    def _records(self) -> list[tuple[str, int]]:
        try:
            found = self.folder.glob("attempts/*/*.json")
            return sorted((str(path), path.stat().st_mtime_ns) for path in found)
        except FileNotFoundError:  # one is just being replaced
            return []

    def log(self, *more: str) -> str:
        return self.tp("logs", *more, check=False).stdout

    def slurm_output(self) -> str:
        script = f"cat {shlex.quote(str(self.folder / 'slurm'))}/*.out"
        return self.lab.sh(["bash", "-c", script], check=False).stdout

    def read(self, path: str) -> str:
        """A file of the run folder, as its user reads it."""
        return self.lab.sh(["cat", str(self.folder / path)]).stdout
