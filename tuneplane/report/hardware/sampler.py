"""One sample of what the job uses on this node, by name. Made by Monitor, called in its thread.

A source that fails costs its own values alone. A rate needs the reading before, so that the first sample has none.
"""

from __future__ import annotations

import os
import time

from tuneplane.report.hardware import cgroup, network, processes
from tuneplane.report.hardware.nvml import Gpus, visible_devices

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Callable

    from tuneplane.report.hardware.processes import Marked

CPUS = "SLURM_CPUS_ON_NODE"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class Sampler:
    """The job of this process on node `node`.

    gpus: None where the job has none. job: its processes, where no cgroup of Slurm's tells them.
    cpus: how many it was given.
    """

    def __init__(self, node: int, gpus: Gpus | None, job: Marked, cpus: int) -> None:
        self._prefix = f"system/node{node}/"
        self._gpus = gpus
        self._job = job
        self._cpus = cpus
        self._folders = cgroup.read_job_folders()
        self._before: dict[str, tuple[float, float]] = {}

    def sample(self) -> dict[str, float]:
        """Values and rates of this moment; what could not be had is left out."""
        found: dict[str, float] = {}
        for source in (self._read_gpus, self._read_job, self._read_network):
            found.update(self._read_safely(source))
        return found

    def close(self) -> None:
        """Let the GPUs' library go."""
        if self._gpus is not None:
            self._gpus.close()

    def _read_safely(self, source: Callable[[], Iterator[tuple[str, float]]]) -> dict[str, float]:
        found = {}
        try:
            for name, value in source():
                found[self._prefix + name] = value
        except Exception:  # a kernel that writes its files in another way: what was read before stands
            return found
        return found

    def _read_gpus(self) -> Iterator[tuple[str, float]]:
        if self._gpus is not None:
            yield from self._gpus.read().items()

    def _read_job(self) -> Iterator[tuple[str, float]]:
        pids = cgroup.read_processes(self._folders) or self._job.pids()
        memory, cpu_s = cgroup.read_memory(self._folders), cgroup.read_cpu_s(self._folders)
        if memory is None or cpu_s is None:
            used = processes.read_cpu_and_memory(pids)
            if used is not None:
                cpu_s = used[0] if cpu_s is None else cpu_s
                memory = (used[1], None) if memory is None else memory
        if cpu_s is not None:
            for _, cores in self._rate("cpu", cpu_s):
                yield "cpu_percent", 100 * cores / self._cpus
        if memory is not None:
            in_use, limit = memory
            yield "memory_used_bytes", in_use
            if limit:
                yield "memory_percent", 100 * in_use / limit
        yield from self._rates("disk", ("read", "write"), processes.read_disk(pids))

    def _read_network(self) -> Iterator[tuple[str, float]]:
        yield from self._rates("network", ("received", "sent"), network.read_network())
        yield from self._rates("infiniband", ("received", "sent"), network.read_infiniband())

    def _rates(
        self, what: str, ways: tuple[str, str], totals: tuple[int, int] | None
    ) -> Iterator[tuple[str, float]]:
        for way, total in zip(ways, totals or ()):
            yield from self._rate(f"{what}_{way}_bytes_per_s", total)

    def _rate(self, name: str, total: float) -> Iterator[tuple[str, float]]:
        """The growth a second since the reading before; none where the count went back, as a process ended."""
        now = time.monotonic()
        before = self._before.get(name)
        self._before[name] = (now, total)
        if before is not None and now > before[0] and total >= before[1]:
            yield name, (total - before[1]) / (now - before[0])


def make_sampler(node: int, environ: Mapping[str, str], marks: Mapping[str, str], has_gpus: bool) -> Sampler:
    """The sampler of a job's environment.

    marks: variables by which the job's processes are known, and no other's. has_gpus: whether it may have any.
    """
    given = environ.get(CPUS, "")
    cpus = int(given) if given.isdecimal() and int(given) else len(os.sched_getaffinity(0))
    return Sampler(
        node,
        Gpus(visible_devices(environ.get(VISIBLE_DEVICES))) if has_gpus else None,
        processes.Marked((f"{name}={value}" for name, value in marks.items()), os.getpid()),
        cpus,
    )
