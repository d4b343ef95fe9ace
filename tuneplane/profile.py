"""`NAME[:TOTAL_GPUS]`: what a user asks for, and how it lies on the nodes of a cluster profile.

Compose parses the text; compile places it. Pure: neither reads a file nor asks Slurm.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tuneplane.kernel.errors import Fault, UsageError, raise_faults
from tuneplane.site import Cluster, Site
from tuneplane.slurmforms import memory_mib

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TOTAL = re.compile(r"[0-9]{1,7}")
_MOST = 9_999_999  # as many digits as _TOTAL: a number that no flag exceeds

FLAG = "--profile"


@dataclass(frozen=True)
class ProfileRequest:
    """A profile as asked. `text` is `CLUSTER_PROFILE` in the job (C9)."""

    text: str
    name: str
    total: int | None = None  # GPUs in all; on a cpu device, processes


@dataclass(frozen=True)
class Placement:
    """Nodes, and what each is asked for. `gpus_per_node` counts processes on a cpu device."""

    nodes: int
    gpus_per_node: int
    cpus_per_node: int | None = None  # None: not asked for, Slurm's defaults
    memory_per_node: str | None = None  # in Slurm's form; None: not asked for


def is_profile_name(name: str) -> bool:
    """Whether a cluster profile may be called so: its file is `cluster/NAME.yaml`."""
    return NAME.fullmatch(name) is not None and not name.endswith((".yaml", ".yml")) and len(name) <= 100


def parse_profile(text: str) -> ProfileRequest:
    """`h200:16` as a name and a total. Raises UsageError."""
    if "=" in text:
        raise UsageError(
            Fault(
                f"{text!r} gives a role nodes of its own, and no recipe of this version has roles",
                FLAG,
                f"ask for one pool: {FLAG} {text.split('=', 1)[1] or 'NAME:TOTAL_GPUS'}",
            )
        )
    name, colon, total = text.partition(":")
    if not is_profile_name(name):
        raise UsageError(
            Fault(
                f"{text!r} is not a profile",
                FLAG,
                "write NAME or NAME:TOTAL_GPUS, like h200:8; a name has letters, digits, '.', '_' and '-'",
            )
        )
    if not colon:
        return ProfileRequest(text, name)
    if _TOTAL.fullmatch(total) is None or int(total) == 0:
        raise UsageError(
            Fault(
                f"{text!r} asks for {total!r} GPUs in all: a whole number, at least 1, follows the colon",
                FLAG,
                f"write {name}:8, or {name} alone for the profile's default",
            )
        )
    return ProfileRequest(text, name, int(total))


def place(
    cluster: Cluster,
    total: int | None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    *,
    site: Site | None = None,
) -> Placement:
    """How a request lies on the nodes of a composed cluster profile.

    total: GPUs in all (processes on a cpu device), from the profile's text; nodes and gpus_per_node: the
    flags. `site` brings its caps. Raises UsageError with every contradiction and every bound passed.
    """
    faults = [
        Fault(f"{value} is too few: at least 1", flag)
        for flag, value in ((FLAG, total), ("--nodes", nodes), ("--gpus-per-node", gpus_per_node))
        if value is not None and value < 1
    ]
    raise_faults(faults)
    if total is None and nodes is None and gpus_per_node is None:
        total = default_total(cluster)
    shape = _split(cluster, total, nodes, gpus_per_node, faults)
    if shape is not None:
        asked = _Asked(
            nodes=FLAG if nodes is None else "--nodes",
            each=FLAG if gpus_per_node is None else "--gpus-per-node",
        )
        faults += [*_beyond_cluster(cluster, shape, asked), *_beyond_caps(cluster, shape, asked, site)]
    raise_faults(faults)
    assert shape is not None
    count, each = shape
    return Placement(count, each, _cpus(cluster, each), _memory(cluster, each))


def default_total(cluster: Cluster) -> int:
    """What the bare name of a profile asks for: its `default_gpus`, else one whole node, or one process."""
    if cluster.default_gpus is not None:
        return cluster.default_gpus
    return cluster.gpus_per_node if cluster.device == "gpu" else 1


@dataclass(frozen=True)
class _Asked:
    """Which flag decided the number of nodes, and which the GPUs on each."""

    nodes: str
    each: str


def _unit(cluster: Cluster) -> str:
    return "GPUs" if cluster.device == "gpu" else "processes"


def _split(
    cluster: Cluster, total: int | None, nodes: int | None, each: int | None, faults: list[Fault]
) -> tuple[int, int] | None:
    """(nodes, GPUs a node) of what was said, with what was not said filled in; None after a fault."""
    unit = _unit(cluster)
    if nodes is not None and each is not None:
        if total is not None and total != nodes * each:
            faults.append(
                Fault(
                    f"--nodes {nodes} × --gpus-per-node {each} is {nodes * each} {unit},"
                    f" and {cluster.name}:{total} asks for {total}",
                    FLAG,
                    f"leave one of them out, or say {FLAG} {cluster.name}:{nodes * each}",
                )
            )
        return nodes, each
    if total is None:
        if each is not None:
            return 1, each
        whole = cluster.gpus_per_node if cluster.device == "gpu" else default_total(cluster)
        return nodes or 1, whole
    if nodes is None and each is None:
        return _split_total(cluster, total, faults)
    known, flag = (nodes, "--nodes") if nodes is not None else (each, "--gpus-per-node")
    assert known is not None
    other, rest = divmod(total, known)
    if rest or other == 0:
        fits = _nearest(total, known, _MOST)
        faults.append(
            Fault(
                f"{total} {unit} cannot be shared out evenly by {flag} {known}; nearest that fit: {fits}",
                FLAG,
                f"ask for {fits}, or change {flag}",
            )
        )
        return None
    return (known, other) if nodes is not None else (other, known)


def _split_total(cluster: Cluster, total: int, faults: list[Fault]) -> tuple[int, int] | None:
    """A part of one node, or whole nodes; else a fault that names the nearest totals that fit."""
    each = cluster.gpus_per_node
    if total <= each:
        return 1, total
    count, rest = divmod(total, each)
    if cluster.scheduler == "local":
        what = f"{total} {_unit(cluster)} do not fit: this machine has {each}"
        faults.append(Fault(what, FLAG, f"ask for {each} or fewer"))
    elif cluster.device == "cpu":
        what = f"{total} processes do not fit on one node of {cluster.name}, which may run {each}"
        faults.append(Fault(what, FLAG, f"say on how many nodes: --nodes {-(-total // each)}"))
    elif rest:
        fits = _nearest(total, each, cluster.max_nodes * each if cluster.max_nodes else _MOST)
        faults.append(
            Fault(
                f"{total} GPUs are not whole nodes of {cluster.name}, which have {each} each;"
                f" nearest that fit: {fits}",
                FLAG,
                f"ask for {fits}, or for the shape itself: --nodes N --gpus-per-node M",
            )
        )
    else:
        return count, each
    return None


def _nearest(total: int, step: int, most: int) -> str:
    """The multiples of `step` on both sides of `total` that are no more than `most`, as words."""
    below = min(total, most) // step * step
    fits = [value for value in (below, below + step) if 0 < value <= most]
    return " and ".join(str(value) for value in fits) or str(step)


def _beyond_cluster(cluster: Cluster, shape: tuple[int, int], asked: _Asked) -> list[Fault]:
    nodes, each = shape
    most = cluster.gpus_per_node
    faults = []
    if each > most:
        local = cluster.scheduler == "local"
        holder = "this machine has" if local else f"a node of {cluster.name} has"
        faults.append(
            Fault(
                f"{each} {_unit(cluster)} a node: {holder} {most}",
                asked.each,
                f"ask for {most} or fewer" + ("" if local else " on each of more nodes"),
            )
        )
    if cluster.scheduler == "local" and nodes > 1:
        faults.append(
            Fault(
                f"{nodes} nodes: profile {cluster.name} runs on this machine alone",
                asked.nodes,
                "choose a profile of a Slurm cluster, or one node",
            )
        )
    elif cluster.max_nodes is not None and nodes > cluster.max_nodes:
        faults.append(
            Fault(
                f"{nodes} nodes: profile {cluster.name} has {cluster.max_nodes}",
                asked.nodes,
                f"ask for {cluster.max_nodes * most} {_unit(cluster)} or fewer",
            )
        )
    return faults


def _beyond_caps(cluster: Cluster, shape: tuple[int, int], asked: _Asked, site: Site | None) -> list[Fault]:
    if site is None:
        return []
    nodes, each = shape
    caps = site.caps
    remedy = f"ask for less, or ask {site.contact}"
    faults = []
    if caps.nodes is not None and nodes > caps.nodes:
        faults.append(Fault(f"{nodes} nodes: the site allows {caps.nodes} a run", asked.nodes, remedy))
    if cluster.device == "gpu" and caps.gpus is not None and nodes * each > caps.gpus:
        faults.append(Fault(f"{nodes * each} GPUs: the site allows {caps.gpus} a run", FLAG, remedy))
    return faults


def _cpus(cluster: Cluster, each: int) -> int | None:
    """CPUs to ask for on a node: the share of its GPUs that is asked for; all of an exclusive node."""
    if not cluster.request_cpus or cluster.cpus_per_node is None:
        return None
    if cluster.slurm.exclusive:
        return cluster.cpus_per_node
    return max(1, cluster.cpus_per_node * each // cluster.gpus_per_node)


def _memory(cluster: Cluster, each: int) -> str | None:
    """Memory to ask for on a node, likewise; as the site wrote it where the node is asked for whole."""
    if not cluster.request_memory or cluster.memory_per_node is None:
        return None
    if cluster.slurm.exclusive or each == cluster.gpus_per_node:
        return cluster.memory_per_node
    return f"{max(1, memory_mib(cluster.memory_per_node) * each // cluster.gpus_per_node)}M"
