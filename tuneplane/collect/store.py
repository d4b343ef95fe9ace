"""The metrics of many runs, read incrementally. For `tp job metrics`, `tp collect`, the board and exports.

What was read is kept on this machine's disk (`cache`), so that the next process reads only what is new; a run that
has ended leaves its points in one file of its own (`compact`). Both can be deleted: the jobs' own files decide.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tuneplane.collect.cache import Busy, Cache
from tuneplane.collect.columns import Columns
from tuneplane.collect.compact import WORTH_BYTES, Compact, open_compact, write_compact
from tuneplane.collect.ledger import Ledger, columns_in
from tuneplane.collect.lines import Column, assemble, summarise
from tuneplane.collect.overview import Overview
from tuneplane.collect.place import find_folder, make_folder
from tuneplane.collect.points import IngestFile
from tuneplane.collect.reader import Forgotten
from tuneplane.collect.series import Series
from tuneplane.collect.source import RunSource

_COMMIT_POINTS = 250_000
"""So many values are read before they are written: 8 MB."""

_ENDED_S = 10.0
"""How long a run that has ended and was read is not looked at again."""

_RETRY_S = 60.0
"""How long a cache that another process held is left alone."""

_TRIES = 5
"""How often what another process wrote meanwhile is taken over."""

_NO_LEDGER = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What restoring a ledger raises where a text is none."""

T = TypeVar("T")


class Store:
    """What was read of runs by now. A run that was never refreshed has nothing. Threads may share it.

    folder: of the cache; by default `$TUNEPLANE_STORE_DIR`, else a folder of this user's on a local disk.
    memory: keep nothing on disk.
    notice: why nothing is kept on disk, though it was wanted; empty where it is.
    """

    def __init__(self, folder: Path | None = None, memory: bool = False) -> None:
        self.notice = ""
        self._mutex = threading.RLock()
        self._ledgers: dict[str, Ledger] = {}
        self._compacts: dict[str, Compact] = {}
        self._doubted: set[str] = set()  # runs whose compact file is not to be read
        self._sources: dict[str, RunSource] = {}
        self._unread: set[str] = set()  # of these, those that were not read since the cache began anew
        self._new_points: dict[str, int] = {}
        self._folder: Path | None = None
        self._locked: tuple[Path, float] | None = None  # a cache that was held, and when it is tried again
        if not memory:
            if folder is None:
                self._folder, self.notice = find_folder(os.environ)
            else:
                self.notice = make_folder(folder)
                self._folder = None if self.notice else folder
        self._cache = self._opened()

    def _opened(self) -> Cache:
        if self._folder is not None:
            try:
                return Cache(self._folder)
            except sqlite3.Error as error:
                self.notice = f"{self._folder}: {error}"
                self._note_locked(error)
        return Cache(None)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all that was read. What is kept on disk stays there."""
        with self._mutex:
            self._forget_all()
            self._cache.close()

    def refresh(self, sources: Iterable[RunSource]) -> None:
        """Read what is new of each run. A run that cannot be read says so in its overview's `fault`."""
        with self._mutex:
            self._try_again()
            for source in sources:
                self._sources[source.run_id] = source
                self._kept(source, partial(self._refresh, source))

    def new_points(self, run_id: str) -> int:
        """How many values the last refresh read of a run that were not known before."""
        return self._new_points.get(run_id, 0)

    def overview(self, run_id: str) -> Overview:
        """All but the points."""
        with self._mutex:
            source = self._sources.get(run_id)
            return Overview() if source is None else self._kept(source, lambda: self._overview(source))

    def series(self, run_id: str, names: Iterable[str]) -> dict[str, Series]:
        """The merged line of each of these metrics; names that the run has not are left out."""
        wanted = list(names)
        with self._mutex:
            source = self._sources.get(run_id)
            return {} if source is None else self._kept(source, lambda: self._series(source, wanted))

    # Where the cache fails

    def _kept(self, source: RunSource, act: Callable[[], T]) -> T:
        """What `act` gives; where the cache fails, it begins anew or in memory, and the run is read again."""
        try:
            if source.run_id in self._unread:
                self._read_anew(source)
            return act()
        except sqlite3.Error as error:
            self._begin_anew(error)
        try:
            self._read_anew(source)
            return act()
        except sqlite3.Error as error:
            self._begin_anew(error, in_memory=True)
            self._read_anew(source)
            return act()

    def _begin_anew(self, error: sqlite3.Error, in_memory: bool = False) -> None:
        """A damaged cache is deleted; where it is busy or full, memory has to do."""
        damaged = not isinstance(error, sqlite3.OperationalError)
        self._forget_all()
        self._cache.close(delete=damaged)
        if not damaged:
            self.notice = f"{self._folder}: {error}" if self._folder else self.notice or str(error)
            self._note_locked(error)
        if in_memory or not damaged:
            self._folder = None
        self._cache = self._opened()
        self._unread = set(self._sources)

    def _note_locked(self, error: sqlite3.Error) -> None:
        if self._folder is not None and ("locked" in str(error) or os.strerror(errno.EAGAIN) in str(error)):
            self._locked = (self._folder, time.monotonic() + _RETRY_S)

    def _try_again(self) -> None:
        """A cache that somebody held is used again later: memory would not do for all the days of a board."""
        if self._locked is None or time.monotonic() < self._locked[1]:
            return
        self._folder, self.notice, self._locked = self._locked[0], "", None
        self._forget_all()
        self._cache.close()
        self._cache = self._opened()
        self._unread = set(self._sources)

    def _read_anew(self, source: RunSource) -> None:
        self._refresh(source)
        self._unread.discard(source.run_id)

    def _forget_all(self) -> None:
        self._ledgers.clear()
        self._compacts.clear()

    # Reading

    def _refresh(self, source: RunSource) -> None:
        self._new_points[source.run_id] = 0
        for _ in range(_TRIES):
            ledger = self._ledger(source)
            now = time.monotonic()
            if source.ended and now - ledger.ended_at < _ENDED_S:
                return
            compact = self._compacts.get(source.run_id)
            if compact is not None:
                if ledger.reader.sizes() == compact.sizes:
                    ledger.ended_at = now
                    return
                self._doubt(source.run_id)
                continue
            try:
                self._read(ledger)
            except Busy:  # another process was quicker: go on from what it has written
                self._ledgers.pop(source.run_id, None)
                continue
            if source.ended:
                ledger.ended_at = now
                self._make_compact(ledger)
            return
        self._ledger(source)

    def _ledger(self, source: RunSource) -> Ledger:
        """What is known of the run by now: by this process, in its compact file, in the cache, or nothing."""
        ledger = self._ledgers.get(source.run_id)
        if ledger is not None and ledger.update(source):
            return ledger
        self._compacts.pop(source.run_id, None)
        ledger = self._from_compact(source) or self._from_cache(source)
        self._ledgers[source.run_id] = ledger
        return ledger

    def _from_compact(self, source: RunSource) -> Ledger | None:
        if not source.ended or source.run_id in self._doubted:
            return None
        compact = open_compact(source.folder)
        if compact is None:
            return None
        ledger = Ledger(source)
        try:
            ledger.restore(compact.ledger)
        except _NO_LEDGER:
            return None
        self._compacts[source.run_id] = compact
        return ledger

    def _from_cache(self, source: RunSource) -> Ledger:
        kept = self._cache.read(_key(source))
        if kept is None:
            return Ledger(source)
        version, text = kept
        ledger = Ledger(source, version)
        try:
            ledger.restore(text)
        except _NO_LEDGER:  # it was read as another run
            with contextlib.suppress(Busy):
                self._cache.drop(_key(source), version, columns_in(text))
            return Ledger(source)
        return ledger

    def _doubt(self, run_id: str) -> None:
        """The compact file does not stand for what is there."""
        self._doubted.add(run_id)
        self._compacts.pop(run_id, None)
        self._ledgers.pop(run_id, None)

    def _read(self, ledger: Ledger) -> None:
        """Read what is new and write it down. Raises Busy."""
        fresh: list[tuple[Column, Columns]] = []
        gone: list[Column] = []
        count = 0
        for item in ledger.reader.read_new():
            if isinstance(item, Forgotten):
                void = ledger.forget(item.file)
                gone += void
                fresh = [(column, points) for column, points in fresh if column not in void]
                continue
            added = ledger.add(item)
            fresh += added
            count += sum(len(points) for _, points in added)
            if count >= _COMMIT_POINTS:
                self._write(ledger, fresh, gone)
                fresh, gone, count = [], [], 0
        if fresh or gone or ledger.reader.looked:
            ledger.notice_resumed()
            self._write(ledger, fresh, gone)

    def _write(self, ledger: Ledger, fresh: list[tuple[Column, Columns]], gone: list[Column]) -> None:
        added: dict[int, tuple[Column, Columns]] = {}
        for column, points in fresh:
            if id(column) in added:
                added[id(column)][1].extend(points)
            else:
                added[id(column)] = (column, points)
        key = _key(ledger.source)
        self._cache.begin(key, ledger.version)
        try:
            self._cache.forget(column.key for column in gone if column.key >= 0)
            for column, points in added.values():
                if column.key < 0:
                    column.key = self._cache.new_column()
                self._cache.append(column.key, column.points - len(points), points)
            version = self._cache.commit(key, ledger.state())
        except BaseException:
            self._ledgers.pop(ledger.source.run_id, None)  # it knows of points that are not kept
            with contextlib.suppress(sqlite3.Error):
                self._cache.rollback()
            raise
        ledger.version = version
        self._new_points[ledger.source.run_id] += sum(len(points) for _, points in added.values())

    # Answering

    def _overview(self, source: RunSource) -> Overview:
        ledger = self._settled(source)
        files = ledger.reader.files
        ingest = [file for file in files.values() if isinstance(file, IngestFile)]
        torn = {name: file.torn_lines + file.tail.oversized for name, file in files.items()}
        now_s = time.time()
        return Overview(
            metrics={
                name: summary.told(name, now_s)
                for name, summary in sorted(ledger.summaries.items())
                if summary is not None
            },
            hparams=ledger.hparams(),
            dropped_points=sum(file.dropped_points for file in ingest),
            dropped_values=sum(file.dropped_values for file in ingest),
            gaps=sum(file.gaps for file in ingest),
            torn_lines=sum(torn.values()),
            torn=_shown({name: count for name, count in torn.items() if count}),
            refused=_shown({name: file.refused for name, file in files.items() if file.refused}),
            skipped=_shown(ledger.reader.skipped),
            unreadable=_shown(ledger.reader.unreadable),
            attempts=ledger.attempts(),
            newest_s=ledger.newest_s(),
            fault=ledger.reader.fault,
        )

    def _settled(self, source: RunSource) -> Ledger:
        """The run's ledger, with the summary of every line; they are kept."""
        for _ in range(_TRIES):
            ledger = self._ledger(source)
            if not ledger.stale:
                break
            try:
                self._summarise(ledger)
                if source.run_id not in self._compacts:
                    self._write(ledger, [], [])
                break
            except Busy:
                self._ledgers.pop(source.run_id, None)
        return ledger

    def _summarise(self, ledger: Ledger) -> None:
        for name in sorted(ledger.stale):
            ledger.summaries[name] = summarise(self._line(ledger, name))
            ledger.stale.discard(name)

    def _series(self, source: RunSource, names: list[str]) -> dict[str, Series]:
        for _ in range(_TRIES):
            ledger = self._ledger(source)
            have = ledger.lines()
            try:
                return {name: self._line(ledger, name) for name in names if name in have}
            except Busy:
                self._ledgers.pop(source.run_id, None)
        return {}

    def _line(self, ledger: Ledger, name: str) -> Series:
        """Raises Busy where the cache is further than the ledger."""
        columns = ledger.lines()[name]
        compact = self._compacts.get(ledger.source.run_id)
        if compact is not None:
            try:
                return assemble(((c, compact.points(c.key)) for c in columns), ledger.resumed())
            except (OSError, ValueError):
                self._doubt(ledger.source.run_id)
                self._refresh(ledger.source)
                raise Busy from None
        with self._cache.snapshot(_key(ledger.source), ledger.version):
            return assemble(((c, self._cache.points(c.key, c.points)) for c in columns), ledger.resumed())

    # Runs that have ended

    def _make_compact(self, ledger: Ledger) -> None:
        """Leave the points of a run that has ended beside its ingest folder, where worth it and allowed."""
        source = ledger.source
        sizes = ledger.reader.sizes()
        if not sizes or sum(status[0] for status in sizes.values()) < WORTH_BYTES:
            return
        try:
            if source.folder.stat().st_uid != os.geteuid() or not os.access(source.folder, os.W_OK):
                return
            if ledger.reader.unreadable or any(
                file.tail.seen is None or list(file.tail.seen[2:]) != sizes[name][:2]
                for name, file in ledger.reader.files.items()
                if not file.refused
            ):
                return  # not all of it has been read
            self._settled(source)
            columns = [column for column in ledger.columns.values() if column.key >= 0]
            key = _key(source)
            with self._cache.snapshot(key, ledger.version):
                points = ((c.key, self._cache.points(c.key, c.points)) for c in columns)
                write_compact(source.folder, ledger.state(), sizes, points)
        except (OSError, Busy):
            return
        self._doubted.discard(source.run_id)
        compact = open_compact(source.folder)
        if compact is not None:
            self._compacts[source.run_id] = compact
            with contextlib.suppress(Busy):
                self._cache.drop(key, ledger.version, [column.key for column in columns])


def _shown(files: Mapping[str, T]) -> dict[str, T]:
    """By name; bytes of names that are no UTF-8 as question marks."""
    return {name.encode("utf-8", "replace").decode(): files[name] for name in sorted(files)}


def _key(source: RunSource) -> str:
    """A run in the cache: one that was copied elsewhere is another."""
    return os.fspath(source.folder)
