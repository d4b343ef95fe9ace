"""Reads what wandb's client wrote offline: its records, by its own messages."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32_768
_HEADER = 7
_WHOLE, _FIRST, _LAST = 1, 2, 4


def offline_runs(folder: Path) -> list[Path]:
    """The folders of offline runs below `folder`, oldest first."""
    return sorted((folder / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime_ns)


def read_run(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, str]]:
    """Config, rows of history, and the step metric by glob of one offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    config: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    axes: dict[str, str] = {}
    (file,) = folder.glob("*.wandb")
    for data in _records(file.read_bytes()):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            config |= {
                "id": record.run.run_id,
                "name": record.run.display_name,
                "group": record.run.run_group,
            }
            config |= {"project": record.run.project, "entity": record.run.entity}
        elif kind == "history":
            items = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            history.append(items)
        elif kind == "metric" and record.metric.glob_name:
            axes[record.metric.glob_name] = record.metric.step_metric
    return config, history, axes


def _records(data: bytes) -> Iterator[bytes]:
    """LevelDB's log format, as wandb's transaction log is; a record that was cut ends it."""
    place, parts = _HEADER, b""
    while place + _HEADER <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        body = data[place + _HEADER : place + _HEADER + size]
        if not kind or len(body) < size:
            return
        place += _HEADER + size
        parts = body if kind in (_WHOLE, _FIRST) else parts + body
        if kind in (_WHOLE, _LAST):
            yield parts
