"""Which numbered lines of one file are missing. Called by `points.IngestFile` for all that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

_MAX_GAPS = 10_000
"""Gaps remembered one by one; beyond that a late line of an old gap counts as one that came twice."""


class Numbers:
    """Numbers seen so far, from 0: a count, and the gaps among them. Lines may come late, or twice."""

    __slots__ = ("_gaps", "_next", "missing")

    def __init__(self) -> None:
        self._next = 0
        self._gaps: list[tuple[int, int]] = []  # [first, past the last), ascending
        self.missing = 0

    def add(self, number: int) -> bool:
        """Note `number`; False where it was seen before."""
        if number == self._next:
            self._next += 1
            return True
        if number > self._next:
            self.missing += number - self._next
            if len(self._gaps) < _MAX_GAPS:
                self._gaps.append((self._next, number))
            self._next = number + 1
            return True
        return self._fill(number)

    def follow_on(self, groups: Sequence[Sequence[int]]) -> bool:
        """Note the numbers of all groups where together they are just those that come next; else do nothing."""
        numbers = sorted(chain.from_iterable(groups))
        if numbers != list(range(self._next, self._next + len(numbers))):
            return False
        self._next += len(numbers)
        return True

    def _fill(self, number: int) -> bool:
        for index, (first, end) in enumerate(self._gaps):
            if first <= number < end:
                parts = [(first, number), (number + 1, end)]
                self._gaps[index : index + 1] = [part for part in parts if part[0] < part[1]]
                self.missing -= 1
                return True
        return False

    def state(self) -> list[Any]:
        """For JSON."""
        return [self._next, self.missing, self._gaps]

    def restore(self, state: Any) -> None:
        """Go on from a `state`."""
        self._next, self.missing = int(state[0]), int(state[1])
        self._gaps = [(int(first), int(end)) for first, end in state[2]]
