"""The rows of a data file, each with its place, and what is no row: JSON Lines, JSON, parquet.

In memory is one row at a time, whatever the file's size. `check.py` reads.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import itertools
import json
import lzma
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from tuneplane.kernel.errors import Fault

FILE = re.compile(r"\.(jsonl?|parquet)(\.(gz|bz2|xz))?$")
"""What the trl adapter takes for a file."""

LONGEST_ROW_BYTES = 64 << 20
"""A row this long is no sample of text; more of it is not read."""

MOST_BLANK = 100_000
"""So many lines without a row are no data, and nobody is to wait for their end."""

CHUNK = 1 << 20

_OPEN: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_BLANK, _BETWEEN = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r\n,]*")
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_NO_ROWS = (EOFError, lzma.LZMAError, OSError, ValueError)


@dataclass(frozen=True)
class Row:
    """One row, where it stands (`file:line`), and how many bytes of the file were read by then."""

    where: str
    value: Any
    offset: int


class NotLookedAt(Exception):
    """This host cannot read the format; the reason is its text."""


def read_rows(path: Path) -> Iterator[Row | Fault]:
    """The rows of a file in their order, and a fault for each place that is none. Raises NotLookedAt, OSError."""
    if not path.is_file():  # a pipe would be waited for, a device has no end
        yield Fault("is no file: a pipe, a device or a broken link", str(path), "name files that stay")
        return
    if path.name.endswith(".parquet"):
        yield from _parquet(path)
        return
    with cast("IO[bytes]", path.open("rb")) as raw:
        file = cast("IO[bytes]", _OPEN.get(path.suffix, _as_it_is)(raw))
        try:
            start = file.read(CHUNK)
            if start[:2] in _UTF16:
                yield Fault("is UTF-16, not UTF-8", str(path), f"iconv -f UTF-16 -t UTF-8 {path.name}")
                return
            listed = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
            file.seek(0)
            if listed or ".json." in f"{path.name}.":
                yield from _values(file, raw, str(path))
            else:
                yield from _lines(file, raw, str(path))
        except _NO_ROWS as error:  # of a damaged archive, mostly
            if isinstance(error, OSError) and error.errno is not None:
                raise
            yield Fault(f"cannot be unpacked: {error}", str(path), "is it whole?")


def _as_it_is(raw: IO[bytes]) -> IO[bytes]:
    return raw


def _lines(file: IO[bytes], raw: IO[bytes], name: str) -> Iterator[Row | Fault]:
    blank = 0
    for number in itertools.count(1):
        line = file.readline(LONGEST_ROW_BYTES + 1)
        where = f"{name}:{number}"
        if not line:
            return
        if len(line) > LONGEST_ROW_BYTES:
            yield Fault(f"a row of more than {LONGEST_ROW_BYTES >> 20} MB", where, "one row a line")
            return
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            blank += 1
            if blank > MOST_BLANK:
                yield Fault(f"more than {MOST_BLANK:,} blank lines on end", where, "is it a data file?")
                return
            continue
        blank = 0
        value = _value(line, where)
        yield value if isinstance(value, Fault) else Row(where, value[0], raw.tell())


def _value(line: bytes, where: str) -> tuple[Any] | Fault:
    try:
        return (json.loads(line.rstrip(b"\r\n").decode("utf-8")),)
    except UnicodeDecodeError as error:
        return _not_utf8(where, line[error.start], error.start + 1)
    except json.JSONDecodeError as error:
        return _not_json(where, error)
    except RecursionError:
        return Fault("nested too deep", where)


def _values(file: IO[bytes], raw: IO[bytes], name: str) -> Iterator[Row | Fault]:
    """Values of a list, or one after the other: each may span lines."""
    decoder = json.JSONDecoder()
    bom = len(b"\xef\xbb\xbf") if file.read(3) == b"\xef\xbb\xbf" else 0
    file.seek(bom)
    text, at, line, more = "", 0, 1, CHUNK  # what is before `at` is done
    pending, ended, opened = b"", False, False
    while True:
        begin, at = at, (_BETWEEN if opened else _BLANK).match(text, at).end()  # type: ignore[union-attr]
        line += text.count("\n", begin, at)
        where, first = f"{name}:{line}", text[at : at + 1]
        if not opened and first == "[":
            opened, at = True, at + 1
            continue
        if opened and first == "]":
            return
        problem = None
        if first:
            try:
                value, end = decoder.raw_decode(text, at)
                if ended or end < len(text):  # a number at the end of the buffer may go on
                    yield Row(where, value, raw.tell())
                    line, at, more = line + text.count("\n", at, end), end, CHUNK
                    continue
            except json.JSONDecodeError as error:
                problem = error
            except RecursionError:
                yield Fault("nested too deep", where)
                return
        if ended:
            if problem:
                yield _not_json(f"{name}:{line + text.count(chr(10), at, problem.pos)}", problem)
            elif opened:
                yield Fault("the list has no end", where, "is the file whole?")
            return
        if problem and problem.pos < len(text) - CHUNK and "Unterminated" not in problem.msg:
            yield _not_json(f"{name}:{line + text.count(chr(10), at, problem.pos)}", problem)
            return
        text, at = text[at:], 0
        if len(text) > LONGEST_ROW_BYTES:
            yield Fault(f"a row of more than {LONGEST_ROW_BYTES >> 20} MB", where)
            return
        block = file.read(more)
        more, ended = min(2 * more, LONGEST_ROW_BYTES), not block
        pending += block
        try:
            text, pending = text + pending.decode("utf-8"), b""
        except UnicodeDecodeError as error:
            good = pending[: error.start].decode("utf-8")
            if not ended and len(pending) - error.start < 4:  # a character cut by the block's end
                text, pending = text + good, pending[error.start :]
                continue
            yield _not_utf8(f"{name}:{line + (text + good).count(chr(10))}", pending[error.start], 0)
            return


def _not_utf8(where: str, byte: int, column: int) -> Fault:
    place = f" at column {column}" if column else ""
    return Fault(
        f"is not UTF-8: byte 0x{byte:02x}{place}", where, "iconv -f LATIN1 -t UTF-8, if that is what it is"
    )


def _not_json(where: str, error: json.JSONDecodeError) -> Fault:
    what = error.msg.removesuffix(" at")  # of control characters it ends so
    return Fault(f"is not JSON: {what} at column {error.colno}", where, "one row a line, as JSON")


def _parquet(path: Path) -> Iterator[Row | Fault]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise NotLookedAt("pyarrow is not installed on this host") from None
    try:
        file = parquet.ParquetFile(path)
        size, rows, number = path.stat().st_size, file.metadata.num_rows, 0
        for batch in file.iter_batches(batch_size=256):
            for value in batch.to_pylist():
                number += 1
                yield Row(f"{path}, row {number}", value, size * number // rows)
    except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
        if isinstance(error, OSError) and error.errno is not None:
            raise
        yield Fault(f"is not parquet: {str(error).splitlines()[0]}", str(path))
