"""Why an attempt ended from outside and why the next one began, in words.

`state` puts them into reasons, `tp job status` into its table of attempts.
"""

from __future__ import annotations

WORDS = {
    "walltime": "met its walltime",
    "preemption": "was preempted",
    "node_failure": "lost a node",
    "asked": "was asked to save and end",
}
"""Cause, as `end.json` and `restart.json` have it → what happened to the attempt."""

SLURMS = {"walltime": "TIMEOUT", "preemption": "PREEMPTED", "node_failure": "NODE_FAIL"}
"""Cause → Slurm's state for it, where Slurm itself does not say."""


def words(cause: str) -> str:
    """`met its walltime`; a cause that this version does not know is told as it is."""
    return WORDS.get(cause, f"ended ({cause})" if cause else "ended")


def on_node(reason: str, node: str) -> str:
    """A reason and the node that it tells of; where that begins the sentence already, no second time."""
    if not reason or not node or reason.startswith(f"{node} "):
        return reason
    first, newline, remedy = reason.partition("\n")
    return f"{first} on {node}{newline}{remedy}"
