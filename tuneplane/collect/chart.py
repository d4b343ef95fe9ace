"""A curve in plain text, for terminals of any kind: braille dots, or `*` where there is no UTF-8. Pure.

Each column of dots shows the smallest and the largest value of its steps, so that no spike is lost to drawing.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

from tuneplane.collect.series import Series

_MIN_WIDTH, _MIN_HEIGHT = 24, 4
_LABEL_WIDTH = 10  # of the values at the left edge; `-1.234e-05` fits
_BRAILLE = 0x2800
_DOTS = (
    (0x01, 0x08),
    (0x02, 0x10),
    (0x04, 0x20),
    (0x40, 0x80),
)  # by row and column in a braille cell (Unicode)


def render_curve(
    series: Series, width: int = 80, height: int = 16, unicode: bool = True, title: str = ""
) -> str:
    """`series` drawn in at most `width` columns and `height` lines: title, plot, axis, range of steps.

    unicode: braille and box characters; else ASCII alone. The text ends without a newline; no line has trailing
    blanks. Values that are no finite numbers are not drawn but counted in the title.
    """
    width, height = max(width, _MIN_WIDTH), max(height, _MIN_HEIGHT)
    finite = [(s, v) for s, v in zip(series.steps, series.values, strict=True) if math.isfinite(v)]
    lines = [_headline(series, title, width, unicode)]
    if finite:
        lines += _plot(series, finite, width, height - 3, unicode)
    return "\n".join(line.rstrip() for line in lines)


def number_text(value: float) -> str:
    """A number in at most ten characters; `nan` and `inf` as such."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    text = f"{value:.4g}"
    return text if len(text) <= _LABEL_WIDTH else f"{value:.3g}"


def step_text(step: float) -> str:
    """A step in full where it is a whole number that a float holds exactly."""
    return str(int(step)) if abs(step) < 2**53 and step == int(step) else f"{step:.6g}"


def _headline(series: Series, title: str, width: int, unicode: bool) -> str:
    """The title, cut to leave room for what the values say."""
    facts = _printable("  ".join(_facts(series)), unicode)
    if not title:
        return _fit(facts, width)
    return _fit(f"{_fit(_printable(title, unicode), max(8, width - len(facts) - 2))}  {facts}", width)


def _facts(series: Series) -> list[str]:
    finite = [value for value in series.values if math.isfinite(value)]
    if not len(series):
        return ["no points"]
    facts = [f"last {number_text(series.values[-1])}"]
    if finite:
        facts += [f"min {number_text(min(finite))}", f"max {number_text(max(finite))}"]
    if len(finite) < len(series):
        facts.append(f"{len(series) - len(finite)} not finite")
    attempts = sorted(set(series.attempts))
    if len(attempts) > 1:
        facts.append(f"attempts {attempts[0]}–{attempts[-1]}")
    return facts


def _plot(
    series: Series, finite: Sequence[tuple[float, float]], width: int, rows: int, unicode: bool
) -> list[str]:
    columns = width - _LABEL_WIDTH - 2
    per_cell = (2, 4) if unicode else (1, 1)
    canvas = _Canvas(columns * per_cell[0], rows * per_cell[1])
    first, last = series.steps[0], series.steps[-1]
    low, high = min(v for _, v in finite), max(v for _, v in finite)
    canvas.draw(_buckets(series, first, last, canvas.width), low, high)
    cells = canvas.braille() if unicode else canvas.stars()

    tick, corner, flat, wall = ("┤", "└", "─", "│") if unicode else ("+", "+", "-", "|")
    labels = _labels(low, high, rows)
    lines = [
        f"{labels.get(row, ''):>{_LABEL_WIDTH}} {tick if row in labels else wall}{cells[row]}"
        for row in range(rows)
    ]
    left, right = f"step {step_text(first)}", step_text(last)
    gap = max(1, columns - len(left) - len(right))
    lines.append(" " * (_LABEL_WIDTH + 1) + corner + flat * columns)
    steps = left + " " * gap + right if last > first else left
    lines.append(_fit(" " * (_LABEL_WIDTH + 2) + steps, width))
    return lines


def _labels(low: float, high: float, rows: int) -> dict[int, str]:
    """Values at the left edge by row: top, bottom, and the middle where there is room."""
    if low == high:
        return {rows // 2: number_text(low)}
    labels = {0: number_text(high), rows - 1: number_text(low)}
    if rows >= 7 and rows % 2:
        labels[rows // 2] = number_text(low / 2 + high / 2)
    return labels


class _Bucket:
    """The values of one column of dots."""

    __slots__ = ("first", "high", "last", "low")

    def __init__(self, value: float) -> None:
        self.first = self.last = self.low = self.high = value

    def add(self, value: float) -> None:
        self.last = value
        self.low, self.high = min(self.low, value), max(self.high, value)


def _buckets(series: Series, first: float, last: float, width: int) -> list[list[tuple[int, _Bucket]]]:
    """Stretches of columns with values; a value that is not finite ends a stretch."""
    stretches: list[list[tuple[int, _Bucket]]] = [[]]
    scale = (width - 1) / (last - first) if last > first else 0.0
    for step, value in zip(series.steps, series.values, strict=True):
        stretch = stretches[-1]
        if not math.isfinite(value):
            if stretch:
                stretches.append([])
            continue
        column = min(width - 1, int((step - first) * scale + 0.5)) if scale else width // 2
        if stretch and stretch[-1][0] == column:
            stretch[-1][1].add(value)
        else:
            stretch.append((column, _Bucket(value)))
    return stretches


class _Canvas:
    """Dots, row 0 at the top."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._rows = [bytearray(width) for _ in range(height)]

    def draw(self, stretches: Sequence[Sequence[tuple[int, _Bucket]]], low: float, high: float) -> None:
        """Each column from its smallest to its largest value, joined to the next by a line."""
        for stretch in stretches:
            before: tuple[int, _Bucket] | None = None
            for column, bucket in stretch:
                self._vertical(column, self._row(bucket.low, low, high), self._row(bucket.high, low, high))
                if before is not None:
                    start, end = self._row(before[1].last, low, high), self._row(bucket.first, low, high)
                    self._line(before[0], start, column, end)
                before = (column, bucket)

    def _row(self, value: float, low: float, high: float) -> int:
        if low == high:
            return self.height // 2
        span = high - low
        if math.isfinite(span):
            share = (value - low) / span
        else:
            share = (value / 2 - low / 2) / (high / 2 - low / 2)
        return self.height - 1 - round(share * (self.height - 1))

    def _vertical(self, column: int, start: int, end: int) -> None:
        for row in range(min(start, end), max(start, end) + 1):
            self._rows[row][column] = 1

    def _line(self, column: int, row: int, end_column: int, end_row: int) -> None:
        """Every column between gets the rows that the line passes there."""
        span = end_column - column
        for step in range(span):
            here = row + (end_row - row) * step / span
            there = row + (end_row - row) * (step + 1) / span
            middle = (here + there) / 2
            self._vertical(column + step, round(here), round(middle))
            self._vertical(column + step + 1, round(middle), round(there))

    def braille(self) -> list[str]:
        """Cells of two by four dots."""
        lines = []
        for top in range(0, self.height, 4):
            cells = []
            for left in range(0, self.width, 2):
                bits = 0
                for row, pair in enumerate(_DOTS):
                    for column, bit in enumerate(pair):
                        bits |= bit if self._rows[top + row][left + column] else 0
                cells.append(chr(_BRAILLE + bits) if bits else " ")
            lines.append("".join(cells))
        return lines

    def stars(self) -> list[str]:
        """Cells of one dot."""
        return ["".join("*" if dot else " " for dot in row) for row in self._rows]


def _printable(text: str, unicode: bool) -> str:
    """No control characters: a metric's name must not move the cursor or colour the terminal."""
    clean = "".join(c if c.isprintable() else "?" for c in text)
    return clean if unicode else clean.replace("–", "-").encode("ascii", "replace").decode("ascii")


def _fit(text: str, width: int) -> str:
    """`text` cut to `width` columns, wide East Asian characters counted as two."""
    used = 0
    for index, character in enumerate(text):
        used += 2 if unicodedata.east_asian_width(character) in "WF" else not unicodedata.combining(character)
        if used > width:
            return text[:index]
    return text
