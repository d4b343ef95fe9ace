"""How long a trainer's calls took, and what of that a busy machine took. Imported by trainers of tests."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable


class CallTimes:
    """Times of calls, and of those alone in which the thread slept.

    A call that waits for a disk, a lock or another thread gives the processor up by itself, which the kernel
    counts (`ru_nvcsw`, getrusage(2)). One that a busy machine pre-empts does not. So a bound on calls that slept
    holds on a machine of two cores under any load, and still fails for a call that waits for the disk.
    """

    def __init__(self) -> None:
        self._all: list[float] = []
        self._slept: list[float] = []

    def time(self, call: Callable[[], object]) -> None:
        """Make the call."""
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        start = time.perf_counter()
        call()
        took_s = time.perf_counter() - start
        self._all.append(took_s)
        if resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw > before:
            self._slept.append(took_s)

    def summary(self) -> dict[str, float]:
        """calls: how many; usual_s: 99 of 100 took no longer; slept_s: the longest that slept, 0 without one."""
        ordered = sorted(self._all)
        return {
            "calls": len(ordered),
            "usual_s": ordered[len(ordered) * 99 // 100],
            "slept_s": max(self._slept, default=0.0),
        }
