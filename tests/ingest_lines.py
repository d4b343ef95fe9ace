"""A reader of ingest files that shares nothing with `tuneplane.collect`: JSON, a line at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Every line of one file that is a JSON object; what was torn is passed over."""
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def points(folder: Path) -> list[tuple[float, dict[str, float]]]:
    """Step and numbers of every point, by file and number. A line that stands there twice has one number."""
    found: list[tuple[float, dict[str, float]]] = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = {record["n"]: record for record in records(path) if "m" in record}
        found += [(lines[number]["s"], lines[number]["m"]) for number in sorted(lines)]
    return found


def dropped(folder: Path) -> int:
    """How many points the files say were dropped."""
    told = 0
    for path in folder.glob("*.jsonl"):
        told += max((record["d"]["points"] for record in records(path) if "d" in record), default=0)
    return told
