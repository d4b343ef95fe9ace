"""Names and numbers of runs as text that any terminal shows in the width that was counted. Pure.

What runs call their metrics is hostile: it must not move the cursor, colour the screen or push values out of it.
"""

from __future__ import annotations

import math
import time
import unicodedata

NUMBER_WIDTH = 10
"""Columns that a number may take: `-1.234e-05` fits."""

_MOST_MARKS = 4
"""Combining marks kept on one letter: no script needs more, and a name of nothing else has no width at all."""

_FORMULA = frozenset("=+-@\t\r")
"""First characters by which spreadsheets take a cell for a formula (OWASP, CSV injection)."""


def printable(text: str, unicode: bool = True) -> str:
    """`text` without control and formatting characters: `?` stands for each. unicode: else ASCII alone."""
    marks, kept = 0, []
    for character in text:
        shown = character if character.isprintable() else "?"
        marks = 0 if _columns_of(shown) else marks + 1
        if marks <= _MOST_MARKS:
            kept.append(shown)
    clean = "".join(kept)
    if unicode:
        return clean
    return clean.replace("–", "-").replace("…", "~").encode("ascii", "replace").decode("ascii")


def escaped(text: str) -> str:
    """`text` with each control or formatting character, and what is no Unicode text, as Python escapes it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def cell(text: str) -> str:
    """A name in a CSV file: escaped, and with an apostrophe before what a spreadsheet would compute."""
    clean = escaped(text)
    return f"'{clean}" if clean[:1] in _FORMULA else clean


def columns(text: str) -> int:
    """Columns of a terminal: wide East Asian characters take two, combining marks none."""
    return sum(map(_columns_of, text))


def _columns_of(character: str) -> int:
    if character < "\u0300":
        return 1
    if unicodedata.category(character) in ("Mn", "Me") or "\u1160" <= character <= "\u11ff":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fit(text: str, width: int) -> str:
    """The first `width` columns of `text`."""
    used = 0
    for index, character in enumerate(text):
        used += _columns_of(character)
        if used > width:
            return text[:index]
    return text


def shorten(text: str, width: int, unicode: bool = True) -> str:
    """`text` in at most `width` columns, an ellipsis for its middle: names differ at both ends."""
    if len(text) <= width and columns(text) <= width:
        return text
    head = fit(text, (width - 1) // 2)
    tail, used = "", 0
    for character in reversed(text):
        used += _columns_of(character)
        if used > width - 1 - columns(head):
            break
        tail = character + tail
    return head + ("…" if unicode else "~") + tail


def number_text(value: float) -> str:
    """A number in at most ten characters; `nan` and `inf` as such."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    text = f"{value:.4g}"
    return text if len(text) <= NUMBER_WIDTH else f"{value:.3g}"


def step_text(step: float) -> str:
    """A step in full where it is a whole number that a float holds exactly."""
    return str(int(step)) if abs(step) < 2**53 and step == int(step) else f"{step:.6g}"


def duration_text(seconds: float) -> str:
    """`12 s`, `5.5 min`, `3.2 h`, `2.1 d`."""
    for limit, unit, size in ((120.0, "s", 1.0), (7200.0, "min", 60.0), (172_800.0, "h", 3600.0)):
        if abs(seconds) < limit:
            return f"{number_text(float(f'{seconds / size:.3g}'))} {unit}"
    return f"{number_text(float(f'{seconds / 86_400:.3g}'))} d"


def clock_text(moment_s: float, with_date: bool = True) -> str:
    """Local time of a moment in unix seconds; a moment that no clock shows as a number."""
    try:
        return time.strftime("%m-%d %H:%M:%S" if with_date else "%H:%M:%S", time.localtime(moment_s))
    except (ValueError, OverflowError, OSError):
        return number_text(moment_s)
