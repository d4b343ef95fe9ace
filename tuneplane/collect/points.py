"""The points of one ingest file, read while a job writes there (C21). Called by `reader.RunReader` for each file.

What is wrong with a file (another run's header, torn lines) is noted here, and concerns no other file.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import compress
from typing import Any

from tuneplane.collect.alike import Alike, read_alike
from tuneplane.collect.columns import EXACT, Columns
from tuneplane.collect.gaps import Numbers
from tuneplane.collect.tail import Tail

FORMAT_VERSION = 1
"""The newest file format that is read; the header says a file's (`v`)."""

NO_HEADER = "its first line is no header"
_NUMERIC = frozenset((int, float))


@dataclass(frozen=True)
class Header:
    """Who wrote a file."""

    attempt: int
    rank: int
    host: str
    pid: int
    started_s: float


class IngestFile:
    """What is known of one ingest file.

    run_id, token_sha256: what `job.json` says; a file whose header says otherwise is refused. An empty digest
        (a run that was made without a token) fits every header.
    """

    def __init__(self, tail: Tail, run_id: str, token_sha256: str) -> None:
        self.tail = tail
        self._run_id = run_id
        self._token_sha256 = token_sha256.removeprefix("sha256:")
        self._forget()

    def _forget(self) -> None:
        self.header: Header | None = None
        self.refused = ""
        self.numbers = Numbers()
        self.torn_lines = 0
        self.dropped_points = 0
        self.dropped_values = 0
        self.hparams: dict[str, Any] = {}
        self.resume_step: float | None = None

    @property
    def gaps(self) -> int:
        return self.numbers.missing

    def read_new(self) -> Iterator[dict[tuple[int, str], Columns] | None]:
        """What is new by (attempt, name), in batches; None: the file was replaced or cut, all before is void.

        Raises OSError.
        """
        restarted: list[bool] = []

        def restart() -> None:
            restarted.append(True)
            self._forget()

        self.tail.on_restart = restart
        if self.refused == NO_HEADER:  # a client's cache may not have had it yet
            self.tail.rewind()
        elif self.refused:
            return
        batches = self.tail.read_new()
        try:
            for data in batches:
                if restarted:
                    restarted.clear()
                    yield None
                found = self._parse(data)
                if found and self.header:
                    attempt = self.header.attempt
                    yield {(attempt, name): columns for name, columns in found.items()}
                if self.refused:
                    break
        finally:
            batches.close()
        if restarted:
            yield None

    def _parse(self, data: bytes) -> dict[str, Columns]:
        """The new points in `data`, by metric, each by ascending line number. Everything else is noted."""
        while data and self.header is None and not self.refused:
            line, _, data = data.partition(b"\n")
            self._read_line(line)
        if self.refused or not data:
            return {}
        alike: list[Alike] = []
        lines = data.split(b"\n")[:-1] if data.startswith(b'{"v"') or b'\n{"v"' in data else None
        if lines is None:
            alike, lines = read_alike(data)
        points, notes = self._read_lines(lines)
        if self.refused:
            return {}
        groups = [*(one.numbers for one in alike), [point[0] for point in points], [n for n, _ in notes]]
        fresh: list[list[bool]] | None = None
        if not self.numbers.follow_on(groups):
            fresh = [[self.numbers.add(number) for number in group] for group in groups]
        for index, (_, record) in enumerate(notes):
            if fresh is None or fresh[-1][index]:
                self._note(record)
        return _by_name(alike, points, fresh)

    def _read_lines(self, lines: list[bytes]) -> tuple[list[_Point], list[tuple[int, dict[str, Any]]]]:
        """Points, and lines of other kinds with their numbers."""
        points: list[_Point] = []
        notes: list[tuple[int, dict[str, Any]]] = []
        for record in self._records(lines):
            if "v" in record:
                self.refused = self._read_header(record)
                if self.refused:
                    break
                continue
            try:
                number = record["n"]
                if type(number) is not int or not 0 <= number < EXACT:
                    raise ValueError
                if "m" not in record:
                    notes.append((number, record))
                    continue
                values, time_s, step = record["m"], record["t"], record["s"]
                if not _NUMERIC.issuperset(map(type, values.values())):
                    values = {name: value for name, value in values.items() if type(value) in _NUMERIC}
                if type(time_s) not in _NUMERIC or type(step) not in _NUMERIC:
                    raise ValueError
                if step - step != 0 or time_s - time_s != 0:
                    raise ValueError
                points.append((number, float(time_s), float(step), values))
            except (ValueError, KeyError, AttributeError, OverflowError):
                self.torn_lines += 1
        return points, notes

    def _records(self, lines: list[bytes]) -> Iterator[dict[str, Any]]:
        """The JSON object of each line, read as one list where all are whole; torn lines are counted."""
        text = b",".join(lines).decode("utf-8", "replace")
        if all(line.startswith(b"{") and line.endswith(b"}") for line in lines):
            try:
                records = json.loads(f"[{text}]")
                if len(records) == len(lines):
                    yield from records
                    return
            except (ValueError, RecursionError):
                pass
        for line in lines:
            try:
                record = _object(line)
            except (ValueError, RecursionError):
                self.torn_lines += 1 if line.strip() else 0
            else:
                yield record

    def _read_line(self, line: bytes) -> None:
        """A line before the header: it is the header, or torn, or makes the file refused."""
        try:
            record = _object(line)
        except (ValueError, RecursionError):
            self.torn_lines += 1 if line.strip() else 0
            return
        self.refused = self._read_header(record)

    def _read_header(self, record: dict[str, Any]) -> str:
        """Take the header in `record`, or say why its file is refused."""
        if "v" not in record:
            return NO_HEADER
        if type(record["v"]) is not int or record["v"] > FORMAT_VERSION:
            return f"format {_short(record['v'])} is newer than this tuneplane reads ({FORMAT_VERSION})"
        if record.get("run_id") != self._run_id:
            return f"it belongs to run {_short(record.get('run_id'))}"
        if self._token_sha256 and record.get("token_sha256") != self._token_sha256:
            return "its token is not this run's"
        attempt, rank = record.get("attempt"), record.get("rank")
        if (
            type(attempt) is not int
            or type(rank) is not int
            or not (0 <= attempt < EXACT and 0 <= rank < EXACT)
        ):
            return "its header names no attempt and rank"
        started, pid = record.get("started"), record.get("pid")
        self.header = Header(
            attempt=attempt,
            rank=rank,
            host=str(record.get("host", "")),
            pid=pid if type(pid) is int else 0,
            started_s=float(started) if isinstance(started, (int, float)) and abs(started) < 1e15 else 0.0,
        )
        return ""

    def _note(self, record: dict[str, Any]) -> None:
        """A line that is no point: hparams, where the attempt took up again, what was dropped."""
        hparams, resume, dropped = record.get("h"), record.get("r"), record.get("d")
        if isinstance(hparams, dict):
            if _is_deeper(hparams, _MAX_DEPTH):
                self.torn_lines += 1
            else:
                self.hparams.update(_writable(hparams))
        if isinstance(resume, (int, float)) and abs(resume) < EXACT:
            self.resume_step = float(resume)
        if isinstance(dropped, dict):
            self.dropped_points = max(self.dropped_points, _count(dropped.get("points")))
            self.dropped_values = max(self.dropped_values, _count(dropped.get("values")))

    def state(self) -> dict[str, Any]:
        """For JSON: all but what `__init__` takes."""
        return {
            "tail": self.tail.state(),
            "header": asdict(self.header) if self.header else None,
            "refused": self.refused,
            "numbers": self.numbers.state(),
            "torn_lines": self.torn_lines,
            "dropped": [self.dropped_points, self.dropped_values],
            "hparams": self.hparams,
            "resume_step": self.resume_step,
        }

    def restore(self, state: Any) -> None:
        """Go on from a `state`. Raises TypeError, ValueError or LookupError where it is none."""
        self.tail.restore(state["tail"])
        self.header = _header_of(state["header"])
        self.refused = str(state["refused"])
        self.numbers.restore(state["numbers"])
        self.torn_lines = int(state["torn_lines"])
        self.dropped_points, self.dropped_values = map(int, state["dropped"])
        self.hparams = dict(state["hparams"])
        self.resume_step = None if state["resume_step"] is None else float(state["resume_step"])


def _header_of(state: Any) -> Header | None:
    if not state:
        return None
    attempt, rank, pid = (int(state[key]) for key in ("attempt", "rank", "pid"))
    return Header(attempt, rank, str(state["host"]), pid, float(state["started_s"]))


def _short(value: Any) -> str:
    """For a message: what stands in a file may be of any length."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


_MAX_DEPTH = 50
"""Of hyper-parameters; deeper ones could not be written again."""


def _is_deeper(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 0 or any(_is_deeper(each, depth - 1) for each in inner)


def _writable(value: dict[str, Any]) -> dict[str, Any]:
    """The same without halves of surrogate pairs, which no UTF-8 has."""
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    return dict(json.loads(text))


_Point = tuple[int, float, float, dict[str, Any]]
"""Line number, time, step, values."""

_DECODE: Callable[[str], tuple[Any, int]] = json.JSONDecoder().raw_decode


def _object(line: bytes) -> dict[str, Any]:
    text = line.decode("utf-8", "replace")
    record, end = _DECODE(text)
    if end != len(text) or type(record) is not dict:
        raise ValueError
    return record


def _by_name(alike: list[Alike], points: list[_Point], fresh: list[list[bool]] | None) -> dict[str, Columns]:
    """All points that are fresh, by metric and by ascending number."""
    found: dict[str, Columns] = {}
    mixed: set[str] = set()  # metrics whose points come from several groups of lines, or not in their order
    for index, one in enumerate(alike):
        numbers = array("d", one.numbers)
        if one.numbers != sorted(one.numbers):
            mixed.update(one.values)
        for name, values in one.values.items():
            columns = (numbers, one.steps, values, one.times_s)
            if fresh is None:
                piece = Columns(*columns)
            else:
                piece = Columns(*(compress(column, fresh[index]) for column in columns))
            if name in found:
                found[name].extend(piece)
                mixed.add(name)
            elif len(piece):
                found[name] = piece
    for index, (number, time_s, step, metrics) in enumerate(points):
        if fresh is not None and not fresh[len(alike)][index]:
            continue
        for name, given in metrics.items():
            try:
                value = float(given)
            except OverflowError:  # an int beyond floats: no writer of ours makes one
                continue
            columns_of_it = found.get(name)
            if columns_of_it is None:
                columns_of_it = found[name] = Columns()
            columns_of_it.append(number, step, value, time_s)
        mixed.update(metrics)
    for name in mixed & found.keys():
        found[name] = _in_order(found[name])
    return found


def _in_order(columns: Columns) -> Columns:
    numbers = columns.numbers.tolist()
    if numbers == sorted(numbers):
        return columns
    return columns.taken(sorted(range(len(numbers)), key=numbers.__getitem__))


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < EXACT else 0
