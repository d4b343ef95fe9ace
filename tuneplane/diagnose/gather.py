"""Everything that is looked at to say why a run is as it is, once and cheaply. `tp job why` calls `gather`.

Whatever cannot be looked at is noted and passed over: half of the evidence is better than none.
"""

from __future__ import annotations

import os
import re
import tarfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tuneplane.diagnose.committed import read_code
from tuneplane.diagnose.evidence import (
    Code,
    End,
    Evidence,
    Interpreter,
    Job,
    Log,
    Node,
    Outputs,
    Points,
    Process,
    Slurm,
    Space,
)
from tuneplane.diagnose.followed import read_end, read_ending, read_fence, read_paused, read_restart
from tuneplane.diagnose.interpreters import read_interpreters
from tuneplane.diagnose.logs import SEARCH_S, read_log
from tuneplane.diagnose.look import read_outputs, read_points, read_space
from tuneplane.diagnose.processes import read_processes
from tuneplane.diagnose.rankends import read_rank_end, read_refusal
from tuneplane.diagnose.silence import QUIET_S, silence_s
from tuneplane.diagnose.slurmwords import read_slurm
from tuneplane.kernel.errors import TunePlaneError
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.node.record import read_record
from tuneplane.runs.records import number as real
from tuneplane.runs.records import read_hosts, stopped_jobs, whole
from tuneplane.runs.state import WAITING, read_state
from tuneplane.spec import JobSpec, read

T = TypeVar("T")

_MODULE = re.compile(r"No module named '([A-Za-z_]\w*)")


def gather(run: RunFolder, *, quiet_s: float = QUIET_S) -> Evidence:
    """All that is known of a run. Asks squeue, and sacct and scontrol where they can say more. Never raises.

    quiet_s: a running command that has been silent for so long is looked at with a step of its own.
    """
    return _Gathering(run, quiet_s).evidence()


class _Gathering:
    """One look at one run."""

    def __init__(self, run: RunFolder, quiet_s: float) -> None:
        self.run, self.quiet_s = run, quiet_s
        self.unread: list[str] = []
        self.state = read_state(run)
        self.spec = self._try("job.json", lambda: read(run.job), None)
        self.attempts = self._try("attempts", run.attempts, [])
        self.last = self.attempts[-1] if self.attempts else None
        self.now = time.time()

    def evidence(self) -> Evidence:
        run, state, last = self.run, self.state, self.last
        nodes = _nodes(last, self.now) if last else ()
        hosts = read_hosts(last) if last else {}
        logs, batch = self._logs(hosts)
        points = self._points()
        start = read_record(last.start) if last else {}
        end = read_record(last.end) if last else {}
        module = _missing_module(logs)
        return Evidence(
            run_id=run.run_id,
            experiment=run.path.parent.name,
            folder=str(run.path),
            state=state.state,
            now=self.now,
            code=state.code,
            reason=state.reason,
            job_id=state.job_id,
            attempt=state.attempt,
            attempts=state.attempts,
            job=_job(self.spec) if self.spec else None,
            nodes=nodes,
            hosts=tuple(hosts[rank] for rank in sorted(hosts, key=int)),
            logs=logs,
            batch=batch,
            started_at=real(start.get("started_at")),
            ended_at=real(end.get("ended_at")),
            stop_marker=last is not None and last.stop_marker.exists(),
            submit_error=self._text(run.submit_error),
            stopped=tuple(sorted(stopped_jobs(run))),
            paused=read_paused(run),
            submitted_at=state.submitted_at,
            earlier_ends=tuple(read_ending(attempt) for attempt in self.attempts[:-1][-5:]),
            follows=str(start.get("follows") or ""),
            end=read_end(last) if last else End(),
            restart=read_restart(last, self.now) if last else None,
            fence=read_fence(last) if last else None,
            slurm=self._try("Slurm", self._slurm, Slurm()),
            points=points,
            written=self._code(),
            outputs=self._try("out", lambda: read_outputs(run.out), Outputs()),
            spaces=self._spaces(),
            processes=self._processes(nodes, logs, points),
            missing_module=module,
            interpreters=self._interpreters(module),
            unread=tuple(self.unread),
        )

    def _logs(self, hosts: dict[str, str]) -> tuple[tuple[Log, ...], Log | None]:
        found: list[Log] = []
        paths = sorted(self.last.path.glob("node-*.log")) if self.last else []
        ranks = sorted(int(path.stem[5:]) for path in paths if path.stem[5:].isdecimal())
        deadline = time.monotonic() + SEARCH_S
        for place, rank in enumerate(ranks):
            assert self.last is not None
            path, host = self.last.node_log(rank), hosts.get(str(rank), "")
            # Each log has its share of the time that is left.
            until = time.monotonic() + (deadline - time.monotonic()) / (len(ranks) - place)
            log = self._try(
                path.name,
                partial(read_log, path, rank, host, share=len(ranks), deadline=until),
                None,
            )
            found += [log] if log else []
        return tuple(found), self._batch()

    def _batch(self) -> Log | None:
        """What the batch script of the run's present job said; of an ended run, that of its latest start.

        A start by hand that was refused claims nothing, and so is no job that the run's state tells of.
        """
        job = self.state.job_id
        path = self.run.slurm / ("local.out" if not job or job.startswith("local-") else f"{job}.out")
        if not job or self.state.is_final:
            path = max([path, *self.run.slurm.glob("*.out")], key=_changed_at)
        return self._try(path.name, lambda: read_log(path, share=8), None)

    def _points(self) -> Points:
        if not self.run.ingest.is_dir():
            return Points()
        token = self.spec.spec.reporting.token_sha256 if self.spec else ""
        return self._try("ingest", lambda: read_points(self.run.ingest, self.run.run_id, token), Points())

    def _spaces(self) -> tuple[Space, ...]:
        """Of the storage, and for a run of this machine of its scratch folder too."""
        found = [self._try("storage", lambda: read_space("storage", self.run.path), None)]
        if self.spec and self.spec.spec.resources.scheduler == "local":
            scratch = Path(self.spec.spec.node.scratch)
            found.append(self._try("scratch", lambda: read_space("scratch", scratch), None))
        return tuple(space for space in found if space)

    def _slurm(self) -> Slurm:
        state = self.state
        if not state.job_id or state.job_id.startswith("local-"):
            return Slurm()
        if state.state == "COMPLETED":
            return Slurm(state.job_id, state.state, state.reason)
        return read_slurm(
            state.job_id,
            str(self.run.path),
            state.state,
            state.reason,
            waits=state.state in WAITING,
            ended=state.is_final,
        )

    def _code(self) -> Code:
        if self.spec is None:
            return Code()
        entrypoint = self.spec.spec.entrypoint
        if self.spec.spec.entrypoint_kind == "module":  # the experiment's own part is what it configures
            entrypoint = f"experiments/{self.spec.metadata.experiment}/config.yaml"
        return self._try("capsule.tar", lambda: read_code(self.run.capsule, entrypoint), Code())

    def _processes(
        self, nodes: tuple[Node, ...], logs: tuple[Log, ...], points: Points
    ) -> tuple[Process, ...]:
        """What the command's processes do, where the run runs and has been silent for long."""
        commands = {n.rank: (n.host, n.command_pid) for n in nodes if n.command_pid and n.code is None}
        if self.state.state != "RUNNING" or self.spec is None or not commands:
            return ()
        if silence_s(self.now, nodes, logs, points) < self.quiet_s:
            return ()
        job = self.state.job_id
        looked = read_processes(self.spec.spec.node.python, commands, "" if job.startswith("local-") else job)
        if isinstance(looked, tuple):
            return looked
        self.unread.append(f"processes: {looked}")
        return ()

    def _interpreters(self, module: str) -> tuple[Interpreter, ...]:
        if not module or self.spec is None or module == "tuneplane":
            return ()
        container = self.spec.spec.container
        image = container.image.path if container.image else ""
        looked = read_interpreters(
            module,
            container.runtime,
            container.binary,
            tuple(container.options),
            image,
            self.spec.spec.node.path,
        )
        if isinstance(looked, tuple):
            return looked
        self.unread.append(f"image: {looked}")
        return ()

    def _text(self, path: Path) -> str:
        try:
            return " ".join(path.read_text(encoding="utf-8", errors="replace").split())
        except OSError:
            return ""

    def _try(self, what: str, look: Callable[[], T], otherwise: Any) -> T:
        try:
            return look()
        except TunePlaneError as error:
            self.unread.append(f"{what}: {error.faults[0].what}")
        except (OSError, ValueError, tarfile.TarError, EOFError) as error:
            told = error.strerror if isinstance(error, OSError) else str(error)
            self.unread.append(f"{what}: {told}")
        return otherwise  # type: ignore[no-any-return]


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _nodes(attempt: AttemptFolder, now: float) -> tuple[Node, ...]:
    found = []
    for path in attempt.path.glob("node-*.json"):
        value = read_record(path)
        rank = whole(value.get("rank"))
        if rank is None:
            continue
        differences = value.get("differences")
        try:
            beat: float | None = max(0.0, now - attempt.node_beat(rank).stat().st_mtime)
        except OSError:
            beat = None
        found.append(
            Node(
                rank=rank,
                host=str(value.get("host", "")),
                state=str(value.get("state", "")),
                code=whole(value.get("code")),
                reason=str(value.get("reason") or ""),
                told_to_stop=value.get("told_to_stop") is True,
                started_at=real(value.get("started_at")),
                command_started_at=real(value.get("command_started_at")),
                command_pid=whole(value.get("command_pid")),
                ended_at=real(value.get("ended_at")),
                beat_age_s=beat,
                differences=tuple(map(str, differences)) if isinstance(differences, list) else (),
                failure=read_rank_end(value.get("failure")),
                preflight=read_refusal(value.get("preflight")),
            )
        )
    return tuple(sorted(found, key=lambda node: node.rank))


def _job(job: JobSpec) -> Job:
    spec = job.spec
    slurm = spec.slurm
    image = spec.container.image.path if spec.container.image else ""
    data = [
        f"{name}={value}"
        for name, value in sorted(spec.node.environment.items())
        if name == "HF_HOME" or name.endswith("_DATA_DIR")
    ]
    return Job(
        scheduler=spec.resources.scheduler,
        profile=spec.resources.profile,
        device=spec.resources.device,
        nodes=spec.resources.nodes,
        gpus_per_node=spec.resources.gpus_per_node,
        recipe=spec.recipe.name,
        observability=spec.framework.observability,
        entrypoint=spec.entrypoint,
        runtime=spec.container.runtime,
        python=spec.node.python,
        scratch=spec.node.scratch,
        image=image,
        image_there=not image or os.path.exists(image),  # noqa: PTH110
        memory_per_node=spec.resources.memory_per_node or "",
        partition=(slurm.partition if slurm else None) or "",
        account=(slurm.account if slurm else None) or "",
        qos=(slurm.qos if slurm else None) or "",
        time=(slurm.time if slurm else None) or "",
        reporting=spec.reporting.enabled,
        signal_before_end_s=slurm.signal_before_end_s if slurm else None,
        stop_grace_s=spec.node.stop_grace_s,
        mounts=tuple(mount.source for mount in spec.container.mounts),
        data=tuple(data),
    )


def _missing_module(logs: tuple[Log, ...]) -> str:
    for log in logs:
        mark = log.mark("no-module")
        if mark and (found := _MODULE.search(mark.last) or _MODULE.search(mark.first)):
            return found[1]
    return ""
