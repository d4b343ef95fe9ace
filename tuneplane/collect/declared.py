"""Points of one file that a recipe or an experiment declares as metrics (C21). Called by `reader.RunReader`.

JSON lines with a named step key, or TensorBoard events. Such files name no attempt: the time tells it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

from tuneplane.collect.columns import Columns
from tuneplane.collect.events import EventTail, read_scalars
from tuneplane.collect.tail import Tail

Attempts = tuple[tuple[int, float], ...]
Batch = dict[tuple[int, str], Columns]
"""Points by attempt and metric."""


def attempt_at(attempts: Attempts, time_s: float) -> int:
    """The attempt that ran at that time; the first one for all that is older."""
    if not attempts:
        return 0
    place = bisect_right([started_s for _, started_s in attempts], time_s)
    return attempts[max(0, place - 1)][0]


class DeclaredFile(ABC):
    """What is known of one such file.

    output: the name under which it is declared. attempts: number and start of each, ascending.
    """

    def __init__(self, tail: Tail, output: str, attempts: Attempts) -> None:
        self.tail = tail
        self.output = output
        self.attempts = attempts
        self.refused = ""
        self.torn_lines = 0
        self._read = 0  # lines or events

    def read_new(self) -> Iterator[Batch | None]:
        """What is new, in batches; None: the file was replaced or cut, all before is void. Raises OSError."""
        restarted: list[bool] = []

        def restart() -> None:
            restarted.append(True)
            self.torn_lines = self._read = 0

        self.tail.on_restart = restart
        batches = self.tail.read_new()
        try:
            for data in batches:
                if restarted:
                    restarted.clear()
                    yield None
                found = self._parse(data)
                if found:
                    yield found
        finally:
            batches.close()
        if restarted:
            yield None

    @abstractmethod
    def _parse(self, data: bytes) -> Batch:
        """The points in a batch of the tail."""

    def state(self) -> dict[str, Any]:
        """For JSON: all but what `__init__` takes."""
        return {"tail": self.tail.state(), "torn_lines": self.torn_lines, "read": self._read}

    def restore(self, state: Any) -> None:
        """Go on from a `state`. Raises TypeError, ValueError or LookupError where it is none."""
        self.tail.restore(state["tail"])
        self.torn_lines, self._read = int(state["torn_lines"]), int(state["read"])


class JsonlFile(DeclaredFile):
    """JSON lines; `step_key` may name a nested key, as in `data/step`."""

    def __init__(self, tail: Tail, output: str, attempts: Attempts, step_key: str) -> None:
        super().__init__(tail, output, attempts)
        self._step_key = step_key

    def _parse(self, data: bytes) -> Batch:
        time_s = self.tail.modified_s
        attempt = attempt_at(self.attempts, time_s)
        found: Batch = {}
        for line in data.decode("utf-8", "replace").split("\n"):
            if not line or line.isspace():
                continue
            number = self._read
            self._read += 1
            try:
                values: dict[str, float] = {}
                _flatten(json.loads(line), "", values)
                step = values.pop(self._step_key)
                if step - step != 0:
                    raise ValueError
            except (ValueError, LookupError, TypeError, RecursionError, OverflowError):
                self.torn_lines += 1
                continue
            for name, value in values.items():
                columns = found.get((attempt, name))
                if columns is None:
                    columns = found[attempt, name] = Columns()
                columns.append(number, step, value, time_s)
        return found


def _flatten(value: Any, name: str, into: dict[str, float]) -> None:
    """Numbers by the path of their keys. Raises TypeError where the outermost value is no object."""
    if not name and type(value) is not dict:
        raise TypeError
    for key, inner in value.items():
        path = f"{name}/{key}" if name else key
        if type(inner) is float:
            into[path] = inner
        elif type(inner) is int:
            if inner.bit_length() < 1024:
                into[path] = float(inner)
        elif type(inner) is dict:
            _flatten(inner, path, into)


class EventFile(DeclaredFile):
    """TensorBoard events: scalars, old and new."""

    tail: EventTail

    def __init__(self, tail: EventTail, output: str, attempts: Attempts) -> None:
        super().__init__(tail, output, attempts)

    def _parse(self, data: bytes) -> Batch:
        found: Batch = {}
        attempt, until = -1, float("-inf")
        since = float("inf")
        for event in read_scalars(data):
            number = self._read
            self._read += 1
            if event is None:
                self.torn_lines += 1
                continue
            time_s, step, scalars = event
            if not since <= time_s < until:
                attempt = attempt_at(self.attempts, time_s)
                since, until = self._span(attempt)
            for name, value in scalars:
                columns = found.get((attempt, name))
                if columns is None:
                    columns = found[attempt, name] = Columns()
                columns.append(number, step, value, time_s)
        return found

    def _span(self, attempt: int) -> tuple[float, float]:
        """From when to when an attempt ran."""
        starts = [started_s for _, started_s in self.attempts]
        for index, (number, started_s) in enumerate(self.attempts):
            if number == attempt:
                since = started_s if index else float("-inf")
                return since, starts[index + 1] if index + 1 < len(starts) else float("inf")
        return float("-inf"), float("inf")
