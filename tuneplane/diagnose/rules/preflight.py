"""Runs that ended before they trained: the check that `--preflight` makes found something wrong."""

from __future__ import annotations

from tuneplane.diagnose.evidence import Evidence
from tuneplane.diagnose.finding import Finding
from tuneplane.diagnose.rules.told import ENDED_BADLY, last_lines


def preflight_failed(evidence: Evidence) -> Finding | None:
    """The word of the ranks themselves, which all nodes noted alike."""
    found = [(node, node.preflight) for node in evidence.nodes if node.preflight]
    if evidence.state not in ENDED_BADLY or not found:
        return None
    named = [pair for pair in found if pair[1].node is not None]
    node, refusal = (named or found)[0]
    at = evidence.node(refusal.node)
    host = at.host if at else ""
    remedy = "look at the network between the nodes (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, firewalls)"
    if host:
        again = f"submit it again without that node (--exclude {host}), and tell the administrators"
        remedy = f"{again}; or {remedy}"
    return Finding(
        "preflight-failed",
        f"it ended before training, in the check of its nodes: {refusal.told}",
        remedy,
        node=refusal.node,
        host=host,
        evidence=last_lines(evidence.log(node.rank), 3),
    )


RULES = (preflight_failed,)
