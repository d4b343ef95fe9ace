"""Which files a data set on disk consists of, as `datasets.load_dataset` finds them. `check.py` asks."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tuneplane.data.rows import FILE
from tuneplane.kernel.errors import Fault

MOST_FILES = 10_000

FORMATS = ".jsonl, .json or .parquet"

HELD_OUT = re.compile(
    r"(?:^|[-_./ 0-9])(test|testing|eval|evaluation|val|valid|validation|dev)(?=[-_./ 0-9]|$)", re.I
)
"""Files that load_dataset takes for a split to evaluate on (datasets.data_files)."""

_SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")
_PATTERN = re.compile(r"[][*?]")


def data_files(path: Path, name: str) -> tuple[list[Path], list[Fault]]:
    """The data files at `path`, sorted, and what keeps it from being a data set. name: of the binding."""
    where = str(path)
    if path.is_file():
        if FILE.search(path.name):
            return [path], []
        return [], [Fault(f"{name} is none of {FORMATS}", where, "convert it: a row a line, as JSON")]
    if not path.is_dir():
        return [], [
            Fault(f"{name} is neither a file nor a folder", where, "name a file, or a folder of them")
        ]
    if FILE.search(path.name):
        return [], [Fault(f"{name} is a folder that is called like a file", where, "rename it")]
    found: list[Path] = []
    others: list[str] = []
    for folder, folders, names in os.walk(path, followlinks=True):
        folders[:] = sorted(f for f in folders if not f.startswith((".", "__")) and not _leads_up(folder, f))
        for file in sorted(names):
            if FILE.search(file) and file not in _SAVED and not file.startswith((".", "__")):
                found.append(Path(folder, file))
            else:
                others.append(file)
        if len(found) + len(others) > MOST_FILES:
            break
    if "state.json" in others or "dataset_dict.json" in others:
        remedy = "load_from_disk(…).to_json(…) writes what can be trained on"
        return [], [
            Fault(f"{name} was written by save_to_disk, which load_dataset does not read", where, remedy)
        ]
    if not found:
        has = f"it has {', '.join(others[:5])}" if others else "it is empty"
        return [], [Fault(f"{name} has no file of {FORMATS}", where, has)]
    if _PATTERN.search(where):
        remedy = "rename it, or name one file in it"
        return found, [
            Fault(f"{name}: datasets reads [ ] * ? in a folder's path as a pattern", where, remedy)
        ]
    return found, []


def _leads_up(folder: str, name: str) -> bool:
    """Whether a folder in `folder` is a link to one that holds it: walking it has no end."""
    path = Path(folder, name)
    return path.is_symlink() and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path))


def described(path: Path) -> bool:
    """Whether a folder has a card that says which of its files are the data."""
    card = path / "README.md"
    try:
        if not card.is_file():  # a pipe would be waited for
            return False
        with card.open(encoding="utf-8", errors="replace") as file:
            head = file.read(100_000)
    except OSError:
        return False
    return bool(re.match(r"---\s*\n(.*\n)*?configs:", head))
