"""Which partition and kind of node a first profile is for, and every value in it with its reason. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tuneplane.discover.here import Here
from tuneplane.discover.slurm import Association, Kind, Partition, Site
from tuneplane.kernel.errors import Fault, UsageError

GUESS = "GUESS"

TRIAL_NAMES = re.compile(
    r"debug|test|short|interactive|devel|preempt|scavenge|low|backfill|maint", re.IGNORECASE
)
"""Names of partitions that are for trials or give way: none is chosen where another one fits."""

TYPED = ("select/cons_tres",)
"""SelectType under which --gpus-per-node works. Source: sbatch(1)."""

USUAL_KILL_WAIT_S = 30
"""Slurm's own default, for which `stop_grace_s` is made. Source: slurm.conf(5), KillWait."""

ENOUGH_DEFAULT_MEMORY = 0.5
"""Where Slurm's default gives a job with all CPUs less than this share of a node's memory, memory is asked for."""


@dataclass(frozen=True)
class Value:
    """One key of the profile. why: where it came from; guess: nobody said so."""

    key: str
    value: object
    why: str
    guess: bool = False


@dataclass(frozen=True)
class Chosen:
    """A profile that is not written yet. notes: what its reader should know besides."""

    partition: Partition
    kind: Kind
    values: tuple[Value, ...]
    notes: tuple[str, ...] = ()


def choose(site: Site, here: Here, partition: str | None = None) -> Chosen:
    """The values of a first profile. Raises UsageError where there is no such partition, or none at all."""
    chosen, why, guess = _partition(site, partition)
    if not chosen.kinds:
        raise UsageError(
            Fault(
                f"Slurm shows no nodes of partition {chosen.name}",
                "--partition",
                "choose another: " + ", ".join(p.name for p in site.partitions if p.kinds),
            )
        )
    kind = chosen.kinds[0]
    values = [
        *_node_values(site, chosen, kind),
        *_place_values(here),
        Value("slurm.partition", chosen.name, why, guess),
        *_account_values(site, chosen),
        *_gpu_values(site, kind),
        *_other_values(site, chosen),
    ]
    return Chosen(chosen, kind, tuple(values), tuple(_notes(site, chosen, here)))


def kill_wait_s(site: Site) -> int | None:
    """Seconds from Slurm's TERM to its KILL; None where it does not tell."""
    found = re.match(r"[0-9]+", site.config.get("KillWait", ""))
    return int(found[0]) if found else None


def grace_within(kill_wait: int) -> int:
    """The longest `stop_grace_s` after which an agent can still write how its trainer ended."""
    return max(1, kill_wait * 2 // 3)


def usable(site: Site, partition: Partition) -> bool:
    """Whether this user may submit there, as far as Slurm's settings tell."""
    accounts = {a.account for a in site.associations}
    qos = {q for a in site.associations for q in a.qos}
    settings = partition.settings
    if settings.get("RootOnly") == "YES" or not partition.is_up:
        return False
    allowed = settings.get("AllowAccounts", "ALL")
    if accounts and allowed not in ("ALL", "") and not accounts & set(allowed.split(",")):
        return False
    if accounts and accounts <= set(settings.get("DenyAccounts", "").split(",")):
        return False
    allowed = settings.get("AllowQos", "ALL")
    return not (qos and allowed not in ("ALL", "") and not qos & set(allowed.split(",")))


def _partition(site: Site, wanted: str | None) -> tuple[Partition, str, bool]:
    if wanted is not None:
        found = next((p for p in site.partitions if p.name == wanted), None)
        if found is None:
            names = ", ".join(p.name for p in site.partitions) or "none"
            raise UsageError(Fault(f"there is no partition {wanted}", "--partition", f"Slurm has: {names}"))
        return found, "--partition", False
    candidates = [p for p in site.partitions if p.kinds and usable(site, p)]
    if not candidates:
        what = (
            "Slurm shows no partition with nodes that you may use"
            if site.partitions
            else "Slurm shows no partition"
        )
        raise UsageError(
            Fault(what, "tp cluster discover", "sinfo must work on this machine; else say --partition")
        )
    best = min(
        candidates,
        key=lambda p: (
            not any(k.gpus for k in p.kinds),
            TRIAL_NAMES.search(p.name) is not None,
            not p.is_default,
            -max((k.gpus for k in p.kinds), default=0),
            -sum(len(k.nodes) for k in p.kinds),
            p.name,
        ),
    )
    gpus = any(k.gpus for k in best.kinds)
    if len(candidates) == 1:
        return best, "the only partition that you may use (scontrol show partition)", False
    if best.is_default and not (gpus and sum(any(k.gpus for k in p.kinds) for p in candidates) > 1):
        return best, "Slurm's default partition (scontrol show partition)", False
    others = ", ".join(p.name for p in candidates if p is not best)
    return (
        best,
        f"of the partitions with {'GPUs' if gpus else 'nodes'} that you may use; others: {others}",
        True,
    )


def _node_values(site: Site, partition: Partition, kind: Kind) -> list[Value]:
    name = kind.nodes[0] if kind.nodes else "?"
    source = f"scontrol show node {name}"
    values = [
        Value("scheduler", "slurm", "sbatch is on this machine"),
        Value(
            "device",
            "gpu" if kind.gpus else "cpu",
            f"{source}: Gres" if kind.gpus else f"{source}: no gpu in Gres",
        ),
    ]
    if kind.gpus:
        values.append(Value("gpus_per_node", kind.gpus, f"{source}: Gres"))
    else:
        values.append(Value("gpus_per_node", kind.cpus, f"{source}: processes a node, one for each CPU"))
    nodes, why = _max_nodes(partition, kind)
    values.append(Value("max_nodes", nodes, why))
    if kind.cpus:
        values.append(Value("cpus_per_node", kind.cpus, f"{source}: CPUs that jobs can have"))
    if kind.memory_mib:
        values.append(
            Value("memory_per_node", f"{kind.memory_mib}M", f"{source}: RealMemory without MemSpecLimit")
        )
    return [*values, *_request_values(site, partition, kind)]


def _max_nodes(partition: Partition, kind: Kind) -> tuple[int, str]:
    most = partition.settings.get("MaxNodes", "UNLIMITED")
    count = len(kind.nodes)
    if most.isdecimal() and int(most) < count:
        return int(most), f"scontrol show partition {partition.name}: MaxNodes"
    return count, f"scontrol show node: {count} such nodes in the partition"


def _request_values(site: Site, partition: Partition, kind: Kind) -> list[Value]:
    """Whether to ask for CPUs and memory: what Slurm gives without asking."""
    select = site.config.get("SelectType", "")
    if "linear" in select:
        return [Value("request_cpus", False, f"scontrol show config: {select} gives whole nodes")]
    counts_memory = "MEMORY" in site.config.get("SelectTypeParameters", "").upper()
    per_cpu = _first_number(partition.settings.get("DefMemPerCPU"), site.config.get("DefMemPerCPU"))
    per_node = _first_number(partition.settings.get("DefMemPerNode"), site.config.get("DefMemPerNode"))
    default = per_cpu * kind.cpus if per_cpu else per_node
    if counts_memory and default and kind.memory_mib and default < ENOUGH_DEFAULT_MEMORY * kind.memory_mib:
        why = f"Slurm's default would give a whole node's job {default} of {kind.memory_mib} MB"
        return [Value("request_memory", True, why, guess=True)]
    return []


def _first_number(*texts: str | None) -> int:
    return next((int(text) for text in texts if text and text.isdecimal()), 0)


def _place_values(here: Here) -> list[Value]:
    values = [
        Value(
            "storage_root",
            here.storage,
            here.storage_why or "that nodes see it is not known: tp doctor --deep finds out",
            guess=not here.storage_is_shared,
        )
    ]
    if here.shared:
        values.append(
            Value("shared", list(here.shared), "network file systems of this machine (/proc/self/mountinfo)")
        )
    values.append(Value("python", here.python, here.python_why, guess=True))
    return values


def _account_values(site: Site, partition: Partition) -> list[Value]:
    """Only what Slurm would not choose by itself."""
    mine = [a for a in site.associations if a.partition in ("", partition.name)]
    if not mine:
        return []
    values = []
    allowed = partition.settings.get("AllowAccounts", "ALL")
    names = list(dict.fromkeys(a.account for a in mine))
    if allowed not in ("ALL", ""):
        names = [name for name in names if name in allowed.split(",")]
    default = site.default_account
    if names and default not in names:
        others = f"; others: {', '.join(names[1:])}" if names[1:] else ""
        why = f"yours in this partition (sacctmgr show assoc){others}"
        values.append(Value("slurm.account", names[0], why, guess=len(names) > 1))
    return [*values, *_qos_values(partition, mine, names[0] if names and default not in names else default)]


def _qos_values(partition: Partition, mine: list[Association], account: str) -> list[Value]:
    own = next((a for a in mine if a.account == account), mine[0])
    allowed = partition.settings.get("AllowQos", "ALL")
    if allowed in ("ALL", "") or own.default_qos in allowed.split(","):
        return []
    fits = [q for q in own.qos if q in allowed.split(",")]
    if not fits:
        return []
    return [
        Value(
            "slurm.qos", fits[0], f"the partition takes {allowed}, and you have it (sacctmgr)", len(fits) > 1
        )
    ]


def _gpu_values(site: Site, kind: Kind) -> list[Value]:
    if not kind.gpus:
        return [Value("slurm.gpu_request", "none", "no GPUs to ask for")]
    select = site.config.get("SelectType", "")
    if "gpu" not in site.config.get("GresTypes", "gpu"):
        return [Value("slurm.gpu_request", "none", "scontrol show config: GresTypes has no gpu", guess=True)]
    if select in TYPED:
        values = [Value("slurm.gpu_request", "gpus-per-node", f"scontrol show config: {select}")]
    else:
        values = [
            Value(
                "slurm.gpu_request", "gres", f"scontrol show config: {select or 'no SelectType'}", not select
            )
        ]
    if kind.gpu_type:
        values.append(Value("slurm.gpu_type", kind.gpu_type, "scontrol show node: Gres"))
    return values


def _other_values(site: Site, partition: Partition) -> list[Value]:
    values = []
    kill_wait = kill_wait_s(site)
    if kill_wait is not None and kill_wait < USUAL_KILL_WAIT_S:
        why = f"scontrol show config: KillWait is {kill_wait} s, and the agent needs some of it after the trainer"
        values.append(Value("stop_grace_s", grace_within(kill_wait), why))
    if partition.settings.get("OverSubscribe", "").startswith("EXCLUSIVE"):
        why = f"scontrol show partition {partition.name}: OverSubscribe=EXCLUSIVE"
        values.append(Value("slurm.exclusive", True, f"{why}: jobs get whole nodes"))
    mpi = site.config.get("MpiDefault", "none")
    if mpi not in ("none", "", "(null)"):
        why = f"scontrol show config: MpiDefault is {mpi}, which TunePlane's one task a node does not need"
        values.append(Value("slurm.srun_options", ["--mpi=none"], why))
    return values


def _gives_way(site: Site, partition: Partition) -> bool:
    """Whether a partition of a higher tier takes the same nodes. Source: slurm.conf(5), PreemptType."""
    if (
        site.config.get("PreemptType") != "preempt/partition_prio"
        or partition.settings.get("PreemptMode") == "OFF"
    ):
        return False
    tier = _first_number(partition.settings.get("PriorityTier"))
    mine = {node for kind in partition.kinds for node in kind.nodes}
    return any(
        _first_number(p.settings.get("PriorityTier")) > tier and mine & {n for k in p.kinds for n in k.nodes}
        for p in site.partitions
    )


def _notes(site: Site, partition: Partition, here: Here) -> list[str]:
    notes = []
    for kind in partition.kinds[1:]:
        gpus = f"{kind.gpus} {kind.gpu_type or 'GPUs'}, " if kind.gpus else ""
        notes.append(
            f"the partition has other nodes too: {len(kind.nodes)} of {gpus}{kind.cpus} CPUs, {kind.memory_mib} MB"
            f" ({kind.nodes[0]}…): a profile of their own suits them"
        )
    first = partition.kinds[0]
    alike = [k for k in partition.kinds[1:] if k.gpus == first.gpus and k.gpu_type == first.gpu_type]
    own = [f for f in first.features if all(f not in k.features for k in partition.kinds[1:])]
    if alike and own:
        notes.append(f"to get only this kind of node: constraint: {own[0]}")
    limit, default = partition.settings.get("MaxTime", ""), partition.settings.get("DefaultTime", "")
    if limit not in ("", "UNLIMITED", "INFINITE"):
        given = f", {default} where none is asked for" if default not in ("", "NONE") else ""
        notes.append(f"the partition's longest time is {limit}{given}: slurm.time, or --time")
    if _gives_way(site, partition):
        notes.append("jobs of other partitions may preempt those of this one")
    if here.runtime == "none":
        notes.append(
            "no container runtime was found on this machine; nodes may have one, perhaps by a module"
        )
    others = [p.name for p in site.partitions if p is not partition and p.kinds]
    if others:
        notes.append(
            f"other partitions: {', '.join(others)}; tp cluster discover OTHER --partition NAME describes one"
        )
    return notes
