"""What was read of runs, in SQLite: a cache on this machine that can be deleted at any time. For `store`.

A table of runs (a `Ledger` each, as JSON), and one of points in chunks. Points and how far their files were read
are written in one transaction. Two processes may use it at once: who comes late finds another version, and looks.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tuneplane.collect.columns import Columns, unpack

SCHEMA = 1
"""Of another one, nothing is read."""

NAME = "metrics.sqlite"
MAX_BYTES = 4 << 30
"""A larger cache begins anew: 4 GiB hold 130 million points."""

_CHUNK_POINTS = 512
_CHUNK_BITS = 22
"""Of a chunk's key, what counts the chunks of one column: two thousand million points."""

_BUSY_S = 1.0
"""How long another process's write is waited for."""


class Busy(Exception):
    """Somebody else has written meanwhile what was about to be written."""


class Cache:
    """One database. Raises sqlite3.Error where it cannot be used, which is no user's fault and hides nothing.

    folder: where it is, or is made; None keeps everything in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._lock = -1
        self._path = None if folder is None else folder / NAME
        try:
            self._database = self._open()
        except BaseException:
            self._unlock()
            raise

    def _open(self) -> sqlite3.Connection:
        if self._path is None:
            return _connect(":memory:")
        try:
            self._lock = os.open(
                self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600
            )
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # while it is in use, nobody deletes it
        except OSError as error:
            raise sqlite3.OperationalError(str(error)) from error
        try:
            if self._path.stat().st_size > MAX_BYTES:
                self._delete(self._path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise sqlite3.OperationalError(str(error)) from error
        try:
            return _connect(str(self._path))
        except sqlite3.OperationalError:  # busy, full, no permission: not its content
            raise
        except sqlite3.DatabaseError:  # of another version, or damaged
            self._delete(self._path)
            return _connect(str(self._path))

    def _delete(self, path: Path) -> None:
        """Delete the database, unless another process has it open."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            raise sqlite3.OperationalError(str(error)) from error

    def close(self, delete: bool = False) -> None:
        """Let go of it. delete: it is damaged."""
        with suppress(sqlite3.Error):
            self._database.close()
        if delete and self._path is not None:
            with suppress(sqlite3.Error):
                self._delete(self._path)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def read(self, run: str) -> tuple[int, str] | None:
        """Version and ledger of a run."""
        row = self._database.execute("SELECT version, ledger FROM runs WHERE run = ?", (run,)).fetchone()
        return None if row is None else (row[0], row[1])

    def version(self, run: str) -> int:
        """0 where nothing is kept of that run."""
        row = self._database.execute("SELECT version FROM runs WHERE run = ?", (run,)).fetchone()
        return 0 if row is None else int(row[0])

    def points(self, column: int, count: int) -> Columns:
        """The first `count` points of a column."""
        first = column << _CHUNK_BITS
        rows = self._database.execute(
            "SELECT points FROM chunks WHERE id BETWEEN ? AND ? ORDER BY id",
            (first, first + max(0, count - 1) // _CHUNK_POINTS),
        )
        found = Columns()
        for row in rows:
            found.extend(_unpacked(row))
        if len(found) < count:
            raise sqlite3.DatabaseError("points are missing")
        return found if len(found) == count else found.slice(0, count)

    def begin(self, run: str, version: int) -> None:
        """Begin to write. Raises Busy where the run's version is another one."""
        self._database.execute("BEGIN IMMEDIATE")
        if self.version(run) != version:
            self.rollback()
            raise Busy

    def new_column(self) -> int:
        """A key that no column has."""
        (last,) = self._database.execute("SELECT max(id) FROM chunks").fetchone()
        return 0 if last is None else (last >> _CHUNK_BITS) + 1

    def append(self, column: int, count: int, points: Columns) -> None:
        """Add points to a column that has `count`."""
        first = (column << _CHUNK_BITS) + count // _CHUNK_POINTS
        if count % _CHUNK_POINTS:
            row = self._database.execute("SELECT points FROM chunks WHERE id = ?", (first,)).fetchone()
            whole = _unpacked(row)
            whole.extend(points)
            points = whole
        size = len(points)
        self._database.executemany(
            "INSERT OR REPLACE INTO chunks VALUES (?, ?)",
            (
                (first + index, points.slice(start, min(size, start + _CHUNK_POINTS)).pack())
                for index, start in enumerate(range(0, size, _CHUNK_POINTS))
            ),
        )

    def forget(self, columns: Iterable[int]) -> None:
        """Delete columns."""
        self._database.executemany(
            "DELETE FROM chunks WHERE id BETWEEN ? AND ?",
            ((c << _CHUNK_BITS, (c + 1 << _CHUNK_BITS) - 1) for c in columns),
        )

    def commit(self, run: str, ledger: str) -> int:
        """End what was begun, with the run's new ledger; its version.

        No version comes twice: a run that was dropped and read again must not look like what it was.
        """
        version = 1 + secrets.randbits(62)
        self._database.execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", (run, version, ledger))
        self._database.execute("COMMIT")
        return version

    def drop(self, run: str, version: int, columns: Iterable[int]) -> None:
        """Forget a run with its points. Raises Busy where its version is another one.

        Column by column: millions of points in one transaction would keep others waiting for seconds. What a kill
        leaves of them costs space alone.
        """
        self.begin(run, version)
        self._database.execute("DELETE FROM runs WHERE run = ?", (run,))
        self._database.execute("COMMIT")
        for column in columns:
            self.forget([column])

    @contextmanager
    def snapshot(self, run: str, version: int) -> Iterator[None]:
        """See one state of the cache. Raises Busy where the run's version is another one."""
        self._database.execute("BEGIN")
        try:
            if self.version(run) != version:
                raise Busy
            yield
        finally:
            self.rollback()

    def rollback(self) -> None:
        """Take back what was begun."""
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")


def _unpacked(row: tuple[bytes] | None) -> Columns:
    try:
        if row is not None:
            return unpack(row[0])
    except (TypeError, ValueError):
        pass
    raise sqlite3.DatabaseError("points are damaged")


def _connect(path: str) -> sqlite3.Connection:
    """Raises sqlite3.DatabaseError that is no OperationalError where the file is of another kind or version."""
    database = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        (found,) = database.execute("PRAGMA user_version").fetchone()
        if found not in (0, SCHEMA):
            raise sqlite3.DatabaseError(f"version {found}")
        # No fsync a commit, and yet never damaged by a crash (https://www.sqlite.org/wal.html).
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        if found != SCHEMA:
            database.execute("BEGIN IMMEDIATE")
            database.execute(
                "CREATE TABLE IF NOT EXISTS runs (run TEXT PRIMARY KEY, version INTEGER, ledger TEXT)"
            )
            database.execute("CREATE TABLE IF NOT EXISTS chunks (id INTEGER PRIMARY KEY, points BLOB)")
            database.execute(f"PRAGMA user_version = {SCHEMA}")
            database.execute("COMMIT")
        database.execute("SELECT run, version, ledger FROM runs LIMIT 0")
        database.execute("SELECT id, points FROM chunks LIMIT 0")
    except sqlite3.OperationalError as error:
        database.close()
        if "no such" in str(error):  # a table or column: somebody else's database
            raise sqlite3.DatabaseError(str(error)) from error
        raise
    except BaseException:
        database.close()
        raise
    return database
