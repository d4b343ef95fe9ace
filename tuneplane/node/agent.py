"""The agent of one node: verify, unpack, start the command, pass signals on, record the end.

Runs on the host (design decision 6), started by srun, or by `local.py` on this machine.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tuneplane.containers import Launch
from tuneplane.kernel.errors import Fault, OperationError, TunePlaneError
from tuneplane.kernel.files import write_atomic
from tuneplane.kernel.runfolder import RunFolder, is_hardware_file
from tuneplane.kernel.unpack import unpack_capsule
from tuneplane.node.allocation import count_devices, differences, read_allocation
from tuneplane.node.command import command_line, node_facts, output_folder, start_line
from tuneplane.node.early import EARLY_S, explain
from tuneplane.node.ending import Ending
from tuneplane.node.environment import Place, job_environment, read_secrets
from tuneplane.node.failure import read_failure, read_preflight
from tuneplane.node.fence import Fence
from tuneplane.node.hang import HangWatch
from tuneplane.node.process import become_subreaper
from tuneplane.node.ranks import count_cpus, launched, rank_environment
from tuneplane.node.record import TOLD, NodeRecord, read_record
from tuneplane.node.sampler import end_sampling, start_sampling
from tuneplane.node.scratch import (
    held_scratch,
    make_user_folder,
    remove_abandoned,
    scratch_folder,
    write_launch,
)
from tuneplane.node.signals import Signals
from tuneplane.node.start import check_start
from tuneplane.node.trainer import CannotStart, Ended, Trainer, exit_sentence
from tuneplane.recipes.adapters import compile_command
from tuneplane.spec import JobSpec

if TYPE_CHECKING:
    from tuneplane.report.hardware.monitor import Monitor

CANNOT_START = 125
"""Exit code where the agent failed before any command was started, as of env(1) and container runtimes."""


class NodeRun:
    """One node of one attempt, from the empty scratch folder to the exit record."""

    def __init__(
        self,
        job: JobSpec,
        attempt: int,
        address: str,
        port: int,
        environ: Mapping[str, str],
        signals: Signals,
    ) -> None:
        self.job, self.environ, self.signals = job, environ, signals
        self.given = read_allocation(job, environ, os.uname().nodename, count_devices())
        self.folder = RunFolder(Path(job.metadata.folder))
        self.attempt = self.folder.attempt(attempt)
        self.scratch = scratch_folder(job, attempt, self.given.rank)
        contained = job.spec.container.runtime != "none"
        self.place = Place(
            work=self.scratch.work,
            temporary="/tmp" if contained else str(self.scratch.temporary),
            home=str(self.scratch.home) if contained else environ.get("HOME", "/"),
            attempt=attempt,
            address=address,
            port=port,
            out=str(output_folder(job)),
        )
        self.differences = differences(job, self.given)
        self.record = NodeRecord(
            self.attempt,
            self.given.rank,
            job.spec.node.heartbeat_s,
            host=self.given.host,
            pid=os.getpid(),
            slurm_job_id=self.given.slurm_job_id,
            gpus=self.given.gpus,
            nodes=self.given.nodes,
            visible_devices=self.given.visible_devices,
            differences=self.differences,
            python=sys.version.split()[0],
        )
        self.started_at = 0.0
        self.sampling: Monitor | None = None
        self.fence = Fence(
            self.folder,
            self.attempt,
            self.given.rank,
            read_record(self.attempt.start),
            job.spec.node.heartbeat_s,
            signals,
            environ,
        )
        self.hang = HangWatch(
            self.folder,
            self.attempt,
            self.given.rank,
            job.spec.node.hang_limit_s,
            signals,
            self.fence.tell_hung,
            self.fence.told_hung,
        )
        slurm = job.spec.resources.scheduler == "slurm"
        ending = Ending(job.spec.node.save_s, job.spec.node.stop_grace_s, shared=slurm)
        self.trainer = Trainer(signals, ending, self._ask_to_save, job.spec.node.save_signal)

    def run(self) -> int:
        """Prepare, start, wait, record; the command's exit code. Leaves no process and no folder behind."""
        self.record.start()
        self.fence.start()
        become_subreaper()
        try:
            ended = self._run_command()
        except CannotStart as error:
            ended = self._failed(error.code, str(error))
        except TunePlaneError as error:
            ended = self._failed(CANNOT_START, str(error))
        except OSError as error:
            place = error.filename or self.folder.path
            ended = self._failed(CANNOT_START, f"{place}: {error.strerror or error}")
        except Exception as error:  # whatever it is, the run's record must say that this node has ended
            ended = self._failed(CANNOT_START, f"the node agent failed: {type(error).__name__}: {error}")
        self.fence.stop()
        if not self.record.end(ended.code, ended.reason, ended.told, ended.at):
            with suppress(OSError):
                print(f"tuneplane: {self.attempt.path} takes no exit record: {ended.reason}", file=sys.stderr)
        if self.fence.declare() and self.given.rank != 0:  # node 0, whose batch script would do it, is dead
            from tuneplane.node.chain import end_for_node_0

            end_for_node_0(self.folder, self.attempt, self.environ)
        return ended.code

    def _ask_to_save(self) -> None:
        self.record.ask_to_save("" if self.signals.save else TOLD)
        self.fence.look_now()

    def _run_command(self) -> Ended:
        with self.attempt.node_log(self.given.rank).open("ab", buffering=0) as log:
            check_start(self.folder, self.job)
            Path(self.place.out).mkdir(exist_ok=True)
            remove_abandoned(make_user_folder(self.job))
            with held_scratch(self.scratch):
                try:
                    started = self._start(log.fileno())
                    ended = self.trainer.wait()
                    self.hang.stop()
                    self.record.change(
                        state="ending",
                        code=ended.code,
                        reason=ended.reason,
                        told_to_stop=ended.told,
                        fenced=bool(self.signals.cut),
                        ended_at=ended.at,
                    )
                finally:
                    end_sampling(self.sampling)
                    self.trainer.end_rest()
                ended = self._with_failure(ended)
                self._explain(started, ended, log.fileno())
        return ended

    def _start(self, log: int) -> Launch:
        job, spec = self.job, self.job.spec
        unpack_capsule(self.folder.capsule, self.scratch.work, spec.capsule.digest)
        secrets = read_secrets(self.folder.secrets)
        values = job_environment(job, self.given, self.place, self.environ, secrets)
        facts = node_facts(job, self.given, self.place, self.scratch)
        command = compile_command(spec.recipe.adapter, spec.operation, facts)
        command = launched(
            command, facts, str(self.scratch.ranks), ("--preflight",) if spec.preflight else ()
        )
        for path, text in command.files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(Path(path), text, 0o600)
        own = rank_environment(command, values, self.given.gpus, count_cpus(self.environ))
        values = {**values, **own, **command.env}
        rank = self.given.rank
        started = start_line(job, values, command, self.scratch, self.attempt, self.environ, rank)
        write_launch(self.scratch.launch, started)
        lines = [*(f"warning: {told}" for told in self.differences), command_line(self.given, command)]
        text = "".join(f"tuneplane: {line}\n" for line in lines)
        os.write(log, text.encode("utf-8", "surrogateescape"))
        self.signals.wait(0)
        if self.signals.told:
            raise OperationError(Fault("asked to end before the command was started"))
        pid = self.trainer.start(started, log)
        self.started_at = time.time()
        self.record.change(
            state="running", command=command.argv, command_pid=pid, command_started_at=self.started_at
        )
        self.hang.start()
        self.sampling = start_sampling(job, values)
        return started

    def _with_failure(self, ended: Ended) -> Ended:
        """The end with what is known of the ranks: which failed first, and how the check before training went."""
        ranks_dir, log = self.scratch.ranks, self.attempt.node_log(self.given.rank)
        checked = read_preflight(ranks_dir, self.given.gpus)
        if checked:
            self.record.change(preflight=checked)
        if not ended.code or self.signals.hung:
            return ended
        failed = read_failure(ranks_dir, log, self.given.host, self.given.rank, self.given.gpus)
        told = ended.told
        reason = ended.reason
        if failed is not None:
            self.record.change(failure=failed.as_dict())
            told = told and not failed.was_before(self.trainer.told_at)
            if not told:
                reason = f"{exit_sentence(ended.code)}: {failed.sentence()}"
        if checked and not checked["ok"] and not told:
            reason = f"preflight: {checked['told']}"
        return dataclasses.replace(ended, told=told, reason=reason)

    def _explain(self, started: Launch, ended: Ended, log: int) -> None:
        """Where a command in a container failed at once and reported nothing: what its image has."""
        early = ended.code != 0 and ended.at - self.started_at < EARLY_S
        if self.job.spec.container.runtime == "none" or not early or ended.told or self.signals.told:
            return
        points = self.folder.ingest.glob(f"{self.attempt.number}-*")
        if any(not is_hardware_file(path.name) for path in points):
            return
        with suppress(OSError):  # the command's own end stands, whatever comes of this
            lines = explain(self.job.spec, started, self.scratch, self.signals)
            text = "".join(f"tuneplane: {line}\n" for line in lines)
            os.write(log, text.encode("utf-8", "surrogateescape"))

    def _failed(self, code: int, reason: str) -> Ended:
        """Say why there is no command, in the node's log and in the batch script's output."""
        self.signals.wait(0)
        with suppress(OSError):  # srun may be gone already
            print(f"tuneplane: {reason}", file=sys.stderr)
        with suppress(OSError), self.attempt.node_log(self.given.rank).open("a", encoding="utf-8") as file:
            file.write(f"tuneplane: {reason}\n")
        return Ended(code, self.signals.told, reason, time.time())
