"""The agent of one node: verify, unpack, start the command, pass signals on, record the end.

Runs on the host (design decision 6), started by srun, or by `local.py` on this machine.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tuneplane.containers import Container, Launch, launch
from tuneplane.containers import Mount as Bind
from tuneplane.kernel.errors import Fault, OperationError, TunePlaneError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.unpack import remove_tree, unpack_capsule
from tuneplane.node.allocation import Allocation, differences, read_allocation
from tuneplane.node.attempt import check_start
from tuneplane.node.environment import Place, data_folders, job_environment, read_secrets
from tuneplane.node.process import become_subreaper, descendants, end_descendants, signal_all
from tuneplane.node.record import Heartbeat, NodeRecord
from tuneplane.recipes.adapters import Command, NodeFacts
from tuneplane.recipes.adapters import command as adapter_command
from tuneplane.spec import JobSpec

LEFTOVER_GRACE_S = 2.0
"""How long what the command left behind may take to end, once the command itself has ended."""

CANNOT_START = 125
"""Exit code where the agent could not start the command at all, as of env(1) and container runtimes."""


@dataclass(frozen=True)
class Scratch:
    """`<scratch>/tuneplane-<uid>/<run>.<attempt>.<rank>/`, of this node and attempt, discarded at its end."""

    path: Path

    @property
    def work(self) -> Path:
        return self.path / "work"

    @property
    def temporary(self) -> Path:
        return self.path / "tmp"

    @property
    def home(self) -> Path:
        return self.path / "home"

    @property
    def launch(self) -> Path:
        """How the command was started, 0600: what `tp job shell` starts its shell with."""
        return self.path / "launch.json"


def scratch_folder(job: JobSpec, attempt: int, rank: int) -> Scratch:
    """Where this node and attempt unpack."""
    base = Path(job.spec.node.scratch) / f"tuneplane-{os.getuid()}"
    return Scratch(base / f"{job.metadata.run_id}.{attempt}.{rank}")


def run_node(job: JobSpec, attempt: int, address: str, port: int, environ: Mapping[str, str]) -> int:
    """Run the job's command on this node and return its exit code."""
    run = RunFolder(Path(job.metadata.folder))
    folder = run.attempt(attempt)
    given = read_allocation(job, environ, socket.gethostname())
    told = differences(job, given)
    record = NodeRecord(
        folder,
        given.rank,
        host=given.host,
        pid=os.getpid(),
        slurm_job_id=given.slurm_job_id,
        gpus=given.gpus,
        nodes=given.nodes,
        visible_devices=given.visible_devices,
        differences=told,
        python=platform.python_version(),
    )
    beat = Heartbeat(folder.node_beat(given.rank), job.spec.node.heartbeat_s)
    beat.start()
    scratch = scratch_folder(job, attempt, given.rank)
    stop = StopRequest(folder.stop_marker)
    stop.listen()
    try:
        with folder.node_log(given.rank).open("ab", buffering=0) as log:
            return _run_logged(
                job, given, scratch, address, port, attempt, environ, record, stop, log.fileno()
            )
    except TunePlaneError as error:
        return _cannot_start(record, folder.node_log(given.rank), str(error), stop)
    except OSError as error:
        reason = f"{error.strerror or error}: {error.filename or run.path}"
        return _cannot_start(record, folder.node_log(given.rank), reason, stop)
    finally:
        end_descendants(LEFTOVER_GRACE_S)
        remove_tree(scratch.path)
        beat.stop()


def _run_logged(
    job: JobSpec,
    given: Allocation,
    scratch: Scratch,
    address: str,
    port: int,
    attempt: int,
    environ: Mapping[str, str],
    record: NodeRecord,
    stop: StopRequest,
    log: int,
) -> int:
    run = RunFolder(Path(job.metadata.folder))
    check_start(run, job)
    prepare_scratch(scratch)
    unpack_capsule(run.capsule, scratch.work, job.spec.capsule.digest)
    container = job.spec.container.runtime != "none"
    place = Place(
        work=scratch.work,
        temporary="/tmp" if container else str(scratch.temporary),
        home=str(scratch.home) if container else environ.get("HOME", "/"),
        attempt=attempt,
        address=address,
        port=port,
    )
    values = job_environment(job, given, place, environ, read_secrets(run.secrets))
    command = adapter_command(job.spec.recipe.adapter, node_facts(job, given, place, run))
    started = start_line(job, values, command, scratch, attempt)
    _write_launch(scratch.launch, started, command)
    for line in (*(f"warning: {d}" for d in record.values["differences"]), command_line(given, command)):
        os.write(log, f"tuneplane: {line}\n".encode())
    become_subreaper()
    if stop.told:
        raise OperationError(Fault("asked to stop before the command was started"))
    child = subprocess.Popen(
        started.argv,
        env=started.environ,
        cwd=command.cwd,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    record.write(state="running", command=command.argv, command_pid=child.pid, command_started_at=time.time())
    stop.pass_on_to(child, job.spec.node.stop_grace_s)
    code = child.wait()
    if -code in (signal.SIGTERM, signal.SIGKILL):
        time.sleep(0.2)  # Slurm signals the whole step at once: ours may come just after the child's
    code = 128 - code if code < 0 else code
    record.end(code, exit_sentence(code), stop.told)
    return code


def node_facts(job: JobSpec, given: Allocation, place: Place, run: RunFolder) -> NodeFacts:
    """What the recipe's adapter may know of this node."""
    return NodeFacts(
        work_dir=str(place.work),
        exp_dir=str((place.work / job.spec.entrypoint).parent),
        out_dir=str(run.out),
        entrypoint=str(place.work / job.spec.entrypoint),
        nodes=given.nodes,
        gpus_per_node=given.gpus,
        node_rank=given.rank,
        main_ip=place.address,
        main_port=place.port,
        params=dict(job.spec.hyperparams),
        params_file=str(run.attempt(place.attempt).params),
    )


def start_line(
    job: JobSpec, values: dict[str, str], command: Command, scratch: Scratch, attempt: int
) -> Launch:
    """The argv and environment that start the command in its container, or as it is."""
    spec, run = job.spec, RunFolder(Path(job.metadata.folder))
    container = Container(
        runtime=spec.container.runtime,
        binary=spec.container.binary,
        image=spec.container.image.path if spec.container.image else "",
        options=tuple(spec.container.options),
        gpus=spec.resources.device == "gpu",
        workdir=command.cwd,
        tmp_dir=str(scratch.temporary),
        home_dir=str(scratch.home),
    )
    binds = [
        Bind(str(scratch.work), str(scratch.work), read_only=True),
        Bind(str(run.out), str(run.out)),
        Bind(str(run.ingest), str(run.ingest)),
        Bind(str(run.attempt(attempt).path), str(run.attempt(attempt).path), read_only=True),
    ]
    if spec.container.runtime != "none":
        for folder in data_folders(values):
            if not Path(folder).is_dir():
                raise OperationError(
                    Fault(
                        f"data folder {folder} is not on this node",
                        f"node {socket.gethostname()}",
                        "the site's configuration names it: tell its administrators",
                    )
                )
            binds.append(Bind(folder, folder))
    binds += [Bind(m.source, m.target, m.read_only) for m in spec.container.mounts]
    full = {**values, **command.environment}
    return launch(container, list(command.argv), full, binds, host_environ={"PATH": spec.node.path})


def prepare_scratch(scratch: Scratch) -> None:
    """Make the attempt's folder, 0700, below one that is surely this user's. Raises OperationError."""
    base = scratch.path.parent
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        status = base.lstat()
        if status.st_uid != os.getuid() or not base.is_dir() or base.is_symlink():
            raise OperationError(
                Fault(
                    f"{base} belongs to somebody else", "scratch", "tell the administrators of this cluster"
                )
            )
        if scratch.path.exists():
            remove_tree(scratch.path)  # left by an agent of this very attempt that was killed
        for folder in (scratch.path, scratch.temporary, scratch.home):
            folder.mkdir(mode=0o700)
    except OSError as error:
        raise OperationError(
            Fault(f"no scratch folder: {error.strerror}", str(base), "set `scratch` of the cluster profile")
        ) from None


def command_line(given: Allocation, command: Command) -> str:
    """The line before the trainer's output (C8)."""
    where = f"node {given.rank} of {given.nodes} ({given.host})"
    return f"{where}: {shlex.join(command.argv)}"


def exit_sentence(code: int) -> str:
    """An exit code in words."""
    if code == 0:
        return "the command ended with exit code 0"
    if code > 128:
        try:
            return f"the command was ended by {signal.Signals(code - 128).name} (exit code {code})"
        except ValueError:
            pass
    return f"the command ended with exit code {code}"


class StopRequest:
    """USR2 asks to save and end, by the marker; TERM and INT end the command, with a grace before KILL."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker
        self.told = False
        self._child: subprocess.Popen[bytes] | None = None
        self._grace_s = 0.0

    def listen(self) -> None:
        """Handle the signals from here on."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_end)
        signal.signal(signal.SIGUSR2, self._on_save)

    def pass_on_to(self, child: subprocess.Popen[bytes], grace_s: float) -> None:
        """From here on, signals reach this command."""
        self._child, self._grace_s = child, grace_s
        if self.told:
            self._end_child()

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        try:
            self.marker.touch()
        except OSError as error:
            print(f"tuneplane: stop marker not written: {error}", file=sys.stderr)

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        if not self.told:
            self.told = True
            self._end_child()

    def _end_child(self) -> None:
        if self._child is not None:
            signal_all([self._child.pid, *descendants(self._child.pid)], signal.SIGTERM)
            threading.Thread(target=self._kill_later, daemon=True).start()

    def _kill_later(self) -> None:
        time.sleep(self._grace_s)
        child = self._child
        if child is not None and child.poll() is None:
            signal_all([child.pid, *descendants(child.pid)], signal.SIGKILL)


def _write_launch(path: Path, started: Launch, command: Command) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
        value = {"argv": started.argv, "environ": started.environ, "command": list(command.argv)}
        json.dump({**value, "cwd": command.cwd}, file)


def _cannot_start(record: NodeRecord, log: Path, reason: str, stop: StopRequest) -> int:
    print(f"tuneplane: {reason}", file=sys.stderr)
    try:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"tuneplane: {reason}\n")
    except OSError:
        pass
    record.end(CANNOT_START, reason, stop.told)
    return CANNOT_START
