"""Hardware of the job as metrics `system/node<n>/…`: GPUs, CPU, memory, disk, network (C20).

The SDK's own sampler is started here, by Session; the node agent's by `tuneplane.node.sampler`. Never both.
"""

from __future__ import annotations

import os

from tuneplane.report import ingest
from tuneplane.report.hardware.monitor import INTERVAL, Monitor
from tuneplane.report.hardware.sampler import make_sampler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuneplane.report.ingest import Ingest
    from tuneplane.report.writer import Writer

BRIDGE = "TUNEPLANE_JOB_HARDWARE_BRIDGE"
_NO = ("", "0", "false", "no", "off")


class _Process:
    """Which process samples already: this one, or one that it was forked from."""

    sampling = 0


def platform_samples(environ: Mapping[str, str]) -> bool:
    """Whether the environment says that the platform's own sampler runs."""
    return environ.get(BRIDGE, "").strip().lower() not in _NO


def is_first_rank(bound: Ingest, environ: Mapping[str, str]) -> bool:
    """Whether this is the job's one process that samples: global rank 0, local rank 0 on machine rank 0."""
    names = (ingest.MACHINE_RANK, ingest.LOCAL_RANK)
    return bound.rank == 0 and all(environ.get(name, "0").strip() in ("", "0") for name in names)


def start_monitor(bound: Ingest, environ: Mapping[str, str], writer: Writer | None = None) -> Monitor | None:
    """Start this process's sampler, where it is the one to have it and nobody samples for it.

    writer: that of the sampler that this process had before.
    """
    if _Process.sampling or platform_samples(environ) or not is_first_rank(bound, environ):
        return None
    marks = {ingest.RUN_ID: bound.run_id, ingest.MACHINE_RANK: environ.get(ingest.MACHINE_RANK, "")}
    sampler = make_sampler(0, environ, {k: v for k, v in marks.items() if v}, has_gpus=True)
    monitor = Monitor(bound, 0, sampler, environ.get(INTERVAL, ""), writer)
    if not monitor.start():
        return None
    _Process.sampling = os.getpid()
    return monitor


def end_monitor(monitor: Monitor, wait_s: float) -> None:
    """Stop what `start_monitor` started; another may start then."""
    _Process.sampling = 0
    monitor.stop(wait_s)
