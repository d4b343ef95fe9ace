"""Node 0's address and port, found once on node 0 in the batch script and passed to all."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from tuneplane.kernel.errors import Fault, OperationError

FIRST_PORT, LAST_PORT = 20_000, 29_999
"""Below Linux's ephemeral range (32768 and up), so that no outgoing connection holds the port."""

FEWEST_PORTS = 1_000
"""A site's ephemeral range that leaves fewer below it than this leaves none worth looking for."""

LOWEST_PORT = 1_024
"""Below it a port is root's. Source: ip(7)."""

TRIES = 64


def head_address(hosts: list[str]) -> str:
    """The address of `hosts[0]` (this host) that the others reach. Raises OperationError, never loopback.

    One node alone talks to itself, so loopback is right there.
    """
    if len(hosts) <= 1:
        return "127.0.0.1"
    for address in _resolve(hosts[0]):
        if is_reachable(address):
            return address
    # Debian's /etc/hosts maps a host's own name to 127.0.1.1: ask the kernel how it would reach a peer.
    for peer in hosts[1:]:
        for target in _resolve(peer):
            address = _own_address_toward(target)
            if is_reachable(address):
                return address
    raise OperationError(
        Fault(
            f"no address of {hosts[0]} that {', '.join(hosts[1:4])} could reach: only loopback was found",
            "node agent",
            "the cluster's nodes must resolve each other's names; tell its administrators",
        )
    )


def is_reachable(address: str) -> bool:
    """Whether other hosts could reach an address: not loopback, not unspecified, not of one link alone."""
    import ipaddress

    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    parsed = mapped or parsed
    return not (parsed.is_loopback or parsed.is_unspecified or parsed.is_link_local or parsed.is_multicast)


def pick_port(seed: int, address: str = "127.0.0.1") -> int:
    """A port that is free here now, the same for the same job where nobody else holds it.

    address: decides the family; the port must be free for it on every interface. Raises OperationError.
    """
    first, last = port_range(_ephemeral_start())
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for offset in range(TRIES):
        port = first + (seed + offset * 131) % (last - first + 1)  # 131: past a neighbour's run of ports
        if _is_free(family, port):
            return port
    raise OperationError(
        Fault(f"none of {TRIES} ports from {first} up is free on this node", "node agent", "submit it again")
    )


def port_range(ephemeral_start: int) -> tuple[int, int]:
    """First and last port to choose from, where the kernel's own choice starts at `ephemeral_start`."""
    last = min(LAST_PORT, ephemeral_start - 1)
    if last - LOWEST_PORT + 1 < FEWEST_PORTS:  # the site gives the kernel all: no port is safe from it
        return FIRST_PORT, LAST_PORT
    return min(FIRST_PORT, max(LOWEST_PORT, last - FEWEST_PORTS + 1)), last


def _ephemeral_start() -> int:
    """Source: ip(7), ip_local_port_range."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return LAST_PORT + 1


def _is_free(family: socket.AddressFamily, port: int) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection in TIME_WAIT holds nobody
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _own_address_toward(target: str) -> str:
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # sends nothing
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _resolve(host: str) -> Iterator[str]:
    """Addresses of a name, IPv4 first; none where it does not resolve. A link's own scope is cut off."""
    try:
        # As bytes: text would load the codec of international names, for nothing.
        found = socket.getaddrinfo(host.encode("ascii"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    for item in sorted(found, key=lambda item: item[0] != socket.AF_INET):
        yield str(item[4][0]).split("%")[0]
