"""What checking a request found: faults, notices, and what could not be checked. Submit and rerun collect here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tuneplane.kernel.errors import Fault, TunePlaneError, UsageError

T = TypeVar("T")


@dataclass
class Findings:
    """What compiling found besides the draft. `unchecked`: what needs a flag that was not given (C30)."""

    faults: list[Fault] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    missing: list[Fault] = field(default_factory=list)  # the same flags, as a submit refuses their absence
    refused: list[TunePlaneError] = field(default_factory=list)  # the machine's own no: exit 1

    def attempt(self, call: Callable[..., T], *arguments: Any, **options: Any) -> T | None:
        """The call's result, or None with its faults noted."""
        try:
            return call(*arguments, **options)
        except UsageError as error:
            self.faults += [fault for fault in error.faults if fault not in self.faults]
        except TunePlaneError as error:
            self.refused.append(error)
        return None

    def raise_all(self) -> None:
        """Raise one error with every fault; where the machine alone refused, that one (exit 1)."""
        if self.faults:
            raise UsageError(*self.faults, *(fault for error in self.refused for fault in error.faults))
        if self.refused:
            raise self.refused[0]
