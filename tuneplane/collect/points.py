"""The points of one run, read from its ingest folder while jobs write there (C21). Called by `metrics.Collector`.

Every file stands for itself: what is wrong with one (another run's header, torn lines) never hides another.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tuneplane.collect.gaps import Numbers
from tuneplane.collect.tail import NotRegular, Tail
from tuneplane.kernel.errors import Fault, OperationError

FORMAT_VERSION = 1
"""The newest file format that is read; the header says a file's (`v`)."""

_NO_HEADER = "its first line is no header"
_NUMBERS = frozenset((int, float))
_INT64 = 1 << 63


@dataclass(frozen=True)
class Header:
    """Who wrote a file."""

    attempt: int
    rank: int
    host: str
    pid: int
    started_s: float


class Point(NamedTuple):
    """One `log()` call. `source` numbers the files of this reader, `number` the lines of the file."""

    source: int
    number: int
    time_s: float
    step: float
    values: dict[str, float]


class Forgotten(NamedTuple):
    """All points given of `source` are void: its file was replaced or cut, and comes again as another source."""

    source: int


@dataclass
class File:
    """What is known of one ingest file."""

    source: int
    header: Header | None = None
    refused: str = ""
    numbers: Numbers = field(default_factory=Numbers)
    torn_lines: int = 0
    dropped_points: int = 0
    dropped_values: int = 0
    hparams: dict[str, Any] = field(default_factory=dict)
    resume_step: float | None = None


class IngestReader:
    """Reads what is new in the ingest folder of a run at each `read_new`.

    folder: the run's ingest folder; it need not exist yet.
    run_id, token_sha256: what `job.json` says; a file whose header says otherwise is refused. An empty digest
        (a run that was made without a token) fits every header.
    """

    def __init__(self, folder: Path, run_id: str, token_sha256: str) -> None:
        self._folder = folder
        self._run_id = run_id
        self._token_sha256 = token_sha256.removeprefix("sha256:")
        self._tails: dict[str, Tail] = {}
        self._next_source = 0
        self.files: dict[str, File] = {}
        self.skipped: dict[str, str] = {}  # entries that are no ingest files, and why
        self.unreadable: dict[str, str] = {}  # files that the system would not read just now, in its words

    def read_new(self) -> Iterator[Point | Forgotten]:
        """Points written since the last call. Raises OperationError where the folder cannot be listed."""
        self.unreadable = {}
        for name in self._names():
            if name not in self._tails:
                self._tails[name] = Tail(self._folder / name)
                self.files[name] = self._new_file()
            yield from self._read_file(name)

    def _names(self) -> list[str]:
        """Regular `*.jsonl` files by name; everything else is noted, but for hidden files."""
        names = []
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if not entry.name.endswith(".jsonl"):
                        self.skipped[entry.name] = "no .jsonl file"
                    elif entry.is_file(follow_symlinks=False):
                        self.skipped.pop(entry.name, None)
                        names.append(entry.name)
                    else:
                        self.skipped[entry.name] = _kind(entry)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise OperationError(Fault(f"cannot read points: {error.strerror}", str(self._folder))) from error
        return sorted(names)

    def _new_file(self) -> File:
        self._next_source += 1
        return File(source=self._next_source)

    def _read_file(self, name: str) -> Iterator[Point | Forgotten]:
        void: list[int] = []

        def restart() -> None:
            void.append(self.files[name].source)
            self.files[name] = self._new_file()

        tail = self._tails[name]
        tail.on_restart = restart
        if self.files[name].refused == _NO_HEADER:  # a client's cache may not have had it yet
            tail.rewind()
        elif self.files[name].refused:
            return
        try:
            with closing(tail.read_new()) as batches:
                for lines in batches:
                    while void:
                        yield Forgotten(void.pop())
                    yield from self._points(self.files[name], lines)
                    if self.files[name].refused:
                        break
        except NotRegular:
            self.skipped[name] = "no regular file"
        except OSError as error:
            self.unreadable[name] = error.strerror or str(error)
        while void:
            yield Forgotten(void.pop())

    def _points(self, file: File, lines: list[str]) -> list[Point]:
        points: list[Point] = []
        decode, add = _DECODE, points.append
        source, numbers = file.source, file.numbers
        for line in lines:
            if file.refused:
                break
            try:
                record, end = decode(line)
                if end != len(line) or type(record) is not dict:
                    raise ValueError
            except (ValueError, RecursionError):
                file.torn_lines += 1 if line.strip() else 0
                continue
            if file.header is None or "v" in record:
                file.refused = self._header(file, record)
                continue
            try:
                number = record["n"]
                if type(number) is not int or not 0 <= number < _INT64:
                    raise ValueError
                if "m" not in record:
                    if numbers.add(number):
                        _note(file, record)
                    continue
                values, time_s, step = record["m"], record["t"], record["s"]
                if not _NUMBERS.issuperset(map(type, values.values())):
                    values = {name: value for name, value in values.items() if type(value) in _NUMBERS}
                if type(time_s) not in _NUMBERS or type(step) not in _NUMBERS or step - step != 0:
                    raise ValueError
                if numbers.add(number):
                    add(Point(source, number, float(time_s), float(step), values))
            except (ValueError, KeyError, AttributeError, OverflowError):
                file.torn_lines += 1
        return points

    def _header(self, file: File, record: dict[str, Any]) -> str:
        """Take the header in `record`, or say why its file is refused."""
        if "v" not in record:
            return _NO_HEADER
        if type(record["v"]) is not int or record["v"] > FORMAT_VERSION:
            return f"format {record['v']!r} is newer than this tuneplane reads ({FORMAT_VERSION})"
        if record.get("run_id") != self._run_id:
            return f"it belongs to run {record.get('run_id')!r}"
        if self._token_sha256 and record.get("token_sha256") != self._token_sha256:
            return "its token is not this run's"
        attempt, rank = record.get("attempt"), record.get("rank")
        if type(attempt) is not int or type(rank) is not int or attempt < 0 or rank < 0:
            return "its header names no attempt and rank"
        started, pid = record.get("started"), record.get("pid")
        file.header = Header(
            attempt=attempt,
            rank=rank,
            host=str(record.get("host", "")),
            pid=pid if type(pid) is int else 0,
            started_s=float(started) if isinstance(started, (int, float)) and abs(started) < 1e15 else 0.0,
        )
        return ""


_DECODE: Callable[[str], tuple[Any, int]] = json.JSONDecoder().raw_decode


def _note(file: File, record: dict[str, Any]) -> None:
    """A line that is no point: hparams, where the attempt took up again, what was dropped; else passed over."""
    hparams, resume, dropped = record.get("h"), record.get("r"), record.get("d")
    if isinstance(hparams, dict):
        file.hparams.update(hparams)
    if isinstance(resume, (int, float)) and resume - resume == 0:
        file.resume_step = float(resume)
    if isinstance(dropped, dict):
        file.dropped_points = max(file.dropped_points, _count(dropped.get("points")))
        file.dropped_values = max(file.dropped_values, _count(dropped.get("values")))


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < _INT64 else 0


def _kind(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return "a link"
    if entry.is_dir(follow_symlinks=False):
        return "a folder"
    try:
        mode = entry.stat(follow_symlinks=False).st_mode
    except OSError:
        return "no regular file"
    return "a FIFO" if stat.S_ISFIFO(mode) else "no regular file"
