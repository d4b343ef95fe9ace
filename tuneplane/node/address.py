"""Node 0's address and port, found once on node 0 in the batch script and passed to all."""

from __future__ import annotations

import ipaddress
import socket

from tuneplane.kernel.errors import Fault, OperationError

FIRST_PORT, PORTS = 20_000, 10_000
"""Below Linux's ephemeral range (32768 and up), so that no outgoing connection holds the port."""


def head_address(hosts: list[str]) -> str:
    """The address of `hosts[0]` (this host) that the others reach. Raises OperationError, never loopback.

    One node alone talks to itself, so loopback is right there.
    """
    if len(hosts) <= 1:
        return "127.0.0.1"
    for address in _resolve(hosts[0]):
        if not ipaddress.ip_address(address).is_loopback:
            return address
    # Debian's /etc/hosts maps a host's own name to 127.0.1.1: ask the kernel how it would reach a peer.
    for peer in hosts[1:]:
        for target in _resolve(peer):
            family = socket.AF_INET6 if ":" in target else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect((target, 9))  # sends nothing
                except OSError:
                    continue
                address = str(probe.getsockname()[0])
            if not ipaddress.ip_address(address).is_loopback:
                return address
    raise OperationError(
        Fault(
            f"no address of {hosts[0]} that {', '.join(hosts[1:4])} could reach: only loopback was found",
            "node agent",
            "the cluster's nodes must resolve each other's names; tell its administrators",
        )
    )


def pick_port(seed: int, host: str = "") -> int:
    """A port that is free here now, the same for the same job where nobody else holds it."""
    for offset in range(64):
        port = FIRST_PORT + (seed + offset * 131) % PORTS
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
        return port
    raise OperationError(Fault(f"none of 64 ports from {FIRST_PORT} up is free on this node", "node agent"))


def _resolve(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(item[4][0]).split("%")[0] for item in sorted(found, key=lambda item: item[0])]
