"""The pytorch adapter: the experiment's own script in every rank, its parameters as arguments of argparse.

For recipes whose entry is a program of the experiment: `learning_rate: 0.1` is `--learning-rate=0.1` there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tuneplane.recipes.adapters import Command, Launch, NodeFacts

OPERATIONS = {"train": Launch.TORCHRUN}


def train(node: NodeFacts) -> Command:
    """The entry with what is bound (`--train-data=PATH`), then every parameter in the order of its declaration.

    Which checkpoint to go on from the script finds itself, below TUNEPLANE_OUT_DIR.
    """
    entry = ("-m", node.entrypoint) if node.module else (node.entrypoint,)
    said = {**node.bindings, **node.params}
    words = [word for name, value in said.items() for word in arguments(name, value)]
    return Command(argv=(*entry, *words), cwd=node.work_dir, launch=Launch.TORCHRUN)


def arguments(name: str, value: Any) -> Iterator[str]:
    """One parameter as argparse reads it: `--flag` and `--no-flag`, `--list a b`, nothing for null.

    `--name=value` in one word, because argparse takes a value that begins with `-` for an option.
    """
    option = name.replace("_", "-")
    if value is None:
        return
    if isinstance(value, bool):
        yield f"--{option}" if value else f"--no-{option}"
    elif isinstance(value, (list, tuple)):
        yield f"--{option}"
        yield from map(str, value)
    else:
        yield f"--{option}={value}"
