"""What this node's network interfaces and InfiniBand ports have carried: of the whole node, no job's own is kept.

Inside a container that has a network of its own, of that. For Sampler.
"""

from __future__ import annotations

import os

_LANES = 4
"""InfiniBand counts in units of four octets. Source: Linux, Documentation/ABI/stable/sysfs-class-infiniband."""


def read_network(proc: str = "/proc", system: str = "/sys") -> tuple[int, int] | None:
    """Bytes received and sent so far; None where nothing says so.

    Of the interfaces that are devices: bonds, bridges and the like carry the same bytes again.
    """
    counts = {}
    for line in _read(f"{proc}/net/dev").splitlines():
        name, separator, rest = line.partition(":")
        fields = rest.split()
        if separator and len(fields) > 8 and name.strip() != "lo":
            counts[name.strip()] = (int(fields[0]), int(fields[8]))
    devices = [name for name in counts if os.path.exists(f"{system}/class/net/{name}/device")]  # noqa: PTH110
    chosen = [counts[name] for name in devices or counts]
    return (sum(c[0] for c in chosen), sum(c[1] for c in chosen)) if chosen else None


def read_infiniband(system: str = "/sys") -> tuple[int, int] | None:
    """Bytes received and sent so far by all ports; None where there are none. Network cards do not count these."""
    received = sent = 0
    seen = False
    for card in _list(f"{system}/class/infiniband"):
        for port in _list(f"{system}/class/infiniband/{card}/ports"):
            counters = f"{system}/class/infiniband/{card}/ports/{port}/counters"
            got, gave = (_read(f"{counters}/port_{way}_data").strip() for way in ("rcv", "xmit"))
            if got.isdecimal() and gave.isdecimal():
                seen = True
                received += int(got) * _LANES
                sent += int(gave) * _LANES
    return (received, sent) if seen else None


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 (pathlib costs 10 ms)
            return file.read()
    except OSError:
        return ""
