"""What Slurm's commands say of a site, as text. Any of them may be missing or refuse; that is noted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tuneplane.kernel.errors import OperationError
from tuneplane.launch.slurm_commands import run_slurm

ANSWER_S = 30.0

NODE_FORMAT = "%N|%P|%c|%m|%G|%f|%t"
"""Of sinfo, where `scontrol show node` is not for users."""


@dataclass(frozen=True)
class Said:
    """Texts of the commands; empty where one did not answer. refused: program → its first words."""

    version: str = ""
    config: str = ""
    partitions: str = ""
    nodes: str = ""
    sinfo: str = ""
    associations: str = ""
    user: str = ""
    refused: dict[str, str] = field(default_factory=dict)


def commands(user: str) -> dict[str, list[str]]:
    """What is asked, by the field of `Said`."""
    manager = ["sacctmgr", "--noheader", "--parsable2", "--readonly", "show"]
    return {
        "version": ["sinfo", "--version"],
        "config": ["scontrol", "show", "config"],
        "partitions": ["scontrol", "show", "partition", "--oneliner"],
        "nodes": ["scontrol", "show", "node", "--oneliner"],
        "sinfo": ["sinfo", "--noheader", "--Node", f"--format={NODE_FORMAT}"],
        "associations": [
            *manager,
            "assoc",
            f"user={user}",
            "format=Cluster,Account,Partition,QOS,DefaultQOS",
        ],
        "user": [*manager, "user", user, "format=User,DefaultAccount"],
    }


def ask(user: str, run: Callable[[list[str]], str] | None = None) -> Said:
    """Ask Slurm all of it. run: another way to run a command, which raises OperationError as `run_slurm` does."""
    texts: dict[str, str] = {}
    refused: dict[str, str] = {}
    for name, argv in commands(user).items():
        if name == "sinfo" and texts.get("nodes"):
            continue
        try:
            texts[name] = run(argv) if run else run_slurm(argv, timeout_s=ANSWER_S)
        except OperationError as error:
            refused.setdefault(argv[0], error.faults[0].what)
    return Said(**texts, refused=refused)
