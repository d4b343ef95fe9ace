"""The agent of one node: verify, unpack, start the command, pass signals on, record the end.

Runs on the host (design decision 6), started by srun, or by `local.py` on this machine.
"""

from __future__ import annotations

import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tuneplane.containers import Container, Launch, launch
from tuneplane.containers import Mount as Bind
from tuneplane.kernel.errors import Fault, OperationError, TunePlaneError
from tuneplane.kernel.files import write_atomic
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.kernel.unpack import remove_tree, unpack_capsule
from tuneplane.node.allocation import Allocation, differences, read_allocation
from tuneplane.node.attempt import check_start
from tuneplane.node.environment import Place, data_folders, job_environment, read_secrets
from tuneplane.node.process import become_subreaper, end_descendants
from tuneplane.node.record import Heartbeat, NodeRecord
from tuneplane.node.scratch import Scratch, prepare_scratch, scratch_folder, write_launch
from tuneplane.node.stop import StopRequest
from tuneplane.recipes.adapters import Command, NodeFacts, load_adapter
from tuneplane.spec import JobSpec

LEFTOVER_GRACE_S = 2.0
"""How long what the command left behind may take to end, once the command itself has ended."""

CANNOT_START = 125
"""Exit code where the agent could not start the command at all, as of env(1) and container runtimes."""


def run_node(job: JobSpec, attempt: int, address: str, port: int, environ: Mapping[str, str]) -> int:
    """Run the job's command on this node and return its exit code."""
    given = read_allocation(job, environ, socket.gethostname())
    return NodeRun(job, given, attempt, address, port, environ).run()


class NodeRun:
    """One node of one attempt, from the empty scratch folder to the exit record."""

    def __init__(
        self,
        job: JobSpec,
        given: Allocation,
        attempt: int,
        address: str,
        port: int,
        environ: Mapping[str, str],
    ) -> None:
        self.job, self.given, self.environ = job, given, environ
        self.folder = RunFolder(Path(job.metadata.folder))
        self.attempt = self.folder.attempt(attempt)
        self.scratch = scratch_folder(job, attempt, given.rank)
        contained = job.spec.container.runtime != "none"
        self.place = Place(
            work=self.scratch.work,
            temporary="/tmp" if contained else str(self.scratch.temporary),
            home=str(self.scratch.home) if contained else environ.get("HOME", "/"),
            attempt=attempt,
            address=address,
            port=port,
        )
        self.differences = differences(job, given)
        self.stop = StopRequest(self.attempt.stop_marker)
        self.record = NodeRecord(
            self.attempt,
            given.rank,
            host=given.host,
            pid=os.getpid(),
            slurm_job_id=given.slurm_job_id,
            gpus=given.gpus,
            nodes=given.nodes,
            visible_devices=given.visible_devices,
            differences=self.differences,
            python=platform.python_version(),
        )

    def run(self) -> int:
        """Prepare, start, wait, record. Leaves no process and no scratch folder behind."""
        beat = Heartbeat(self.attempt.node_beat(self.given.rank), self.job.spec.node.heartbeat_s)
        beat.start()
        self.stop.listen()
        become_subreaper()
        try:
            with self.attempt.node_log(self.given.rank).open("ab", buffering=0) as log:
                return self._run_command(log.fileno())
        except TunePlaneError as error:
            return self._cannot_start(str(error))
        except OSError as error:
            return self._cannot_start(f"{error.strerror or error}: {error.filename or self.folder.path}")
        finally:
            end_descendants(LEFTOVER_GRACE_S)
            remove_tree(self.scratch.path)
            beat.stop()

    def _run_command(self, log: int) -> int:
        check_start(self.folder, self.job)
        prepare_scratch(self.scratch)
        unpack_capsule(self.folder.capsule, self.scratch.work, self.job.spec.capsule.digest)
        secrets = read_secrets(self.folder.secrets)
        values = job_environment(self.job, self.given, self.place, self.environ, secrets)
        facts = node_facts(self.job, self.given, self.place)
        command = load_adapter(self.job.spec.recipe.adapter).train(facts)
        for path, text in command.files.items():
            write_atomic(Path(path), text, 0o600)
        started = start_line(self.job, {**values, **command.env}, command, self.scratch, self.attempt)
        write_launch(self.scratch.launch, started, command)
        for line in (*(f"warning: {told}" for told in self.differences), command_line(self.given, command)):
            os.write(log, f"tuneplane: {line}\n".encode())
        if self.stop.told:
            raise OperationError(Fault("asked to stop before the command was started"))
        child = subprocess.Popen(
            started.argv,
            env=started.environ,
            cwd=started.cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self.record.write(
            state="running", command=command.argv, command_pid=child.pid, command_started_at=time.time()
        )
        self.stop.pass_on_to(child, self.job.spec.node.stop_grace_s)
        code = child.wait()
        if -code in (signal.SIGTERM, signal.SIGKILL) or code > 128:
            time.sleep(0.2)  # Slurm signals the whole step at once: ours may come just after the child's
        code = 128 - code if code < 0 else code
        self.record.end(code, exit_sentence(code), self.stop.told)
        return code

    def _cannot_start(self, reason: str) -> int:
        print(f"tuneplane: {reason}", file=sys.stderr)
        with suppress(OSError), self.attempt.node_log(self.given.rank).open("a", encoding="utf-8") as file:
            file.write(f"tuneplane: {reason}\n")
        self.record.end(CANNOT_START, reason, self.stop.told)
        return CANNOT_START


def node_facts(job: JobSpec, given: Allocation, place: Place) -> NodeFacts:
    """What the recipe's adapter may know of this node."""
    run = RunFolder(Path(job.metadata.folder))
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
    job: JobSpec, values: Mapping[str, str], command: Command, scratch: Scratch, attempt: AttemptFolder
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
        Bind(str(attempt.path), str(attempt.path), read_only=True),
        *(Bind(m.source, m.target, m.read_only) for m in spec.container.mounts),
    ]
    if spec.container.runtime != "none":
        targets = {bind.target for bind in binds}
        binds += [Bind(f, f) for f in dict.fromkeys(data_folders(values)) if f not in targets]
        missing = [bind.source for bind in binds if not Path(bind.source).exists()]
        if missing:
            raise OperationError(
                *(
                    Fault(
                        f"{source} is to be mounted and is not on this node",
                        f"node {socket.gethostname()}",
                        "--mount, the site's mounts, HF_HOME and *_DATA_DIR must name what compute nodes see",
                    )
                    for source in missing
                )
            )
    host = {"PATH": spec.node.path, "TMPDIR": str(scratch.temporary)}
    return launch(container, command.argv, values, binds, host)


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
