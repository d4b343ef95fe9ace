"""The custom adapter: the user's own train.sh, once on every node, and nothing else (C6, C7)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tuneplane.kernel import env
from tuneplane.recipes.adapters import Command, Launch, NodeFacts

OPERATIONS = {"train": Launch.EACH_NODE}

MACHINE_VARIABLES = (env.MACHINE_RANK, env.MACHINE_COUNT, env.MAIN_PROCESS_IP, env.MAIN_PROCESS_PORT)


def train(node: NodeFacts) -> Command:
    """`bash <absolute path of train.sh>` from the work folder."""
    return Command(argv=("bash", node.entrypoint), cwd=node.work_dir, launch=Launch.EACH_NODE)


def multi_node_notice(script: str, nodes: int) -> str | None:
    """What submit says where several nodes run a script that uses none of the machine variables (C6)."""
    if nodes < 2:
        return None
    code = "".join(_without_comments(script))
    if any(re.search(rf"\b{name}\b", code) for name in MACHINE_VARIABLES):
        return None
    return (
        f"train.sh runs once on each of {nodes} nodes, and it uses none of {', '.join(MACHINE_VARIABLES)}: "
        "its nodes will train apart, not together"
    )


def _without_comments(script: str) -> Iterator[str]:
    """The script's characters without its comments: a `#` at a word's start, outside quotes."""
    quote = ""
    escaped = comment = False
    before = "\n"
    for character in script:
        if comment:
            comment = character != "\n"
        elif escaped:
            escaped = False
        elif character == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and before in " \t\n;&|()":
            comment = True
        if not comment:
            yield character
        before = character
