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
from typing import Any, Callable, Protocol, cast

from tuneplane.kernel.errors import Fault, UsageError


class Launch(str, Enum):
    """How the node agents start a command."""

    EACH_NODE = "each-node"  # once on every node
    TORCHRUN = "torchrun"  # a script or `-m MODULE` and its arguments: in every rank, through the bridge
    ONE_PROCESS = "one-process"  # once, on the one node of the run


@dataclass(frozen=True)
class Checkpoint:
    """A folder of the run's `checkpoints`, as it was when the attempt was claimed.

    files: names of what lies directly in it, by which an adapter tells whether it is complete.
    """

    name: str
    path: str
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeFacts:
    """What an adapter may know: paths as the trainer sees them, and the allocation as it really is.

    out_dir: of an operation, that of the run it works on. entrypoint: absolute path of the experiment's entry, or
    a module's name where `module` says so. main_ip, main_port: of node 0. params: `spec.hyperparams`, flat;
    params_file: the JSON file that holds them. bindings: `model`, `train_data`, … → hub id or absolute path.
    files_dir: a folder of this node and attempt, for the files of a `Command`. checkpoints: sorted by name, with
    the numbers in it as numbers, and the same on every node. device: `gpu` or `cpu`. tmp_dir: a folder of
    this node and attempt that the trainer may write to.
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
    module: bool = False
    bindings: Mapping[str, str] = field(default_factory=dict)
    files_dir: str = ""
    checkpoints: tuple[Checkpoint, ...] = ()
    attempt: int = 0
    device: str = "gpu"
    tmp_dir: str = ""


@dataclass(frozen=True)
class Command:
    """What an adapter answers.

    env: variables besides the contract's. files: absolute path → text, written before the start, below
    `NodeFacts.files_dir`. bridge: the bridge's own options, of a command that torchrun starts.
    """

    argv: tuple[str, ...]
    cwd: str
    launch: Launch
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    bridge: tuple[str, ...] = ()


class Adapter(Protocol):
    """What a module of this package offers: a function of the name of each operation, and how that is started."""

    OPERATIONS: Mapping[str, Launch]


def adapter_names() -> tuple[str, ...]:
    """Every adapter there is: the modules of this package."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load_adapter(name: str) -> Adapter:
    """The adapter of that name. Raises UsageError where there is none."""
    if name not in adapter_names():
        raise UsageError(Fault(f"there is no adapter {name}", "", f"adapters: {', '.join(adapter_names())}"))
    return cast(Adapter, importlib.import_module(f"{__name__}.{name}"))


def compile_command(adapter: str, operation: str, node: NodeFacts) -> Command:
    """The adapter's answer for an operation on one node. Raises UsageError where it compiles none of that name."""
    check_operation(adapter, operation)
    answer: Callable[[NodeFacts], Command] = getattr(load_adapter(adapter), operation)
    return answer(node)


def input_faults(
    adapter: str, params: Mapping[str, Any], bindings: Mapping[str, str], ranks: int | None
) -> list[Fault]:
    """What an adapter that looks (`faults`) finds not to fit together. ranks: of all nodes, None: unknown."""
    look: Callable[..., list[Fault]] | None = getattr(load_adapter(adapter), "faults", None)
    return look(params, bindings, ranks) if look else []


def does(adapter: str, operation: str) -> bool:
    """Whether an operation can be done with what this adapter trains: what it exports can be evaluated."""
    compiles = load_adapter(adapter).OPERATIONS
    return operation in compiles or (operation == "eval" and "export" in compiles)


def check_operation(adapter: str, operation: str) -> None:
    """Return where the adapter compiles the operation; raise UsageError where it does not (C7)."""
    compiles = load_adapter(adapter).OPERATIONS
    if not does(adapter, operation):
        raise UsageError(
            Fault(
                f"the {adapter} adapter compiles {', '.join(compiles)} alone: {operation} is refused",
                f"tp {operation}",
                "do it in the experiment's own entry, or use a method that declares this operation",
            )
        )
