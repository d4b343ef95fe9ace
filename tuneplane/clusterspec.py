"""The parts of a JobSpec that a cluster profile decides. `compile.py` puts them together with the rest."""

from __future__ import annotations

import os
import sys

from tuneplane.profile import Placement
from tuneplane.site import Cluster, Site
from tuneplane.site import Slurm as SlurmKeys
from tuneplane.slurmforms import time_s
from tuneplane.spec import Node, Resources, Restart, Slurm

UNLIMITED_SAVE_S = 60.0
"""Time to save where no walltime is near."""

END_MARGIN_S = 15.0
"""What ending a run and starting it again may take, before its time is over."""


def base_interpreter() -> str:
    """The interpreter below this process's virtual environment: it outlives that environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def resources(profile: str, cluster: Cluster, placement: Placement) -> Resources:
    """What is asked for. profile: as it was said, h200:8."""
    return Resources(
        profile=profile,
        cluster=cluster.name,
        scheduler=cluster.scheduler,
        device=cluster.device,
        nodes=placement.nodes,
        gpus_per_node=placement.gpus_per_node,
        cpus_per_node=placement.cpus_per_node,
        memory_per_node=placement.memory_per_node,
    )


def node(site: Site, cluster: Cluster, secrets: list[str] | None = None) -> Node:
    """How the agent starts, and what it gives to the job. secrets: names of those that the shell has."""
    return Node(
        python=cluster.python or base_interpreter(),
        path=cluster.path,
        scratch=cluster.scratch,
        shared=list(cluster.shared),
        environment={**site.environment, **cluster.environment},
        secrets=secrets or [],
        heartbeat_s=cluster.heartbeat_s,
        stop_grace_s=cluster.stop_grace_s,
        save_s=save_time_s(cluster),
        save_signal=cluster.save_signal or "",
        hang_limit_s=cluster.hang_limit_s,
    )


def directives(cluster: Cluster, experiment: str) -> Slurm:
    """Slurm's part."""
    slurm = cluster.slurm
    return Slurm(
        job_name=slurm.job_name or experiment,
        gpu_request=slurm.gpu_request,
        gpu_type=slurm.gpu_type,
        partition=slurm.partition,
        account=slurm.account,
        qos=slurm.qos,
        reservation=slurm.reservation,
        constraint=slurm.constraint,
        time=slurm.time,
        nodelist=slurm.nodelist,
        exclude=slurm.exclude,
        dependency=slurm.dependency,
        mail_user=slurm.mail_user,
        mail_type=slurm.mail_type,
        exclusive=slurm.exclusive,
        signal_before_end_s=warning_s(slurm),
        extra_directives=dict(slurm.extra_directives),
        modules=list(slurm.modules),
        srun_options=list(slurm.srun_options),
    )


def warning_s(slurm: SlurmKeys) -> int | None:
    """How long before its limit a run is asked to save: of a short limit no more than the half."""
    if slurm.signal_before_end_s is None or slurm.time is None:
        return slurm.signal_before_end_s
    limit_s = time_s(slurm.time)
    return slurm.signal_before_end_s if not limit_s else min(slurm.signal_before_end_s, int(limit_s) // 2)


def save_time_s(cluster: Cluster) -> float:
    """How long a trainer may take from the stop marker on, before TERM: so that all has ended before the limit."""
    if cluster.save_s is not None:
        return cluster.save_s
    warned_s = warning_s(cluster.slurm)
    if cluster.scheduler != "slurm" or warned_s is None:
        return UNLIMITED_SAVE_S
    return max(warned_s - cluster.stop_grace_s - END_MARGIN_S, warned_s / 3)


def restart(cluster: Cluster) -> Restart:
    """When a run starts again by itself; on one machine it does not."""
    if cluster.scheduler != "slurm":
        return Restart()
    return Restart(cluster.max_restarts, cluster.restart_way)
