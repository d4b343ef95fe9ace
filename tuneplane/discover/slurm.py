"""A site's Slurm as data: partitions, kinds of nodes, what a user may use. Pure: texts in, dataclasses out."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from tuneplane.discover.said import Said

UNUSABLE = ("DOWN", "DRAIN", "FAIL", "FUTURE", "UNKNOWN", "POWERED_DOWN", "NO_RESPOND", "MAINT", "RESERVED")
"""Words of a node's state (sinfo(1), NODE STATE CODES) that say that it runs nothing now."""


@dataclass(frozen=True)
class Kind:
    """Nodes that are alike. memory_mib: what jobs can have, without what the site keeps. gpu_type: of its gres."""

    cpus: int
    memory_mib: int
    gpus: int = 0
    gpu_type: str = ""
    features: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    usable: int = 0


@dataclass(frozen=True)
class Partition:
    """A partition: its settings as Slurm prints them, and its kinds of nodes, the most frequent first."""

    name: str
    settings: dict[str, str] = field(default_factory=dict)
    kinds: tuple[Kind, ...] = ()

    @property
    def is_default(self) -> bool:
        return self.settings.get("Default") == "YES"

    @property
    def is_up(self) -> bool:
        return self.settings.get("State", "UP") == "UP"


@dataclass(frozen=True)
class Association:
    """What accounting lets a user use."""

    account: str
    partition: str = ""
    qos: tuple[str, ...] = ()
    default_qos: str = ""


@dataclass(frozen=True)
class Site:
    """All that was understood. version: of Slurm, such as 22.05.8."""

    version: str
    config: dict[str, str]
    partitions: tuple[Partition, ...]
    associations: tuple[Association, ...] = ()
    default_account: str = ""


def read_site(said: Said) -> Site:
    """What the texts say."""
    kinds = _kinds_by_partition(said)
    config = parse_config(said.config)
    partitions = [parse_pairs(line) for line in said.partitions.splitlines() if line.strip()]
    found = [
        Partition(p["PartitionName"], p, kinds.get(p["PartitionName"], ()))
        for p in partitions
        if "PartitionName" in p
    ]
    if not found:  # scontrol says nothing: sinfo marks the default one
        defaults = set(re.findall(r"\|([^|*]+)\*\|", said.sinfo))
        found = [
            Partition(name, {"Default": "YES" if name in defaults else "NO"}, k)
            for name, k in sorted(kinds.items())
        ]
    version = re.search(r"\d+\.\d+(?:\.\w+)?", said.version)
    user = said.user.strip().splitlines()
    return Site(
        version=version[0] if version else config.get("SLURM_VERSION", ""),
        config=config,
        partitions=tuple(found),
        associations=tuple(_associations(said.associations, config.get("ClusterName", ""))),
        default_account=user[0].split("|")[1] if user and "|" in user[0] else "",
    )


def parse_config(text: str) -> dict[str, str]:
    """`Name = value` lines of `scontrol show config`."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def parse_pairs(line: str) -> dict[str, str]:
    """`Name=value` words of scontrol's one-line form; a value may hold blanks (OS, Reason, Comment)."""
    places = list(re.finditer(r"(?:^|\s)([A-Za-z][A-Za-z0-9_]*)=", line))
    ends = [place.start() for place in places[1:]] + [len(line)]
    return {p[1]: line[p.end() : end].strip() for p, end in zip(places, ends, strict=True)}


def parse_gres(text: str) -> tuple[int, str]:
    """GPUs of a node and their type, of `gpu:h200:8(S:0-1),shard:…`. Of several types the most numerous."""
    counts: Counter[str] = Counter()
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        found = re.fullmatch(r"gpu(?::([^:]*[^:0-9][^:]*))?(?::(\d+))?", item.strip())
        if found:
            counts[found[1] or ""] += int(found[2] or 1)
    if not counts:
        return 0, ""
    kind, count = counts.most_common(1)[0]
    return count, kind


def _kinds_by_partition(said: Said) -> dict[str, tuple[Kind, ...]]:
    rows = [_node_row(parse_pairs(line)) for line in said.nodes.splitlines() if line.startswith("NodeName=")]
    if not rows:
        rows = [row for line in said.sinfo.splitlines() if (row := _sinfo_row(line))]
    grouped: dict[str, dict[tuple[int, int, int, str], list[tuple[str, bool, tuple[str, ...]]]]] = {}
    for name, partitions, shape, usable, features in rows:
        for partition in partitions:
            grouped.setdefault(partition, {}).setdefault(shape, []).append((name, usable, features))
    found = {}
    for partition, shapes in grouped.items():
        kinds = [
            Kind(
                cpus,
                memory,
                gpus,
                gpu_type,
                tuple(sorted(set.intersection(*(set(f) for _, _, f in nodes)))),
                tuple(dict.fromkeys(name for name, _, _ in nodes)),
                sum(usable for _, usable, _ in nodes),
            )
            for (cpus, memory, gpus, gpu_type), nodes in shapes.items()
        ]
        found[partition] = tuple(sorted(kinds, key=lambda k: (-len(k.nodes), -k.gpus, -k.cpus)))
    return found


_Row = tuple[str, list[str], tuple[int, int, int, str], bool, tuple[str, ...]]


def _node_row(fields: dict[str, str]) -> _Row:
    gpus, gpu_type = parse_gres(fields.get("Gres", ""))
    # What the site keeps for itself (CoreSpecCount, MemSpecLimit) no job can have.
    cpus = _number(fields.get("CPUEfctv")) or _number(fields.get("CPUTot"))
    memory = _number(fields.get("RealMemory")) - _number(fields.get("MemSpecLimit"))
    state = fields.get("State", "")
    return (
        fields.get("NodeName", ""),
        [p for p in fields.get("Partitions", "").split(",") if p],
        (cpus, memory, gpus, gpu_type),
        not any(word in state for word in UNUSABLE) and not state.endswith("*"),
        tuple(f for f in fields.get("AvailableFeatures", "").split(",") if f and f != "(null)"),
    )


def _sinfo_row(line: str) -> _Row | None:
    parts = line.split("|")
    if len(parts) != 7:
        return None
    name, partition, cpus, memory, gres, features, state = (part.strip() for part in parts)
    gpus, gpu_type = parse_gres(gres)
    usable = not state.endswith("*") and not state.startswith(
        ("down", "drain", "fail", "maint", "unk", "resv")
    )
    told = tuple(f for f in features.split(",") if f and f != "(null)")
    return name, [partition.rstrip("*")], (_number(cpus), _number(memory), gpus, gpu_type), usable, told


def _associations(text: str, cluster: str) -> list[Association]:
    found = []
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) >= 5 and (not cluster or parts[0].lower() == cluster.lower()):
            qos = tuple(q for q in parts[3].split(",") if q)
            found.append(Association(parts[1], parts[2], qos, parts[4]))
    return found


def _number(text: str | None) -> int:
    found = re.match(r"\d+", text or "")
    return int(found[0]) if found else 0
