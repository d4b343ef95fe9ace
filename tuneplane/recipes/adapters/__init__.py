"""The words that all adapters share. An adapter is a module here of pure functions, one a framework.

Compile asks an adapter what it can do, the node agent asks it for the command; no adapter knows another.
It travels in the kernel: standard library, Python 3.9.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, cast

from tuneplane.kernel.errors import Fault, UsageError


class Launch(str, Enum):
    """How the node agents start a command."""

    EACH_NODE = "each-node"  # once on every node


@dataclass(frozen=True)
class NodeFacts:
    """What an adapter may know: paths as the trainer sees them, and the allocation as it really is.

    entrypoint: absolute path of the experiment's entry. main_ip, main_port: of node 0.
    params: `spec.hyperparams`, flat; params_file: the JSON file that holds them.
    """

    work_dir: str
    exp_dir: str
    out_dir: str
    entrypoint: str
    nodes: int
    gpus_per_node: int
    node_rank: int
    main_ip: str
    main_port: int
    params: Mapping[str, Any] = field(default_factory=dict)
    params_file: str = ""


@dataclass(frozen=True)
class Command:
    """What an adapter answers.

    env: variables besides the contract's. files: absolute path → text, written before the start.
    """

    argv: tuple[str, ...]
    cwd: str
    launch: Launch
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


class Adapter(Protocol):
    """What a module of this package offers."""

    OPERATIONS: tuple[str, ...]

    def train(self, node: NodeFacts) -> Command: ...


def adapter_names() -> tuple[str, ...]:
    """Every adapter there is: the modules of this package."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load_adapter(name: str) -> Adapter:
    """The adapter of that name. Raises UsageError where there is none."""
    if name not in adapter_names():
        raise UsageError(Fault(f"there is no adapter {name}", "", f"adapters: {', '.join(adapter_names())}"))
    return cast(Adapter, importlib.import_module(f"{__name__}.{name}"))


def check_operation(adapter: str, operation: str) -> None:
    """Return where the adapter compiles the operation; raise UsageError where it does not (C7)."""
    compiles = load_adapter(adapter).OPERATIONS
    if operation not in compiles:
        raise UsageError(
            Fault(
                f"the {adapter} adapter compiles {', '.join(compiles)} alone: {operation} is refused",
                f"tp {operation}",
                "do it in the experiment's own entry, or use a method that declares this operation",
            )
        )
