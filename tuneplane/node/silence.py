"""How long a node may be silent before it counts as dead, and until it surely has no process of its attempt.

Pure. The fence, the claim of the next attempt and the end of this one go by it.
"""

from __future__ import annotations

BEATS_UNTIL_SILENT = 3
"""A node that misses as many heartbeats as this is taken for dead."""

FENCE_GRACE_S = 10.0
"""Between TERM and KILL where the node itself is cut off, or others are: no rank can finish a step any more."""

ANSWER_S = 5.0
"""How long the storage is asked whether silent nodes, all of them together, have just ended."""

CONNECT_S = 2.0
"""How long hosts whose datagrams are missed may take to answer a connection."""

FENCE_MARGIN_S = ANSWER_S + CONNECT_S + 3.0
"""What a node may need besides until its last process is gone: a storage that stalls does not answer."""


def fenced_after_s(heartbeat_s: float) -> float:
    """Seconds after which a node that hears nothing has no process of its attempt any more."""
    return BEATS_UNTIL_SILENT * heartbeat_s + FENCE_GRACE_S + FENCE_MARGIN_S


def silent(network_s: float | None, storage_s: float | None, limit_s: float) -> bool:
    """Whether a node counts as dead. Where the network ever told of it, the network decides.

    network_s, storage_s: since its last sign of life there; None where there never was one. A storage that
    stalls, or a network that lets nothing through from the start, condemns nobody.
    """
    told = storage_s if network_s is None else network_s
    return told is not None and told > limit_s


def silence_sentence(hosts: list[str], silent_s: float) -> str:
    """`n3 has been silent for 30 s: it is dead or cut off`."""
    has, it_is = ("has", "it is") if len(hosts) == 1 else ("have", "they are")
    return f"{', '.join(hosts)} {has} been silent for {silent_s:.0f} s: {it_is} dead or cut off"
