"""What lies in a run's `checkpoints` as an attempt is claimed: noted once, so that all nodes resume alike.

The claim calls `list_checkpoints`, the agent `noted_checkpoints`; which is complete, the recipe's adapter says.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from tuneplane.recipes.adapters import Checkpoint

MOST, MOST_FILES = 1000, 1000
"""More than any trainer keeps: of a folder with more, the last ones by name count."""


def list_checkpoints(out: Path) -> list[dict[str, Any]]:
    """Folders below `<out>/checkpoints` with the names of what each holds, in order of name; links are none.

    What cannot be read is left out: a trainer that wants it fails with a better message of its own.
    """
    folder = out / "checkpoints"
    if folder.is_symlink():
        return []
    names = sorted((name for name in _names(folder) if _is_folder(folder / name)), key=natural)
    return [{"name": name, "files": sorted(_names(folder / name))[:MOST_FILES]} for name in names[-MOST:]]


def noted_checkpoints(noted: object, out: Path) -> tuple[Checkpoint, ...]:
    """What `list_checkpoints` found, of the attempt's note. Empty for an attempt of an earlier version."""
    if not isinstance(noted, list):
        return ()
    folder = out / "checkpoints"
    return tuple(
        Checkpoint(entry["name"], str(folder / entry["name"]), tuple(entry["files"])) for entry in noted
    )


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts `step-9` before `step-10`."""
    # not isdigit(): "²" is a digit to that, and none to int()
    parts = re.findall(r"([0-9]+)|([^0-9]+)", name)
    return [(int(number), "") if number else (-1, text) for number, text in parts]


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir() and not path.is_symlink()
    except OSError:
        return False


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
