"""Errors meant for users: what is wrong, where, what to do. Every floor raises these; the CLI prints them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of `tp`."""

    DONE = 0
    FAILED = 1
    WRONG_USE = 2
    JOB_FAILED = 3


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    what: the fact, one sentence without a full stop.
    where: the file (with line), flag or variable it stands in; may be empty.
    remedy: what the user does about it; may be empty.
    """

    what: str
    where: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  → {self.remedy}" if self.remedy else text


class TunePlaneError(Exception):
    """Base of every error a user is shown; carries all faults found, not only the first."""

    exit_code = Exit.FAILED

    def __init__(self, *faults: Fault | str) -> None:
        self.faults: tuple[Fault, ...] = tuple(f if isinstance(f, Fault) else Fault(f) for f in faults)
        super().__init__("\n".join(str(f) for f in self.faults))


class UsageError(TunePlaneError):
    """The input is wrong (a flag, a file, a name): exit 2."""

    exit_code = Exit.WRONG_USE


class OperationError(TunePlaneError):
    """The input is right, the machine refused (no permission, disk full, Slurm's own no): exit 1."""

    exit_code = Exit.FAILED


def raise_faults(faults: Iterable[Fault]) -> None:
    """Raise one UsageError with every fault, or return where there is none."""
    found = tuple(faults)
    if found:
        raise UsageError(*found)
