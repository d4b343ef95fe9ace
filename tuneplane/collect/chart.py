"""A chart in plain text, for terminals of any kind: braille dots, or characters where there is no UTF-8. Pure.

Each column of dots shows the smallest and the largest value of its steps, so that no spike is lost to drawing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from tuneplane.collect.canvas import Bucket, Canvas, Stretches
from tuneplane.collect.printable import NUMBER_WIDTH, fit, number_text, step_text

MIN_WIDTH = 24

COLOURS = ("36", "33", "35", "32", "34", "31")
"""Of lines side by side (ECMA-48): cyan, yellow, magenta, green, blue, red."""

_FAINT = "2"


@dataclass(frozen=True)
class Look:
    """What the terminal can, and how large a chart may be: columns, and lines with title and axis."""

    width: int = 80
    height: int = 16
    unicode: bool = True
    colours: bool = False


@dataclass(frozen=True)
class Line:
    """One line of a chart, its x ascending; a value that is no finite number breaks it.

    mark: a character that tells it from others where there is no colour; empty where it is alone.
    colour: which of `COLOURS`; None for the terminal's own. faint: said, but not to be in the way.
    """

    x: Sequence[float]
    y: Sequence[float]
    mark: str = ""
    colour: int | None = None
    faint: bool = False


@dataclass(frozen=True)
class Axis:
    """The lower edge. text: of a value there; word: what it counts; ticks: places that are marked, and how."""

    text: Callable[[float], str] = step_text
    word: str = "step "
    ticks: Sequence[tuple[float, str]] = ()


def draw(lines: Sequence[Line], look: Look, axis: Axis | None = None, log: bool = False) -> list[str]:
    """`lines` in at most `look.width` columns and `look.height` lines of text: plot, axis, range of x.

    log: by powers of ten; what is not positive is not drawn. No text where there is no value to draw.
    """
    axis = axis or Axis()
    columns = max(look.width, MIN_WIDTH) - NUMBER_WIDTH - 2
    rows = max(1, look.height - 2)
    scaled = [[_scaled(value, log) for value in line.y] for line in lines]
    finite = [value for values in scaled for value in values if math.isfinite(value)]
    if not finite:
        return []
    low, high = min(finite), max(finite)
    first = min(line.x[0] for line in lines if len(line.x))
    last = max(line.x[-1] for line in lines if len(line.x))
    canvas = Canvas(columns, rows, look.unicode)
    ways = [
        _buckets(line.x, values, first, last, canvas.width)
        for line, values in zip(lines, scaled, strict=True)
    ]
    for index in sorted(range(len(lines)), key=lambda index: not lines[index].faint):
        canvas.draw(index, ways[index], low, high, lines[index].faint)
    for index, line in enumerate(lines):
        if line.mark:
            canvas.mark(index, line.mark, ways[index], low, high, 5 * index)

    tick, wall = ("┤", "│") if look.unicode else ("+", "|")
    labels = _labels(low, high, rows, log)
    glyphs = [line.mark or ("." if line.faint else "*") for line in lines]
    text = [
        f"{labels.get(row, ''):>{NUMBER_WIDTH}} {tick if row in labels else wall}{_row(cells, lines, look)}"
        for row, cells in enumerate(canvas.cells(glyphs))
    ]
    return [line.rstrip() for line in [*text, *_axis(axis, first, last, columns, look)]]


def styled(text: str, line: Line, look: Look) -> str:
    """`text` as the line itself is coloured."""
    if not look.colours or not text:
        return text
    colour = [COLOURS[line.colour % len(COLOURS)]] if line.colour is not None else []
    codes = ";".join([_FAINT] * line.faint + colour)
    return f"\x1b[{codes}m{text}\x1b[0m" if codes else text


def _row(cells: list[tuple[str, int]], lines: Sequence[Line], look: Look) -> str:
    parts = []
    for owner, group in groupby(cells, key=lambda cell: cell[1]):
        text = "".join(character for character, _ in group)
        parts.append(text if owner < 0 else styled(text, lines[owner], look))
    return "".join(parts)


def _axis(axis: Axis, first: float, last: float, columns: int, look: Look) -> list[str]:
    corner, flat, stop = ("└", "─", "┴") if look.unicode else ("+", "-", "^")
    edge = [flat] * columns
    free = 0
    for place, text in sorted(axis.ticks):
        column = round((place - first) / (last - first) * (columns - 1)) if last > first else 0
        if free <= column and column + len(text) < columns:
            edge[column : column + 1 + len(text)] = [stop, *text]
            free = column + len(text) + 2
    left, right = axis.word + axis.text(first), axis.text(last)
    gap = max(1, columns - len(left) - len(right))
    texts = left + " " * gap + right if last > first else left
    return [
        " " * (NUMBER_WIDTH + 1) + corner + "".join(edge),
        fit(" " * (NUMBER_WIDTH + 2) + texts, max(look.width, MIN_WIDTH)),
    ]


def _scaled(value: float, log: bool) -> float:
    if not log or not math.isfinite(value):
        return value
    return math.log10(value) if value > 0 else math.nan


def _labels(low: float, high: float, rows: int, log: bool) -> dict[int, str]:
    """Values at the left edge by row: top, bottom, and the middle where there is room."""

    def text(value: float) -> str:
        return number_text(10.0 ** min(value, 308.0) if log else value)

    if low == high:
        return {rows // 2: text(low)}
    labels = {0: text(high), rows - 1: text(low)}
    if rows >= 7 and rows % 2:
        labels[rows // 2] = text(low / 2 + high / 2)
    return labels


def _buckets(
    xs: Sequence[float], values: Sequence[float], first: float, last: float, width: int
) -> Stretches:
    """Stretches of columns with values; a value that is not finite ends a stretch."""
    stretches: list[list[tuple[int, Bucket]]] = [[]]
    scale = (width - 1) / (last - first) if last > first else 0.0
    for x, value in zip(xs, values, strict=True):
        stretch = stretches[-1]
        if not math.isfinite(value):
            if stretch:
                stretches.append([])
            continue
        column = min(width - 1, int((x - first) * scale + 0.5)) if scale else width // 2
        if stretch and stretch[-1][0] == column:
            stretch[-1][1].add(value)
        else:
            stretch.append((column, Bucket(value)))
    return stretches
