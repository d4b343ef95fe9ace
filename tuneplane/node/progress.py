"""How far an attempt came, and whether that is further than those before it: a chain without progress must end.

Called as an attempt ends (`outcome.py`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneplane.kernel.runfolder import RunFolder, is_hardware_file
from tuneplane.spec import JobSpec

TAIL_BYTES = 1 << 16
"""What is read of each ingest file: its last steps stand at its end."""

MOST_NAMES = 1000
"""Checkpoints that are remembered; a run that keeps more has the newest of them."""


@dataclass(frozen=True)
class Progress:
    """step: the highest that was reported, None where none was. checkpoints: their paths below the output
    folder. saved_at: the last change of any of them, seconds since the epoch.
    """

    step: float | None = None
    checkpoints: list[str] = field(default_factory=list)
    saved_at: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return {"step": self.step, "checkpoints": self.checkpoints, "saved_at": self.saved_at}


def recorded(end: Mapping[str, Any]) -> Progress:
    """The progress that an attempt's end record holds; none where there is no such record."""
    found = end.get("progress")
    if not isinstance(found, dict):
        return Progress()
    step, names = found.get("step"), found.get("checkpoints")
    return Progress(
        float(step) if isinstance(step, (int, float)) else None,
        [str(name) for name in names] if isinstance(names, list) else [],
    )


def has_progressed(now: Progress, before: Iterable[Progress], started_at: float) -> bool:
    """Whether an attempt that started at `started_at` came further than all before it.

    A step that none reached or a checkpoint that none had. Where no steps are reported, a checkpoint that it
    wrote anew counts too: a single file may be overwritten for ever.
    """
    earlier = list(before)
    steps = [p.step for p in earlier if p.step is not None]
    if now.step is not None and (not steps or now.step > max(steps)):
        return True
    known = {name for p in earlier for name in p.checkpoints}
    if any(name not in known for name in now.checkpoints):
        return True
    return now.step is None and now.saved_at > started_at


def read_progress(run: RunFolder, job: JobSpec, attempt: int) -> Progress:
    """What is there of attempt `attempt`: its own steps, and the run's checkpoints."""
    found: dict[str, float] = {}
    for output in job.spec.outputs:
        if output.name == "checkpoints":
            for path in _below(run.out, output.path):
                with suppress(OSError):
                    changed_at = _changed_at(path)
                    if changed_at is not None:
                        found[path.relative_to(run.out).as_posix()] = changed_at
    newest = sorted(found, key=found.__getitem__)[-MOST_NAMES:]
    steps = [step for path in _ingest_files(run, attempt) for step in _last_steps(path)]
    return Progress(max(steps, default=None), sorted(newest), max(found.values(), default=0.0))


def _below(folder: Path, pattern: str) -> Iterable[Path]:
    try:
        return sorted(folder.glob(pattern))
    except (OSError, ValueError, NotImplementedError):  # the last: an absolute pattern, to pathlib
        return []


def _changed_at(path: Path) -> float | None:
    """The last change of a checkpoint: of the file, or of what lies directly in the folder; None: it is empty."""
    if not path.is_dir() or path.is_symlink():
        return path.lstat().st_mtime
    with os.scandir(path) as entries:
        return max((entry.stat(follow_symlinks=False).st_mtime for entry in entries), default=None)


def _ingest_files(run: RunFolder, attempt: int) -> list[Path]:
    try:
        found = run.ingest.glob(f"{attempt}-*.jsonl")
        return [path for path in found if not path.is_symlink() and not is_hardware_file(path.name)]
    except OSError:
        return []


def _last_steps(path: Path) -> Iterable[float]:
    """The steps in an ingest file's tail; lines that are torn or none of ours are passed over."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).splitlines()
    except OSError:
        return
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        step = value.get("s") if isinstance(value, dict) else None
        if isinstance(step, (int, float)) and math.isfinite(step):
            yield float(step)
