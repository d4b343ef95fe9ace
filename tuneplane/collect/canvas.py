"""Dots of several lines on a grid of characters: braille cells, or one character a cell. Used by `chart` alone.

A cell belongs to the line that was drawn there last; lines that have a mark carry it along their way.
"""

from __future__ import annotations

from collections.abc import Sequence

_BRAILLE = 0x2800
_DOTS = (
    (0x01, 0x08),
    (0x02, 0x10),
    (0x04, 0x20),
    (0x40, 0x80),
)  # by row and column in a braille cell (Unicode)

MARK_EVERY = 17
"""Cells between two marks of one line."""


class Bucket:
    """The values of one column of dots."""

    __slots__ = ("first", "high", "last", "low")

    def __init__(self, value: float) -> None:
        self.first = self.last = self.low = self.high = value

    def add(self, value: float) -> None:
        """A later value of this column."""
        self.last = value
        self.low, self.high = min(self.low, value), max(self.high, value)


Stretches = Sequence[Sequence[tuple[int, Bucket]]]
"""Columns of dots with values, ascending; between two stretches there is a gap."""


class Canvas:
    """`columns` by `rows` characters, row 0 at the top. unicode: of two by four dots each."""

    def __init__(self, columns: int, rows: int, unicode: bool) -> None:
        self.columns, self.rows = columns, rows
        self._per_column, self._per_row = (2, 4) if unicode else (1, 1)
        self.width, self.height = columns * self._per_column, rows * self._per_row
        self._unicode = unicode
        self._bits = [bytearray(columns) for _ in range(rows)]
        self._owners = [[-1] * columns for _ in range(rows)]
        self._marks: dict[tuple[int, int], str] = {}

    def draw(self, line: int, stretches: Stretches, low: float, high: float, faint: bool = False) -> None:
        """Each column from its smallest to its largest value, joined to the next. faint: a dot of every four."""
        every = 4 if faint and self._unicode else (2 if faint else 1)
        for stretch in stretches:
            before: tuple[int, Bucket] | None = None
            for column, bucket in stretch:
                top, bottom = self._row(bucket.high, low, high), self._row(bucket.low, low, high)
                self._vertical(line, column, bottom, top, every)
                if before is not None:
                    start, end = self._row(before[1].last, low, high), self._row(bucket.first, low, high)
                    self._join(line, (before[0], start), (column, end), every)
                before = (column, bucket)

    def mark(self, line: int, text: str, stretches: Stretches, low: float, high: float, shift: int) -> None:
        """Put `text` on the line's way every few cells, at its end at least. shift: tells lines' marks apart."""
        ways: dict[int, int] = {}
        for stretch in stretches:
            for column, bucket in stretch:
                ways[column // self._per_column] = self._row(bucket.last, low, high) // self._per_row
        if not ways:
            return
        wanted = [column for column in ways if column % MARK_EVERY == shift % MARK_EVERY]
        last = max(ways)
        own = [column for column in ways if self._owners[ways[column]][column] == line]
        near_end = [column for column in own if column > last - MARK_EVERY]
        for column in [*wanted, *(near_end or own)[-1:]] or [last]:
            if self._owners[ways[column]][column] in (line, -1):
                self._marks.setdefault((ways[column], column), text)
        if text not in self._marks.values():  # wholly under another line
            free = [column for column in ways if (ways[column], column) not in self._marks]
            if free:
                column = free[min(len(free) - 1, shift)]
                self._marks[ways[column], column] = text
                self._owners[ways[column]][column] = line

    def cells(self, glyphs: Sequence[str]) -> list[list[tuple[str, int]]]:
        """Rows of characters, each with the line it is of, -1 for none. glyphs: of lines, without Unicode."""
        drawn = []
        for row in range(self.rows):
            cells = []
            for column in range(self.columns):
                bits, owner = self._bits[row][column], self._owners[row][column]
                if (row, column) in self._marks:
                    cells.append((self._marks[row, column], owner))
                elif not bits:
                    cells.append((" ", -1))
                else:
                    cells.append((chr(_BRAILLE + bits) if self._unicode else glyphs[owner], owner))
            drawn.append(cells)
        return drawn

    def _row(self, value: float, low: float, high: float) -> int:
        if low == high:
            return self.height // 2
        span = high - low
        if span <= 1.7e308:
            share = (value - low) / span
        else:
            share = (value / 2 - low / 2) / (high / 2 - low / 2)
        return self.height - 1 - round(share * (self.height - 1))

    def _dot(self, line: int, column: int, row: int) -> None:
        cell_row, cell = row // self._per_row, column // self._per_column
        bit = _DOTS[row % 4][column % 2] if self._unicode else 1
        self._bits[cell_row][cell] |= bit
        self._owners[cell_row][cell] = line

    def _vertical(self, line: int, column: int, start: int, end: int, every: int) -> None:
        if column % every:
            return
        for row in range(min(start, end), max(start, end) + 1):
            if every == 1 or row in (start, end):
                self._dot(line, column, row)

    def _join(self, line: int, start: tuple[int, int], end: tuple[int, int], every: int) -> None:
        """Every column between gets the rows that the line passes there."""
        (column, row), (end_column, end_row) = start, end
        span = end_column - column
        for step in range(span):
            here = row + (end_row - row) * step / span
            there = row + (end_row - row) * (step + 1) / span
            middle = (here + there) / 2
            self._vertical(line, column + step, round(here), round(middle), every)
            self._vertical(line, column + step + 1, round(middle), round(there), every)
