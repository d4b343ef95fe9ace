"""What tests say to the Slurm of slurm/testbed: commands as a user, a node's failure, a job's end.

Handed out by the fixtures of conftest.py; each call is one call of the program ``slurm/testbed/testbed``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent.parent / "slurm" / "testbed" / "testbed"

#: A name that breaks whatever pastes a path into a shell line, a Slurm pattern or a URL.
WEIRD_NAME = "a b $HOME %j 'q' \"d\" 实验"

#: First start with an empty cache: packages, Apptainer, debootstrap, two images.
SETUP_TIMEOUT_S = 900.0
COMMAND_TIMEOUT_S = 60.0
CHANGE_TIMEOUT_S = 120.0
#: How long the pipes of a killed command may stay open in what it left behind.
DRAIN_TIMEOUT_S = 2.0

#: Base states of slurm's job_state_string() after which a job does not run again (squeue(1), JOB STATE CODES).
FINAL_STATES = frozenset(
    (
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    )
)


class CommandFailed(subprocess.CalledProcessError):
    """A command inside the testbed that exited with another code than 0, with all that it printed."""

    def __str__(self) -> str:
        return f"{super().__str__()}\n--- stdout\n{self.output}\n--- stderr\n{self.stderr}"


def unusable_because() -> str | None:
    """Why no testbed can be started here, or None where one can."""
    if os.geteuid() != 0:
        return "the Slurm testbed needs root"
    release = Path("/etc/os-release")
    if not release.exists() or "VERSION_CODENAME=bookworm" not in release.read_text(encoding="utf-8"):
        return "the Slurm testbed runs on Debian 12 alone"
    for program in ("apt-get", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"the Slurm testbed needs {program}"
    return None


class Testbed:
    """One testbed, told apart from others by its state folder."""

    __test__ = False

    nodes = ("n1", "n2", "n3", "n4")

    def __init__(self, state: Path | None = None, cache: Path | None = None) -> None:
        chosen = os.environ.get("TUNEPLANE_TESTBED_DIR") or "/var/lib/tuneplane-testbed"
        self.state = state = Path(chosen) if state is None else state
        self.shared = state / "shared"
        self.config = state / "config"
        self.image = self.shared / "images" / "minimal.sif"
        self.env_image = self.shared / "images" / "minimal-env.sif"
        self.environment = {**os.environ, "TUNEPLANE_TESTBED_DIR": str(state)}
        if cache is not None:
            self.environment["TUNEPLANE_TESTBED_CACHE"] = str(cache)

    def home(self, user: str = "alice") -> Path:
        return self.shared / "home" / user

    def call(self, *arguments: str, check: bool = True, timeout: float = CHANGE_TIMEOUT_S) -> str:
        """Run one command of the testbed program itself and return what it printed."""
        done = run_command([str(PROGRAM), *arguments], self.environment, None, timeout)
        if check and done.returncode != 0:
            raise CommandFailed(done.returncode, done.args, done.stdout, done.stderr)
        return done.stdout

    def start(self) -> None:
        """Start everything a test uses, or make sure that it runs."""
        self.call("up", timeout=SETUP_TIMEOUT_S)
        self.call("image", timeout=SETUP_TIMEOUT_S)
        self.call("install-tp", timeout=SETUP_TIMEOUT_S)

    def down(self) -> None:
        self.call("down")

    def exec(
        self,
        argv: Sequence[str | Path],
        user: str = "alice",
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        check: bool = True,
        timeout: float = COMMAND_TIMEOUT_S,
        input: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login host with a fresh login's environment and ``env`` on top.

        Values of ``env`` stand in no argument list. Raises CommandFailed where ``check`` and it failed.
        """
        return self._inside(["exec"], argv, user, env, cwd, check, timeout, input)

    def node_exec(
        self,
        node: str,
        argv: Sequence[str | Path],
        user: str = "root",
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        check: bool = True,
        timeout: float = COMMAND_TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node, outside any job."""
        return self._inside(["node-exec", node], argv, user, env, cwd, check, timeout, None)

    def _inside(
        self,
        command: list[str],
        argv: Sequence[str | Path],
        user: str,
        env: Mapping[str, str] | None,
        cwd: str | Path | None,
        check: bool,
        timeout: float,
        input: str | None,
    ) -> subprocess.CompletedProcess[str]:
        words = [str(PROGRAM), *command, "--user", user]
        if cwd is not None:
            words += ["--cwd", str(cwd)]
        with tempfile.TemporaryFile("w+", encoding="utf-8") as values:
            json.dump(dict(env or {}), values)
            values.flush()
            words += ["--env-fd", str(values.fileno()), "--", *map(str, argv)]
            done = run_command(words, self.environment, input, timeout, keep=values.fileno())
        if check and done.returncode != 0:
            raise CommandFailed(done.returncode, list(map(str, argv)), done.stdout, done.stderr)
        return done

    def give(self, path: Path, user: str = "alice") -> Path:
        """Make ``user`` the owner of ``path`` and all below it; returns ``path``."""
        owner = self.home(user).stat()
        for folder, names, files in os.walk(path):
            for name in (*names, *files):
                os.chown(Path(folder, name), owner.st_uid, owner.st_gid, follow_symlinks=False)
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
        return path

    def cut(self, node: str) -> None:
        """Cut a node off the network: a node failure, as far as the others can see."""
        self.call("cut", node)

    def join(self, node: str) -> None:
        self.call("join", node)

    def restart_controller(self) -> None:
        self.call("restart-controller")

    def accounting(self, on: bool) -> None:
        """Switch slurmctld between slurmdbd and no accounting at all; jobs go on."""
        self.call("accounting", "on" if on else "off")

    def set(self, **conf: str | int) -> None:
        """Change values of slurm.conf, such as ``MinJobAge=5``."""
        self.call("set", *(f"{key}={value}" for key, value in conf.items()))

    def reset(self) -> None:
        """The default slurm.conf, accounting on, every node joined."""
        self.call("reset")

    def job(self, job_id: str | int) -> dict[str, str]:
        """The fields of ``scontrol show job`` (of an array: of its first line); empty once Slurm forgot it."""
        done = self.exec(["scontrol", "show", "job", "--oneliner", str(job_id)], check=False)
        line = done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    def wait_job(self, job_id: str | int, timeout: float = 60.0) -> str:
        """Wait until a job has ended and its processes are gone; returns its state, such as ``FAILED``.

        Raises TimeoutError with what Slurm says of it.
        """
        deadline = time.monotonic() + timeout
        while True:
            fields = self.job(job_id)
            if fields.get("JobState", "") in FINAL_STATES:
                return fields["JobState"]
            if not fields:
                done = self.exec(["sacct", "-nXP", "-j", str(job_id), "-o", "State"], check=False)
                words = done.stdout.split()
                if words and words[0] in FINAL_STATES:
                    return words[0]
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} has not ended within {timeout:.0f} s: {fields}")
            time.sleep(0.1)

    def cancel_all(self) -> None:
        """End every job of every user, and wait until none is left."""
        for user in ("alice", "bob", "carol", "root"):
            self.exec(["scancel", "--user", user], user="root")
        deadline = time.monotonic() + CHANGE_TIMEOUT_S
        while self.exec(["squeue", "-h"]).stdout.strip():
            if time.monotonic() > deadline:
                raise TimeoutError(self.exec(["squeue"]).stdout)
            time.sleep(0.1)


def run_command(
    argv: list[str], env: Mapping[str, str], input: str | None, timeout: float, keep: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. Raises subprocess.TimeoutExpired, with what it printed, when it takes too long."""
    process = subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
        pass_fds=() if keep is None else (keep,),
    )
    try:
        out, err = process.communicate(input, timeout=timeout)
    except subprocess.TimeoutExpired as expired:
        os.killpg(process.pid, signal.SIGKILL)
        try:
            out, err = process.communicate(timeout=DRAIN_TIMEOUT_S)
        except subprocess.TimeoutExpired as late:
            out, err = (
                text.decode("utf-8", "replace") if isinstance(text, bytes) else (text or "")
                for text in (late.stdout, late.stderr)
            )
        raise subprocess.TimeoutExpired(argv, timeout, out, err) from expired
    return subprocess.CompletedProcess(argv, process.returncode, out, err)
