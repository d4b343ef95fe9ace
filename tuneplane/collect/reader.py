"""All files of one run that hold points, read while jobs write them (C21). Called by `store`.

Every file stands for itself: what is wrong with one never hides another. An idle look costs a stat a file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from tuneplane.collect.beneath import Listing, find_files, list_folder, open_beneath
from tuneplane.collect.columns import Columns
from tuneplane.collect.declared import DeclaredFile, EventFile, JsonlFile
from tuneplane.collect.events import EventTail
from tuneplane.collect.points import IngestFile
from tuneplane.collect.source import Declared, RunSource
from tuneplane.collect.tail import NotRegular, Tail
from tuneplane.kernel.filesystem import keeps_writes_back

_LIST_S = 2.0
"""How old a listing may be where the folder's time says that nothing was added: times are coarse and cached."""

_LISTING_SHARE = 20
"""Looking for declared outputs may take this fraction of the time."""

OUT = "out/"
"""Before the names of declared files, which no ingest file can have."""


class Batch(NamedTuple):
    """New points of one file, by attempt and metric."""

    file: str
    points: dict[tuple[int, str], Columns]


class Forgotten(NamedTuple):
    """All points given of a file are void: it was replaced or cut, and comes again."""

    file: str


class RunReader:
    """Reads what is new of a run at each `read_new`.

    skipped: entries that hold no points, and why. unreadable: files that the system would not read just now, in
    its words. fault: why the ingest folder cannot be listed, else empty.
    looked: whether the last `read_new` learned anything.
    """

    def __init__(self, source: RunSource) -> None:
        self.files: dict[str, IngestFile | DeclaredFile] = {}
        self.skipped: dict[str, str] = {}
        self.unreadable: dict[str, str] = {}
        self.fault = ""
        self.looked = False
        self._source = source
        self._ingest = source.folder / "ingest"
        self._out = source.folder / "out"
        self._listed_at = self._found_at = float("-inf")
        self._find_pause_s = _LIST_S
        self._ingest_mtime_ns = -1
        self._ingest_skipped: dict[str, str] = {}
        self._out_skipped: dict[str, str] = {}
        self._paths: dict[str, str] = {}
        self._must_open: bool | None = None

    def update(self, source: RunSource) -> bool:
        """What is known of the run by now; False where it is another one, which this cannot read on."""
        if _fingerprint(source) != _fingerprint(self._source):
            return False
        self._source = source
        for file in self.files.values():
            if isinstance(file, DeclaredFile):
                file.attempts = source.attempts
        return True

    def read_new(self) -> Iterator[Batch | Forgotten]:
        """What was written since the last call. Never raises for what it finds."""
        self.looked = False
        self._list()
        for name, file in list(self.files.items()):
            if not self._is_same(name, file):
                seen = file.tail.seen
                yield from self._read_file(name, file)
                self.looked = self.looked or file.tail.seen != seen

    def _is_same(self, name: str, file: IngestFile | DeclaredFile) -> bool:
        if self._must_open is None:
            self._must_open = keeps_writes_back(str(self._ingest))
        if self._must_open:  # such a client looks at a file's age only when it is opened
            return False
        try:
            return file.tail.is_same(os.lstat(self._paths[name]))
        except OSError:  # opening it says what there is to say
            return False

    def _read_file(self, name: str, file: IngestFile | DeclaredFile) -> Iterator[Batch | Forgotten]:
        self.unreadable.pop(name, None)
        try:
            for points in file.read_new():
                self.looked = True
                yield Forgotten(name) if points is None else Batch(name, _writable(points))
        except FileNotFoundError:  # what it held is known
            return
        except NotRegular:
            self.skipped[name] = "no regular file"
        except OSError as error:
            self.unreadable[name] = error.strerror or str(error)
        if isinstance(file.tail, EventTail) and file.tail.damaged_at is not None:
            self.unreadable[name] = f"it is damaged at byte {file.tail.damaged_at}: what follows is not read"

    def _list(self) -> None:
        """Look for new files."""
        now = time.monotonic()
        changed = False
        try:
            mtime_ns = os.lstat(self._ingest).st_mtime_ns
        except OSError:
            mtime_ns = -1
        if mtime_ns != self._ingest_mtime_ns or now - self._listed_at > _LIST_S:
            self._ingest_mtime_ns, self._listed_at = mtime_ns, now
            changed = self._list_ingest()
        if self._source.outputs and now - self._found_at > self._find_pause_s:
            changed = True
            self._find_outputs()
            self._found_at = time.monotonic()
            self._find_pause_s = max(_LIST_S, _LISTING_SHARE * (self._found_at - now))
        if changed:
            self.skipped = {**self._ingest_skipped, **self._out_skipped}

    def _list_ingest(self) -> bool:
        try:
            listing = list_folder(self._ingest, ".jsonl")
            self.fault = ""
        except FileNotFoundError:
            listing = Listing()
        except OSError as error:
            self.fault = f"{self._ingest}: cannot read points: {error.strerror}"
            return False
        for name in listing.files:
            if name not in self.files:
                self._add(name, None)
        self._ingest_skipped = listing.told("ingest")
        return True

    def _find_outputs(self) -> None:
        self._out_skipped = {}
        for output in self._source.outputs:
            listing = find_files(self._out, output.path)
            for relative in listing.files:
                if OUT + relative not in self.files:  # of two outputs that match a file, the first has it
                    self._add(OUT + relative, output)
            told = listing.told(output.name)
            self._out_skipped.update({f"{OUT}{name}": why for name, why in told.items()})

    def _add(self, name: str, output: Declared | None) -> None:
        folder = self._ingest if output is None else self._out
        relative = name if output is None else name.removeprefix(OUT)
        path = folder / relative
        self._paths[name] = str(path)
        kind = EventTail if output and output.kind == "tensorboard" else Tail
        tail = kind(path, opener=lambda: open_beneath(folder, relative))
        source = self._source
        if output is None:
            self.files[name] = IngestFile(tail, source.run_id, source.token_sha256)
        elif isinstance(tail, EventTail):
            self.files[name] = EventFile(tail, output.name, source.attempts)
        else:
            self.files[name] = JsonlFile(tail, output.name, source.attempts, output.step_key)

    def state(self) -> dict[str, Any]:
        """For JSON: how far every file was read, and what it was read as."""
        return {
            "of": _fingerprint(self._source),
            "files": {
                name: {"output": file.output if isinstance(file, DeclaredFile) else None, **file.state()}
                for name, file in self.files.items()
            },
            "skipped": [self._ingest_skipped, self._out_skipped],
            "unreadable": self.unreadable,
            "fault": self.fault,
        }

    def restore(self, state: Any) -> None:
        """Go on from a `state`. Raises TypeError, ValueError or LookupError where it is none of this run."""
        if state["of"] != _fingerprint(self._source):
            raise ValueError("the run was read as another one")
        outputs = {output.name: output for output in self._source.outputs}
        for name, of_file in state["files"].items():
            self._add(name, None if of_file["output"] is None else outputs[of_file["output"]])
            self.files[name].restore(of_file)
        self._ingest_skipped, self._out_skipped = map(dict, state["skipped"])
        self.skipped = {**self._ingest_skipped, **self._out_skipped}
        self.unreadable = dict(state["unreadable"])
        self.fault = str(state["fault"])

    def sizes(self) -> dict[str, list[int]] | None:
        """Size, change time and who may read of each file as it is now; None where one is new or gone."""
        self._listed_at = self._found_at = float("-inf")
        before = len(self.files)
        self._list()
        if self.fault or len(self.files) > before:
            return None
        found = {}
        for name in self.files:
            try:
                status = os.lstat(self._paths[name])
            except OSError:
                return None
            found[name] = [status.st_size, status.st_mtime_ns, status.st_mode & 0o444]
        return found


def _writable(points: dict[tuple[int, str], Columns]) -> dict[tuple[int, str], Columns]:
    """The same by names without halves of surrogate pairs, which no UTF-8 has: nobody could write them."""
    if all(name.isascii() for _, name in points):
        return points
    found: dict[tuple[int, str], Columns] = {}
    for (attempt, name), columns in points.items():
        key = (attempt, name.encode("utf-8", "replace").decode())
        if key in found:
            found[key].extend(columns)
        else:
            found[key] = columns
    return found


def _fingerprint(source: RunSource) -> list[Any]:
    """What decides how a run's files are read and its lines are named."""
    outputs = [[o.name, o.path, o.kind, o.step_key] for o in source.outputs]
    metrics = [[name, list(aliases)] for name, aliases in source.metrics]
    return [source.run_id, source.token_sha256, outputs, *([metrics] if metrics else [])]
