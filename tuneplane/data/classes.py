"""Data that is folders of classes, looked at before the queue: the parts there must be, the same classes in each.

`check.py` asks, where a binding declares `class_folders`. No file is opened: the trainer does that, in all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tuneplane.kernel.errors import Fault

MOST_NAMED = 5


def class_faults(path: Path, parts: Sequence[str], name: str) -> list[Fault]:
    """What keeps `path` from having each of `parts` with a folder for each class. name: of the binding."""
    faults: list[Fault] = []
    found: dict[str, list[str]] = {}
    for part in parts:
        folder = path / part
        try:
            classes = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
        except OSError as error:
            what = f"{name} has no readable folder {part}: {error.strerror}"
            faults.append(Fault(what, str(path), f"it holds {', '.join(f'{p}/<class>/*' for p in parts)}"))
            continue
        if not classes:
            faults.append(Fault(f"{name} has no class", str(folder), "each class is a folder in it"))
            continue
        found[part] = classes
        empty = [one for one in classes if not _holds_files(folder / one)]
        if empty:
            faults.append(
                Fault(f"{name} has nothing of {_named(empty)}", str(folder), "add files, or remove it")
            )
    for part, classes in found.items():
        for other, there in found.items():
            alone = sorted({*classes} - {*there})
            if alone:
                what = f"{name} has {_named(alone)} in {part} and not in {other}"
                faults.append(Fault(what, str(path), "the classes must be the same"))
    return faults


def _holds_files(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(not entry.name.startswith(".") for entry in entries)
    except OSError:  # the trainer says so, of each file
        return True


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"class {', '.join(map(repr, names[:MOST_NAMED]))}{more}"
