"""Lines of an ingest file that differ in their numbers alone, read as one piece of JSON. Called by `points`.

Most lines that a trainer writes are such, and so they are read several times as fast as one by one.
"""

from __future__ import annotations

import json
import re
from array import array
from math import isfinite
from typing import Any, NamedTuple

from tuneplane.collect.columns import EXACT

_FEW = 8
"""Fewer lines are read one by one: that costs less than looking for their form."""

_OF_NUMBERS = b"0123456789.eE+-"
_KEY = re.compile(rb'"([^"\\]*)":')
_NUMERIC = frozenset((int, float))


class Alike(NamedTuple):
    """Points with the same metrics, in their order: line numbers, times, steps, and a column for each name."""

    numbers: list[int]
    times_s: array[float]
    steps: array[float]
    values: dict[str, array[float]]


def read_alike(data: bytes) -> tuple[list[Alike], list[bytes]]:
    """The points in `data`, which ends with a newline, and the lines that have to be read one by one."""
    count = data.count(b"\n")
    form = data[: data.find(b"\n") + 1].translate(None, _OF_NUMBERS)
    whole = _read(data, count) if data.translate(None, _OF_NUMBERS) == form * count else None
    if whole is not None:
        return [whole], []
    groups: dict[bytes, list[bytes]] = {}
    lines = data.split(b"\n")
    lines.pop()
    for line in lines:
        groups.setdefault(line.translate(None, _OF_NUMBERS), []).append(line)
    found: list[Alike] = []
    others: list[bytes] = []
    for group in groups.values():
        alike = _read(b"\n".join(group) + b"\n", len(group))
        if alike is None:
            others += group
        else:
            found.append(alike)
    return found, others


def _read(data: bytes, count: int) -> Alike | None:
    """All of `count` lines; None where they are not alike or not plain points.

    Turned into one flat list, each line gives as many items, and its keys stand at the same places: both are
    checked, so that no line is read as something that it does not say.
    """
    if count < _FEW or b"\\" in data:
        return None
    names = [name.decode("utf-8", "replace") for name in _KEY.findall(data[: data.index(b"\n")])]
    if names[:4] != ["n", "t", "s", "m"] or len(names) < 5 or len(set(names[4:])) < len(names) - 4:
        return None
    width = len(names) * 2 - 1  # a value for each key but `m`
    text = data.replace(b'":{"', b'","').replace(b"}}\n{", b",").replace(b'":', b'",')
    try:
        flat: list[Any] = json.loads((b"[" + text[1:-3] + b"]").decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    if len(flat) != width * count or not (data.startswith(b'{"') and data.endswith(b"}}\n")):
        return None
    key_places = [0, 2, 4, 6, *range(7, width, 2)]
    if any(flat[place::width].count(name) != count for place, name in zip(key_places, names, strict=True)):
        return None
    columns = [flat[place::width] for place in (1, 3, 5, *range(8, width, 2))]
    if not all(_NUMERIC.issuperset(map(type, column)) for column in columns):
        return None
    numbers, times, steps, *values = columns
    if set(map(type, numbers)) != {int} or min(numbers) < 0 or max(numbers) >= EXACT:
        return None
    try:
        alike = Alike(
            numbers,
            array("d", times),
            array("d", steps),
            {name: array("d", column) for name, column in zip(names[4:], values, strict=True)},
        )
    except OverflowError:
        return None
    return alike if isfinite(sum(alike.times_s)) and isfinite(sum(alike.steps)) else None
