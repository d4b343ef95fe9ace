"""Cheap looks into a run's folders: was anything reported, is there a checkpoint, does a link lead out."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from tuneplane.diagnose.evidence import Outputs, Points, Space
from tuneplane.diagnose.traces import cut
from tuneplane.kernel.runfolder import is_hardware_file

HEADER_BYTES = 64 << 10
MOST_FILES = 200
MOST_ENTRIES = 2000
"""Entries of output folders that are looked at: a run may leave a million files."""


def read_points(folder: Path, run_id: str, token_sha256: str) -> Points:
    """Whether the ingest folder has a point of this run's training. Raises OSError where it cannot be listed."""
    files, points, refused, newest = 0, False, "", None
    with os.scandir(folder) as entries:
        regular = [e for e in entries if e.name.endswith(".jsonl") and e.is_file(follow_symlinks=False)]
    names = [entry for entry in regular if not is_hardware_file(entry.name)]
    for entry in names[:MOST_FILES]:
        files += 1
        age = max(0.0, time.time() - entry.stat().st_mtime)
        newest = age if newest is None else min(newest, age)
        if not points:
            points, why = _has_points(Path(entry.path), run_id, token_sha256)
            refused = refused or why
    return Points(files, points, refused, newest)


def _has_points(path: Path, run_id: str, token_sha256: str) -> tuple[bool, str]:
    """Whether a file has a point of this run, or why it is refused, as `collect` refuses it."""
    try:
        with path.open("rb") as file:
            lines = file.read(HEADER_BYTES).split(b"\n")
        header = json.loads(lines[0])
        if header.get("run_id") != run_id:
            return False, f"{path.name} is of another run"
        if token_sha256 and header.get("token_sha256") != token_sha256:
            return False, f"{path.name}: its token is not this run's"
    except (OSError, ValueError, AttributeError) as error:
        return False, f"{path.name}: {error}"
    return any(b'"m"' in line for line in lines[1:]), ""


def read_outputs(out: Path) -> Outputs:
    """What stands in the output folder. Raises OSError where it cannot be listed."""
    root = os.path.realpath(out)
    names: list[str] = []
    outside: list[str] = []
    checkpoints = seen = 0
    queue = [out]
    while queue and seen < MOST_ENTRIES:
        folder = queue.pop(0)
        try:
            with os.scandir(folder) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in listed:
            seen += 1
            relative = os.path.relpath(entry.path, out)
            if folder == out:
                names.append(cut(entry.name, 80))
            if entry.is_symlink():
                real = os.path.realpath(entry.path)
                if os.path.commonpath([root, real]) != root:
                    outside.append(f"{relative} -> {real}")
                    continue
            if folder == out / "checkpoints" and entry.name != "README.md":  # the card that TRL puts there
                checkpoints += 1
            if entry.is_dir(follow_symlinks=False) and len(Path(relative).parts) < 3:
                queue.append(Path(entry.path))
            if seen >= MOST_ENTRIES:
                break
    return Outputs(tuple(names[:40]), checkpoints, tuple(outside[:10]))


def read_space(name: str, folder: Path) -> Space:
    """Raises OSError where the folder is not there."""
    status = os.statvfs(folder)
    unit = status.f_frsize
    return Space(name, status.f_bavail * unit, status.f_blocks * unit, status.f_favail, status.f_files)
