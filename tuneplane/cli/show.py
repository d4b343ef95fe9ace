"""How `tp` prints: tables that fit any width, notices on standard error, JSON where asked."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import click

_OTHERS = re.compile(r"[^\n -~]")


def show_json(value: Any) -> None:
    """One JSON value on standard output, for programs; what is in it cannot move the cursor of a terminal."""
    text = json.dumps(_strict(value), indent=2, ensure_ascii=False, allow_nan=False, default=str)
    click.echo(_OTHERS.sub(lambda found: found[0] if found[0].isprintable() else _escape(found[0]), text))


def _strict(value: Any) -> Any:
    """NaN and infinities as words: JSON has no numbers for them, and its readers refuse Python's."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _strict(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(inner) for inner in value]
    return value


def _escape(character: str) -> str:
    """As JSON writes it in a string; the one control character that it leaves as it is, too."""
    return "\\u007f" if character == "\x7f" else json.dumps(character)[1:-1]


def show_notices(notices: Iterable[str]) -> None:
    """What the user should know, beside the result."""
    for notice in notices:
        click.echo(f"note: {notice}", err=True)


def show_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell; nothing is cut, so that it can be copied and searched."""
    if not rows:
        return
    cells = [list(headings), *([plain(cell) for cell in row] for row in rows)]
    widths = [max(columns_of(row[i]) for row in cells) for i in range(len(headings))]
    for row in cells:
        line = "  ".join(cell + " " * (w - columns_of(cell)) for cell, w in zip(row, widths, strict=True))
        click.echo(line.rstrip())


LEAST_LAST = 24
"""Columns of a terminal that a cut last cell must have to say anything; with fewer it has its own line."""


def show_listing(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> None:
    """A table for a terminal of `width` columns, its last cells cut with an ellipsis so that none wraps.

    Where less than `LEAST_LAST` columns are left for them, they stand below their rows. None: nothing is cut.
    """
    if width is None or not rows:
        return show_table(headings, rows)
    cells = [list(headings), *([plain(cell) for cell in row] for row in rows)]
    widths = [max(columns_of(row[i]) for row in cells) for i in range(len(headings) - 1)]
    before = sum(widths) + 2 * len(widths)
    below = width - before < LEAST_LAST
    for row in cells:
        columns = zip(row, widths, strict=False)
        line = "".join(cell + " " * (w - columns_of(cell) + 2) for cell, w in columns)
        if below:
            click.echo(line.rstrip())
            if row[-1] and row is not cells[0]:
                click.echo("  " + cut(row[-1], width - 2))
        else:
            click.echo((line + cut(row[-1], width - before)).rstrip())


def cut(text: str, width: int) -> str:
    """`text` in at most so many columns, an ellipsis for what is missing."""
    if columns_of(text) <= width:
        return text
    kept = ""
    for character in text:
        if columns_of(kept + character) > width - 1:
            break
        kept += character
    return kept.rstrip() + "…"


def terminal_width() -> int | None:
    """Columns of the terminal, or as `COLUMNS` says; None where the output goes to a file or a program."""
    import os
    import sys
    from shutil import get_terminal_size

    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        return None
    return get_terminal_size((80, 24)).columns


def show_fields(fields: Iterable[tuple[str, str]]) -> None:
    """`name  value` lines."""
    pairs = [(name, value) for name, value in fields if value]
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        click.echo(f"{name:<{width}}  {plain(value)}")


def size(count_bytes: float) -> str:
    """`512 B`, `1.2 GB` (powers of 1000, as disks are sold)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count_bytes < 1000:
            return f"{count_bytes:.0f} {unit}" if unit == "B" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1000
    return f"{count_bytes:.1f} TB"


def age(seconds: float) -> str:
    """`12 s`, `5 min`, `3 h`, `2 d`."""
    for limit, unit, step in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / step:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def clock(moment: float | None) -> str:
    """Local time of a moment in seconds since the epoch; empty for None."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) if moment else ""


def plain(text: str) -> str:
    """Without control characters: what a run is called must not move the cursor."""
    return "".join(c if c.isprintable() else " " for c in text)


def columns_of(text: str) -> int:
    """Columns of a terminal that a text takes: Chinese, Japanese and Korean characters take two."""
    from unicodedata import east_asian_width

    return sum(2 if east_asian_width(c) in "WF" else 1 for c in text)
