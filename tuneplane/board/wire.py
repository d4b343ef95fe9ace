"""How the board's answers are written: JSON that every browser reads, and columns of numbers as they are.

Called by `app`. A block of columns is: length of its head (uint32, little-endian), the head as JSON, zeros up to a
multiple of 8, then float64 columns one after the other, so that NaN and infinities arrive as what they are.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Iterable
from typing import Any

from tuneplane.board.lines import Drawn

MAX_TEXT = 2_000
"""Characters of one text that came from a run; a longer one is cut, and says so."""

MAX_DEPTH = 8


def encode(value: Any) -> bytes:
    """JSON in ASCII; numbers that JSON has no word for are the texts `nan`, `inf` and `-inf`."""
    return json.dumps(plain(value), separators=(",", ":"), allow_nan=False).encode("ascii")


def plain(value: Any, depth: int = 0) -> Any:
    """`value` as JSON has it, texts cut, nothing nested without end."""
    if value is None or isinstance(value, (bool, int)):
        # Beyond 53 bits a browser would round.
        return str(value) if isinstance(value, int) and abs(value) > 1 << 53 else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}… ({len(value)} characters)"
    if depth >= MAX_DEPTH:
        return "…"
    if isinstance(value, dict):
        return {str(plain(str(key))): plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, depth + 1) for inner in value]
    return plain(str(value))


def block(found: Iterable[tuple[str, str, Drawn]]) -> bytes:
    """Lines, each with the run and the metric that it is of."""
    heads: list[dict[str, Any]] = []
    columns: list[array[float]] = []
    for run, metric, line in found:
        heads.append(
            {
                "run": run,
                "metric": metric,
                "attempt": line.attempt,
                "total": line.total,
                "starts": line.starts,
                "points": len(line.steps),
                "means": len(line.mean_x),
            }
        )
        columns += [line.steps, line.values, line.times_s, line.mean_x, line.mean_y]
    head = encode({"lines": heads})
    parts = [len(head).to_bytes(4, "little"), head, bytes(-(4 + len(head)) % 8)]
    if sys.byteorder == "big":
        columns = [array("d", column) for column in columns]
        for column in columns:
            column.byteswap()
    return b"".join([*parts, *(column.tobytes() for column in columns)])
