"""The node agent's hardware sampler, one a node, for recipes that report to the platform (C20).

Called by `agent.py` once the trainer runs; the trainer is told of it by `environment.py`, so that it starts none.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from tuneplane.kernel import env
from tuneplane.spec import JobSpec

if TYPE_CHECKING:
    from tuneplane.report.hardware.monitor import Monitor

FLUSH_S = 0.2
"""How long the end of a node may wait for its last sample to be written."""


def samples_hardware(job: JobSpec) -> bool:
    """Whether the agent samples. A site that sets TUNEPLANE_JOB_HARDWARE_BRIDGE itself decides who does."""
    spec = job.spec
    platform = spec.framework.observability == "platform" and spec.reporting.enabled
    return platform and env.HARDWARE_BRIDGE not in spec.node.environment


def start_sampling(job: JobSpec, values: Mapping[str, str]) -> Monitor | None:
    """Sample what the trainer with the environment `values` uses here. None where that is not wanted or fails."""
    if not samples_hardware(job):
        return None
    with suppress(Exception):  # the trainer runs: nothing of this may end it
        from tuneplane.report.hardware.monitor import INTERVAL, Monitor
        from tuneplane.report.hardware.sampler import make_sampler
        from tuneplane.report.ingest import Ingest, read_ingest

        bound = read_ingest(values)
        if isinstance(bound, Ingest):
            node = int(values[env.MACHINE_RANK])
            marks = {name: values[name] for name in (env.RUN_ID, env.MACHINE_RANK)}
            sampler = make_sampler(node, values, marks, has_gpus=job.spec.resources.device == "gpu")
            monitor = Monitor(bound, node, sampler, values.get(INTERVAL, ""))
            return monitor if monitor.start() else None
    return None


def end_sampling(monitor: Monitor | None) -> None:
    """Stop, and have the last sample written if that is quickly done."""
    if monitor is not None:
        with suppress(Exception):  # what follows ends the trainer's processes, which matters more
            monitor.stop(FLUSH_S)
