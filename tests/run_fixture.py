"""Real run folders for tests of the node agent: a lab committed, its capsule built, the script rendered.

A test says what train.sh is and what differs from a plain run on one node without a container; the run is then
claimed, started and ended by the programs that a job starts, with an environment as clean as a job's.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import secrets as secrets_of_python
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from git_lab import GitLab

from tuneplane import __version__
from tuneplane.capsule import build_capsule, write_kernel_application
from tuneplane.kernel import env
from tuneplane.kernel.digests import sha256_bytes
from tuneplane.kernel.files import write_atomic
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.launch.script import local_script
from tuneplane.launch.slurm import SlurmLauncher
from tuneplane.node.environment import render_secrets
from tuneplane.node.scratch import Scratch, scratch_folder
from tuneplane.runs.folder import make_run_folder
from tuneplane.spec import (
    Capsule,
    Container,
    Framework,
    JobSpec,
    Metadata,
    Node,
    Recipe,
    Reporting,
    Resources,
    Restart,
    Slurm,
    Spec,
    dump,
)

USER = pwd.getpwuid(os.getuid()).pw_name
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
TOKEN = "a-token-of-this-run"
DEADLINE_S = 30.0
SLURM = Slurm(job_name="ring", partition="gpu", gpu_request="gpus-per-node")


def wait_until(true: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Return once `true()`; fail after a while."""
    until = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < until, f"not within {deadline_s:.0f} s: {what}"
        time.sleep(0.02)


class Run:
    """A prepared run, and the calls that its batch script makes."""

    def __init__(self, folder: RunFolder, job: JobSpec, bin_folder: Path) -> None:
        self.folder, self.job, self.bin = folder, job, bin_folder
        self._started: list[subprocess.Popen[str]] = []

    @property
    def path(self) -> Path:
        return self.folder.path

    def attempt(self, number: int = 0) -> AttemptFolder:
        return self.folder.attempt(number)

    def scratch(self, attempt: int = 0, rank: int = 0) -> Scratch:
        return scratch_folder(self.job, attempt, rank)

    def environment(
        self, rank: int = 0, nodes: int = 1, job_id: int | None = 4242, **more: str
    ) -> dict[str, str]:
        """What the agent of a node has: the batch script's clean environment, and Slurm's variables."""
        values = {
            "PATH": f"{self.bin}:{self.job.spec.node.path}",
            "HOME": os.environ.get("HOME", "/"),
            "USER": USER,
            "LOGNAME": USER,
            "LANG": "C.UTF-8",
        }
        if job_id is not None:
            values |= {
                "SLURM_JOB_ID": str(job_id),
                "SLURM_JOB_NODELIST": f"n[1-{nodes}]" if nodes > 1 else "n1",
                "SLURM_JOB_NUM_NODES": str(nodes),
                "SLURM_NNODES": str(nodes),
                "SLURM_STEP_NUM_NODES": str(nodes),
                "SLURM_NODEID": str(rank),
                "SLURM_PROCID": str(rank),
                "SLURM_CPUS_ON_NODE": "2",
                "SLURM_JOB_PARTITION": "gpu",
                "SLURMD_NODENAME": f"n{rank + 1}",
            }
        return values | more

    def kernel(self, *arguments: str) -> list[str]:
        return [self.job.spec.node.python, "-I", "-S", str(self.folder.kernel), *arguments]

    def start(self, *arguments: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start one command of the kernel."""
        process = subprocess.Popen(
            self.kernel(*arguments),
            env=dict(environment),
            cwd=self.path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def finish(
        self, process: subprocess.Popen[str], timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def call(
        self, *arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        started = self.start(
            *arguments, environment=self.environment() if environment is None else environment
        )
        return self.finish(started, timeout_s)

    def claim(self, *hosts: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """What the batch script does first. `more`: of `environment`."""
        names = hosts or (os.uname().nodename,)
        return self.call(
            "claim", str(self.path), *names, environment=self.environment(nodes=len(names), **more)
        )

    def claimed(self, *hosts: str, **more: Any) -> int:
        """Claim, and fail where it is refused; the attempt's number."""
        done = self.claim(*hosts, **more)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[0])

    def node_arguments(self, attempt: int = 0) -> list[str]:
        start = self.start_of(attempt)
        return ["node", str(self.path), str(attempt), start["address"], str(start["port"])]

    def start_node(self, attempt: int = 0, **more: Any) -> subprocess.Popen[str]:
        """Start one node's agent, as srun does."""
        return self.start(*self.node_arguments(attempt), environment=self.environment(**more))

    def node(
        self, attempt: int = 0, timeout_s: float = 60.0, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """One node's agent from its start to its end."""
        return self.finish(self.start_node(attempt, **more), timeout_s)

    def end(self, attempt: int = 0, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self.call("end", str(self.path), str(attempt), str(code))

    def run_once(self, **more: Any) -> subprocess.CompletedProcess[str]:
        """Claim and run a node: the shortest whole job."""
        return self.node(self.claimed(**more), **more)

    def start_script(self, **more: str) -> subprocess.Popen[str]:
        """The run's own script in the background, as `tp` starts a run on this machine."""
        output = (self.folder.slurm / "local.out").open("a")
        process = subprocess.Popen(
            ["/bin/bash", str(self.folder.script)],
            env={**os.environ, **more},
            cwd=self.path,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )
        output.close()
        self._started.append(process)
        return process

    def said(self) -> str:
        """What the run's own script left in its output."""
        return (self.folder.slurm / "local.out").read_text()

    def log(self, rank: int = 0, attempt: int = 0) -> str:
        try:
            return self.attempt(attempt).node_log(rank).read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def record(self, rank: int = 0, attempt: int = 0) -> dict[str, Any]:
        try:
            value: dict[str, Any] = json.loads(self.attempt(attempt).node_record(rank).read_text())
        except FileNotFoundError:
            return {}
        return value

    def start_of(self, attempt: int = 0) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.attempt(attempt).start.read_text())
        return value

    def end_of(self, attempt: int = 0) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.attempt(attempt).end.read_text())
        return value

    def wait_for_line(self, line: str, rank: int = 0, attempt: int = 0) -> None:
        """Wait until the user's program has printed a line."""
        wait_until(
            lambda: line in self.log(rank, attempt), f"{line!r} in {self.log(rank, attempt)!r} of node {rank}"
        )

    def processes(self) -> list[int]:
        """Every process that was started with this run's environment."""
        wanted = f"NRL_RUN_ID={self.job.metadata.run_id}\0".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):
                    if wanted in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def left_in_scratch(self) -> list[str]:
        """What stands of this run in its user's scratch folder."""
        path = self.scratch().path
        return sorted(p.name for p in path.parent.glob(f"{path.name.split('.')[0]}.*"))

    def fake(self, name: str, script: str) -> None:
        """A program that the batch script's PATH has before the system's: Slurm's, for want of one."""
        self.bin.mkdir(exist_ok=True)
        write_atomic(self.bin / name, f"#!/bin/bash\n{script}\n", 0o755)

    def squeue_says(self, state: str) -> None:
        self.fake("squeue", f"echo '{state}'")

    def squeue_fails(self) -> None:
        self.fake("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")

    def kill_all(self) -> None:
        """End what a test left running."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def job_spec(
    folder: Path,
    run_id: str,
    *,
    scratch: Path,
    scheduler: str = "slurm",
    device: str = "cpu",
    nodes: int = 1,
    per_node: int = 1,
    observability: str = "external",
    url: str | None = "https://wandb.example/my-proj",
    reporting: bool = True,
    container: Container | None = None,
    slurm: Slurm | None = SLURM,
    profile: str = "h200:8",
    user: str = USER,
    hyperparams: Mapping[str, Any] | None = None,
    max_restarts: int = 0,
    adapter: str = "custom",
    entrypoint: str = "train.sh",
    preflight: bool = False,
    **node: Any,
) -> JobSpec:
    """The JobSpec of a plain run. `node`: values of its `Node`. Digests of files are filled in by `make_run`."""
    return JobSpec(
        Metadata(
            run_id, user, "ring", "lab", str(folder), "2026-11-29T12:00:00Z", __version__, commit="c" * 40
        ),
        Spec(
            recipe=Recipe(f"{adapter}/{adapter}", "1.0.0", "sha256:" + "1" * 64, adapter),
            framework=Framework("custom", "user-managed", "custom", observability, url),
            entrypoint=f"experiments/ring/{entrypoint}",
            preflight=preflight,
            resources=Resources(profile, profile.partition(":")[0], scheduler, device, nodes, per_node),
            container=container or Container("none"),
            node=Node(
                **{
                    "python": PYTHON,
                    "path": SYSTEM_PATH,
                    "scratch": str(scratch),
                    "heartbeat_s": 0.2,
                    "stop_grace_s": 5.0,
                    **node,
                }
            ),
            reporting=Reporting(
                reporting,
                RunFolder(folder).ingest.as_uri() if reporting else "",
                sha256_bytes(TOKEN.encode()) if reporting else "",
            ),
            capsule=Capsule("sha256:" + "0" * 64, 0, 0, ""),
            hyperparams=dict(hyperparams or {}),
            slurm=slurm if scheduler == "slurm" else None,
            restart=Restart(max_restarts),
        ),
    )


def make_run(
    where: Path,
    train: str,
    *,
    files: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    mode: int = 0o700,
    number: int = 0,
    **spec: Any,
) -> Run:
    """A run below `where`, complete as `tp render` leaves it. `train`: what train.sh does after its first line.

    files: more files of the experiment's folder. secrets: the site's. number: tells runs of one lab apart.
    """
    lab = GitLab(where / f"lab{number}")
    for name, text in {"train.sh": f"#!/bin/bash\n{train}\n", **(files or {})}.items():
        lab.write(f"experiments/ring/{name}", text)
    lab.commit()
    scratch = where / "scratch"
    scratch.mkdir(exist_ok=True)
    # Of its own: processes are known by it, and tests run side by side.
    run_id = f"ring-20261129-120000-{secrets_of_python.token_hex(2)}"
    run = make_run_folder(where / "storage", USER, "ring", run_id, mode)
    job = job_spec(run.path, run_id, scratch=scratch, secrets=sorted(secrets or {}), **spec)
    info = build_capsule(lab.root, run.capsule)
    kernel = write_kernel_application(run.kernel)
    capsule = Capsule(info.digest, info.size_bytes, info.files, kernel)
    job = dataclasses.replace(job, spec=dataclasses.replace(job.spec, capsule=capsule))
    text = dump(job)
    write_atomic(run.job, text, 0o444)
    write_atomic(run.sums, f"{sha256_bytes(text.encode())}  job.json\n{kernel}  kernel.pyz\n", 0o444)
    write_atomic(run.canary, f"{run_id}\n", 0o444)
    values = {**(secrets or {}), **({env.TOKEN: TOKEN} if job.spec.reporting.enabled else {})}
    if values:
        write_atomic(run.secrets, render_secrets(values), 0o600)
    script = local_script(job) if job.spec.slurm is None else SlurmLauncher(job).render()
    write_atomic(run.script, script, 0o444)
    return Run(run, job, where / "bin")


@contextmanager
def runs_below(where: Path) -> Iterator[Callable[..., Run]]:
    """`make_run` for one test: any number of runs below `where`, nothing of which outlives it."""
    made: list[Run] = []

    def make(train: str, **more: Any) -> Run:
        made.append(make_run(where, train, number=len(made), **more))
        return made[-1]

    try:
        yield make
    finally:
        for run in made:
            run.kill_all()


@contextmanager
def small_file_system(image: Path, place: Path, size_bytes: int) -> Iterator[None]:
    """A file system of its own at `place`, to be filled or frozen. Skips where none can be mounted."""
    place.mkdir(parents=True, exist_ok=True)
    with image.open("wb") as file:
        file.truncate(size_bytes)
    made = subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        made = subprocess.run(
            ["mount", "-o", "loop", image, place], capture_output=True, text=True, check=False
        )
    if made.returncode != 0:
        reason = f"no file system can be mounted here: {made.stderr}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", place], capture_output=True, check=False)
        wait_until(lambda: subprocess.run(["umount", place], check=False).returncode == 0, "unmounted")
