"""What of a run was sent to one place, and what is on its way: a note that outlives a killed `tp`. For `wandb`.

Rows are numbered before they are sent. After a kill the same rows go out under the same numbers, so that the
receiver knows them again; what was sent is asked of this note alone, never of the receiver.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneplane.collect.choice import is_system
from tuneplane.collect.series import Series
from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.kernel.files import read_json, write_atomic

VERSION = 1

Planned = dict[str, dict[int, list[float]]]
"""Steps by metric, by attempt."""


class Steps:
    """Steps of one metric and attempt, kept as stretches of one stride: training logs every so many."""

    def __init__(self, stretches: list[list[float]] | None = None) -> None:
        self.stretches = stretches or []  # first, stride, count
        self._known = {
            first + stride * index for first, stride, count in self.stretches for index in range(int(count))
        }

    def __contains__(self, step: float) -> bool:
        return step in self._known

    def __iter__(self) -> Iterator[float]:
        for first, stride, count in self.stretches:
            for index in range(int(count)):
                yield first + stride * index

    def add(self, step: float) -> None:
        """Take a step in, once."""
        if step in self._known:
            return
        self._known.add(step)
        last = self.stretches[-1] if self.stretches else None
        if last is not None and last[2] == 1 and step > last[0]:
            last[1] = step - last[0]
        if last is not None and last[1] > 0 and last[0] + last[1] * last[2] == step:
            last[2] += 1
        else:
            if last is not None and last[2] == 1:
                last[1] = 0
            self.stretches.append([step, 0, 1])


_NONE = Steps()


@dataclass
class Batch:
    """Points that are on their way, as rows from `first_row` on."""

    first_row: int
    planned: Planned

    def rows(self) -> list[Place]:
        """The rows in the order of their numbers; it depends on nothing but what was planned."""
        names: dict[tuple[int, bool, float], list[str]] = {}
        for name, by_attempt in self.planned.items():
            for attempt, steps in by_attempt.items():
                for step in steps:
                    names.setdefault((attempt, is_system(name), step), []).append(name)
        return [Place(attempt, step, sorted(found)) for (attempt, _, step), found in sorted(names.items())]


@dataclass(frozen=True)
class Place:
    """One row: the metrics of one attempt at one step."""

    attempt: int
    step: float
    names: list[str]


@dataclass
class Note:
    """The note in `path`. folder: where the batches on their way are being written, where that is on this disk."""

    path: Path
    sent: dict[str, dict[int, Steps]] = field(default_factory=dict)
    pending: list[Batch] = field(default_factory=list)
    next_row: int = 0
    folder: str = ""

    def plan(self, series: Mapping[str, Series]) -> Batch | None:
        """Note what is new in these lines as on its way, before it goes; None where nothing is. Raises OSError."""
        on_the_way = {
            (name, attempt): set(steps)
            for batch in self.pending
            for name, by_attempt in batch.planned.items()
            for attempt, steps in by_attempt.items()
        }
        planned: Planned = {}
        for name, line in series.items():
            for attempt, step in zip(line.attempts, line.steps, strict=True):
                if step in self.sent.get(name, {}).get(attempt, _NONE):
                    continue
                if step not in on_the_way.get((name, attempt), ()):
                    planned.setdefault(name, {}).setdefault(attempt, []).append(step)
        if not planned:
            return None
        batch = Batch(self.next_row, planned)
        self.pending.append(batch)
        self.next_row += len(batch.rows())
        self.write()
        return batch

    def confirm(self) -> None:
        """All that was on its way has arrived. Raises OSError."""
        for batch in self.pending:
            for name, by_attempt in batch.planned.items():
                for attempt, steps in by_attempt.items():
                    known = self.sent.setdefault(name, {}).setdefault(attempt, Steps())
                    for step in steps:
                        known.add(step)
        self.pending, self.folder = [], ""
        self.write()

    def write(self) -> None:
        """Keep the note. Raises OSError."""
        value = {
            "version": VERSION,
            "next_row": self.next_row,
            "folder": self.folder,
            "sent": {n: {a: s.stretches for a, s in by.items()} for n, by in self.sent.items()},
            "pending": [
                {"first_row": b.first_row, "points": {n: _stretched(by) for n, by in b.planned.items()}}
                for b in self.pending
            ],
        }
        write_atomic(self.path, json.dumps(value, separators=(",", ":")) + "\n", 0o600)


def _stretched(by_attempt: Mapping[int, list[float]]) -> dict[int, list[list[float]]]:
    found = {}
    for attempt, steps in by_attempt.items():
        known = Steps()
        for step in steps:
            known.add(step)
        found[attempt] = known.stretches
    return found


def read_note(path: Path) -> Note:
    """The note as it was left, an empty one where there is none. Raises OperationError for an unreadable one."""
    try:
        value: Any = read_json(path)
        if value["version"] != VERSION:
            raise ValueError(f"version {value['version']}")
        sent = {name: _steps(by_attempt) for name, by_attempt in value["sent"].items()}
        pending = [
            Batch(
                batch["first_row"],
                {
                    name: {attempt: list(steps) for attempt, steps in _steps(by_attempt).items()}
                    for name, by_attempt in batch["points"].items()
                },
            )
            for batch in value["pending"]
        ]
        return Note(path, sent, pending, value["next_row"], value["folder"])
    except FileNotFoundError:
        return Note(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OperationError(
            Fault(
                f"what was sent cannot be read: {error}",
                str(path),
                "remove it, and the run where it was sent to",
            )
        ) from None


def _steps(by_attempt: Mapping[str, list[list[float]]]) -> dict[int, Steps]:
    return {int(attempt): Steps(stretches) for attempt, stretches in by_attempt.items()}


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Of two who send the same run to the same place one is refused. Raises UsageError, OSError."""
    descriptor = os.open(
        path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                Fault("another tp sends this run there just now", "tp job sync", "wait for it, or end it")
            ) from None
        except OSError:  # a home that knows no locks
            pass
        yield
    finally:
        with suppress(OSError):
            os.close(descriptor)
