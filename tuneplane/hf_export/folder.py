"""A folder of weights that appears whole: written beside its place, named at the end, with a record of its origin.

The hook `saves` and the export program write by it; readers trust a folder that has a record.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuneplane.kernel.files import write_atomic

EXPORT, ADAPTER = "hf_export", "adapter"
"""Below a run's output folder: a model that loads by itself (C13), and LoRA weights of the end of a training."""

FINAL = "final"
"""The source of weights of a training that ended."""

RECORD = "tuneplane_export.json"
SCHEMA = "tuneplane/hf-export/v1"

ABANDONED_S = 24 * 3600.0
"""A folder that is still being written after so long was left by a process that is gone."""


@dataclass(frozen=True)
class Origin:
    """What weights were made from. source: `final` of a training that ended, `adapter`, or a checkpoint's name."""

    source: str
    step: int  # optimiser steps done
    run_id: str = ""
    attempt: int = 0
    merged: bool = False  # LoRA weights merged into their base model
    made_at: float = 0.0  # seconds since the epoch


@contextmanager
def written_whole(place: Path, origin: Origin) -> Iterator[Path]:
    """A new folder to fill; on a clean end it takes the place of what is at `place`, with its record.

    Where the body raises, what was at `place` stays, and nothing is left beside it. Raises OSError.
    """
    _remove_abandoned(place)
    new = place.with_name(f".{place.name}.{os.getpid()}-{os.urandom(4).hex()}")
    new.mkdir(parents=True)
    try:
        yield new
        write_record(new, origin)
        _put(new, place)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def write_record(folder: Path, origin: Origin) -> None:
    """Write what the weights in `folder` were made from. Raises OSError."""
    record = {"schema": SCHEMA, **asdict(origin), "made_at": origin.made_at or time.time()}
    write_atomic(folder / RECORD, json.dumps(record, indent=2) + "\n")


def read_origin(folder: Path) -> Origin | None:
    """What the weights in `folder` were made from; None where it has no record that can be read."""
    try:
        found: Any = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return Origin(
            source=str(found["source"]),
            step=int(found["step"]),
            run_id=str(found["run_id"]),
            attempt=int(found["attempt"]),
            merged=bool(found["merged"]),
            made_at=float(found["made_at"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _put(new: Path, place: Path) -> None:
    old = new.with_name(f"{new.name}.old")
    if place.is_symlink():
        place.unlink()
    elif place.exists():
        place.rename(old)
    new.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _remove_abandoned(place: Path) -> None:
    if not place.parent.is_dir():
        return
    for other in place.parent.glob(f".{place.name}.*"):
        try:
            if time.time() - other.lstat().st_mtime > ABANDONED_S:
                shutil.rmtree(other, ignore_errors=True)
        except OSError:
            continue
