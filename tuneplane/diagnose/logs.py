"""Reading a log of any size within a bounded time and memory: its head, its tail, and tracebacks all over it.

A log up to the window's size is searched whole. Of a larger one, head and tail are; between them only
tracebacks are looked for, from the end backwards, as long as the time lasts. What is missed then: lines between
head and tail that no traceback is near, and what lies before the place where the time was over.
`Log.searched_bytes` says how much was looked at.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from stat import S_ISREG

from tuneplane.diagnose.evidence import Log, Mark, RankFailure, Stack, Trace
from tuneplane.diagnose.marks import EVERYWHERE, PATTERNS
from tuneplane.diagnose.stacks import DUMP, parse_stacks
from tuneplane.diagnose.traces import cut, parse_failures, parse_traces, plain_line, rank_of

HEAD_BYTES = 2 << 20
TAIL_BYTES = 14 << 20
"""Searched for all patterns: 0.3 s for both. A run's end, and what ended it, stands in the tail."""

SEARCH_S = 2.5
"""How long tracebacks are looked for between head and tail, for all logs of a run together."""

BLOCK_BYTES = 8 << 20
AROUND_BYTES = 192 << 10
"""How much is read around a traceback that was found between head and tail."""

HEAD_LINES, TAIL_LINES = 12, 40
MOST_TRACES = 24
"""Tracebacks kept of one log: the first ones and the last ones."""

DUMP_BYTES = 4 << 20
"""Stacks of all threads of all ranks of a node."""

MOST_LINES = 20_000
"""Lines looked at for one pattern in one piece: a word that stands in every line must not cost minutes."""

IMAGE_SAID = "tuneplane: the command failed at once; what its image has:"
"""Of the node agent, after the program's own last lines. Source: `node/early.py`."""

TORCHRUN = b"Root Cause (first observed failure)"


def read_log(
    path: Path, node: int | None = None, host: str = "", *, share: int = 1, deadline: float | None = None
) -> Log | None:
    """What is in a log; None where there is none. Raises OSError where it cannot be read.

    share: how many logs share the windows and the time. deadline: on the monotonic clock, when looking between
    head and tail ends.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(descriptor)
        if not S_ISREG(status.st_mode):
            return None
        until = time.monotonic() + SEARCH_S if deadline is None else deadline
        found = _Search(descriptor, status.st_size, max(1, share)).run(until)
    finally:
        os.close(descriptor)
    return replace(found, node=node, host=host, age_s=max(0.0, time.time() - status.st_mtime))


class _Search:
    """One pass over one log."""

    def __init__(self, descriptor: int, size: int, share: int) -> None:
        self.descriptor, self.size = descriptor, size
        self.head_end = min(size, max(64 << 10, HEAD_BYTES // share))
        self.tail_start = max(self.head_end, size - max(256 << 10, TAIL_BYTES // share))
        self.marks: dict[str, Mark] = {}
        self.traces: dict[int, Trace] = {}
        self.failures: list[RankFailure] = []
        self.stacks: tuple[Stack, ...] = ()

    def run(self, until: float) -> Log:
        head = self._read(0, self.head_end)
        tail = self._read(self.tail_start, self.size)
        middle = self.size - self.head_end - (self.size - self.tail_start)
        if not middle:
            head, tail = head + tail, b""
        self._search(head, 0)
        searched = self.size - middle
        if middle:
            searched += self._search_middle(until)
            self._search(tail, self.tail_start)
        traces = sorted(self.traces.values(), key=lambda trace: trace.offset)
        if len(traces) > MOST_TRACES:
            traces = [*traces[: MOST_TRACES // 2], *traces[-MOST_TRACES // 2 :]]
        lines = _last_lines(tail or head, TAIL_LINES)
        own = next((place for place, line in enumerate(lines) if line.startswith(IMAGE_SAID)), len(lines))
        return Log(
            node=None,
            host="",
            size_bytes=self.size,
            searched_bytes=searched,
            age_s=0.0,
            head=tuple(_lines_of(head[: 1 << 16], HEAD_LINES)),
            tail=tuple(lines[:own]),
            image=tuple(line.removeprefix("tuneplane: ").strip() for line in lines[own + 1 :]),
            marks=tuple(sorted(self.marks.values(), key=lambda mark: mark.first_offset)),
            traces=tuple(traces),
            failures=tuple(self.failures),
            stacks=self.stacks,
        )

    def _read(self, start: int, end: int) -> bytes:
        parts, position = [], start
        while position < end:
            part = os.pread(self.descriptor, min(BLOCK_BYTES, end - position), position)
            if not part:  # it shrank just now
                break
            parts.append(part)
            position += len(part)
        return b"".join(parts)

    def _search(self, data: bytes, start: int) -> None:
        """All patterns, tracebacks and summaries in a piece of the log."""
        for pattern in PATTERNS:
            for word in pattern.words:
                for offset, line in _lines_with(data, word):
                    if pattern.fits(line):
                        self._note(pattern.name, start + offset, line)
        place = data.find(EVERYWHERE)
        while place >= 0:
            place = data.find(EVERYWHERE, self._trace_at(data, start, place))
        dumped = data.find(DUMP)
        if dumped >= 0:
            begin = data.rfind(b"\n", 0, dumped) + 1
            block = data[begin : begin + DUMP_BYTES].split(b"\n")
            self.stacks = parse_stacks([plain_line(line) for line in block])
        summary = data.rfind(TORCHRUN)
        if summary >= 0:
            begin = data.rfind(b"Failures:", 0, summary)
            begin = summary if begin < 0 else begin
            text = data[begin : summary + 16_384].decode("utf-8", "replace")
            self.failures += parse_failures(text.split("\n"))

    def _trace_at(self, data: bytes, start: int, place: int) -> int:
        """Parse what is around a traceback's first line; where to look on."""
        begin = data.rfind(b"\n", 0, place) + 1
        lines = []
        offset = begin
        for line in data[begin : begin + AROUND_BYTES].split(b"\n"):
            lines.append((start + offset, plain_line(line)))
            offset += len(line) + 1
        for trace in parse_traces(lines):
            self.traces.setdefault(trace.offset, trace)
        return max(place + len(EVERYWHERE), min(offset - 1, begin + AROUND_BYTES // 2))

    def _note(self, name: str, offset: int, line: bytes) -> None:
        text = plain_line(line)
        known = self.marks.get(name)
        if known is None:
            self.marks[name] = Mark(name, 1, text, offset, text, rank_of(text)[0])
            return
        first, place, rank, last = known.first, known.first_offset, known.rank, known.last
        if offset < place:
            first, place, rank = text, offset, rank_of(text)[0]
        else:
            last = text
        self.marks[name] = Mark(name, known.count + 1, first, place, last, rank)

    def _search_middle(self, until: float) -> int:
        """Look for tracebacks between head and tail, from the end backwards; bytes that were looked at."""
        end = self.tail_start
        overlap = len(EVERYWHERE)
        while end > self.head_end and time.monotonic() < until:
            start = max(self.head_end, end - BLOCK_BYTES)
            block = os.pread(self.descriptor, end - start + overlap, start)
            place = block.find(EVERYWHERE)
            if place >= 0:
                self._look_around(start + place)
                last = block.rfind(EVERYWHERE)
                if last > place + AROUND_BYTES // 2:
                    self._look_around(start + last)
            end = start
        return self.tail_start - end

    def _look_around(self, place: int) -> None:
        begin = max(0, place - AROUND_BYTES // 4)
        data = self._read(begin, min(self.size, place + AROUND_BYTES))
        cut_off = data.find(b"\n") + 1
        self._search(data[cut_off:], begin + cut_off)


def _lines_with(data: bytes, word: bytes) -> Iterator[tuple[int, bytes]]:
    """Lines that hold a word, each once, with its offset."""
    place = data.find(word)
    for _ in range(MOST_LINES):
        if place < 0:
            return
        start = data.rfind(b"\n", 0, place) + 1
        end = data.find(b"\n", place)
        end = len(data) if end < 0 else end
        if end - start > 1 << 16:  # a line without end: what is around the word
            start, end = max(start, place - 2000), min(end, place + 2000)
        yield start, data[start:end]
        place = data.find(word, max(end, place + len(word)))


def _lines_of(data: bytes, most: int) -> list[str]:
    return [text for line in data.split(b"\n", most)[:most] if (text := plain_line(line)).strip()]


def _last_lines(data: bytes, most: int) -> list[str]:
    """The last lines that say anything, oldest first."""
    found: list[str] = []
    for line in reversed(data[-(1 << 18) :].split(b"\n")):
        text = plain_line(line)
        if text.strip():
            found.append(cut(text))
        if len(found) == most:
            break
    return found[::-1]
