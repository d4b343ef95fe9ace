"""The lab and its marker `tuneplane.yaml`: finding it from below, reading it, and founding a new lab.

Every command that works on an experiment starts with `find_lab`; `tp init` calls `init_lab`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.kernel.files import write_atomic
from tuneplane.recipes.documents import read_document
from tuneplane.recipes.fields import Fields

MARKER = "tuneplane.yaml"
API_VERSION = "tuneplane/project/v1"
GIT_TIMEOUT_S = 60

GITIGNORE = """\
# What never belongs into a run.
__pycache__/
*.pyc
.venv/
.ipynb_checkpoints/
.DS_Store

# Secrets. tp leaves *.key and secrets.env out of every capsule even where they are committed.
*.key
secrets.env
.env

# What trainers leave behind when they are started by hand.
outputs/
wandb/

# What `tp job export-metrics` leaves here: named by run.
*-[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]-[0-9][0-9][0-9][0-9][0-9][0-9]-????.csv
*-[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]-[0-9][0-9][0-9][0-9][0-9][0-9]-????.jsonl
*-[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]-[0-9][0-9][0-9][0-9][0-9][0-9]-????.tensorboard/
"""


@dataclass(frozen=True)
class Lab:
    """A lab. root: absolute and without links."""

    root: Path
    name: str

    @property
    def marker(self) -> Path:
        return self.root / MARKER

    @property
    def experiments(self) -> Path:
        return self.root / "experiments"

    @property
    def configs(self) -> Path:
        return self.root / "configs"

    @property
    def common(self) -> Path:
        return self.root / "common"


@dataclass(frozen=True)
class Founded:
    """What `init_lab` did. written: what it made, the marker last.

    git: `made`, `there` (the lab lies in a repository already) or `missing` (no git on this machine).
    """

    lab: Lab
    written: tuple[Path, ...]
    git: str


def find_lab(start: Path) -> Lab:
    """The lab around a folder: the nearest folder, going up, that holds the marker.

    Raises UsageError where there is none, or the marker is malformed (with its line).
    """
    root = marked_folder(start)
    if root is None:
        raise UsageError(
            Fault(
                f"no lab here: neither this folder nor one above it holds {MARKER}",
                str(start),
                "cd into a lab, or make one: tp init LAB",
            )
        )
    return Lab(root, read_marker(root / MARKER))


def marked_folder(start: Path) -> Path | None:
    """The nearest folder from `start` upward that holds a marker, whatever the marker says."""
    folder = start.resolve()
    for place in (folder, *folder.parents):
        if os.path.lexists(place / MARKER):
            return place
    return None


def read_marker(path: Path) -> str:
    """The lab's name. Keys that are not ours are read over. Raises UsageError, OperationError."""
    fields = Fields(read_document(path))
    marker = fields.mapping(fields.document.value, ())
    name = ""
    if marker is not None:
        fields.one_of(marker, ("apiVersion",), (API_VERSION,))
        name = fields.text(marker, ("name",))
        if name and not name.isprintable():
            fields.fault(("name",), f"name {name!r} holds characters that cannot be printed")
    if fields.faults:
        remedy = f"a marker reads: apiVersion: {API_VERSION}, and name: NAME"
        raise UsageError(*(Fault(f.what, f.where, f.remedy or remedy) for f in fields.faults))
    return name


def init_lab(path: Path, name: str | None = None) -> Founded:
    """Make a lab at `path`: the marker, experiments/, configs/, common/, .gitignore, and a git repository.

    What is there already stays as it is. All that was made goes again where something fails.
    name: the folder's own where not given. Raises UsageError: a lab is there or around it, or the name is
    bad; OperationError: the machine refused.
    """
    root = path.resolve()
    around = marked_folder(root)
    if around is not None:
        what = f"{around} is a lab already" if around == root else f"{root} lies inside the lab {around}"
        remedy = "make experiments in it: tp new NAME" if around == root else "a lab inside a lab is refused"
        raise UsageError(Fault(what, str(path), remedy))
    if os.path.lexists(root) and not root.is_dir():
        raise UsageError(Fault(f"{root} is not a folder", str(path)))
    chosen = _folder_name(root) if name is None else name
    if not chosen.strip() or not chosen.isprintable():
        raise UsageError(Fault(f"{chosen!r} is not a name for a lab", "--name", "choose a printable one"))
    marker = f"apiVersion: {API_VERSION}\nname: {json.dumps(chosen, ensure_ascii=False)}\n"
    made: list[Path] = []
    try:
        _make_folder(root, made)
        for folder in ("experiments", "configs", "common"):
            _make_folder(root / folder, made)
            if not any((root / folder).iterdir()):  # git keeps no empty folder
                _make_file(root / folder / ".gitkeep", "", made)
        if not os.path.lexists(root / ".gitignore"):
            _make_file(root / ".gitignore", GITIGNORE, made)
        git = _run_git_init(root, made)
        _make_file(root / MARKER, marker, made)
    except OSError as error:
        _undo(made)
        raise OperationError(
            Fault(f"no lab was made: {error.strerror or error}", str(error.filename or root))
        ) from None
    except BaseException:
        _undo(made)
        raise
    return Founded(Lab(root, chosen), tuple(made), git)


def _folder_name(root: Path) -> str:
    """The folder's name as a lab's name: whatever cannot be printed or written as UTF-8 becomes `_`."""
    return "".join(c if c.isprintable() else "_" for c in root.name).strip() or "lab"


def _make_folder(path: Path, made: list[Path]) -> None:
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for folder in reversed(missing):
        folder.mkdir()
        made.append(folder)


def _make_file(path: Path, text: str, made: list[Path]) -> None:
    write_atomic(path, text)
    made.append(path)


def _run_git_init(root: Path, made: list[Path]) -> str:
    """Make a repository where the lab lies in none."""
    if any(os.path.lexists(place / ".git") for place in (root, *root.parents)):
        return "there"
    git = shutil.which("git")
    if git is None:
        return "missing"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    made.append(root / ".git")
    done = subprocess.run(
        [git, "init", "--quiet", "."],
        cwd=root,
        env=environment,
        capture_output=True,
        timeout=GIT_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        words = done.stderr.decode("utf-8", "replace").strip()
        raise OperationError(Fault(f"git init failed: {words}", str(root)))
    return "made"


def _undo(made: list[Path]) -> None:
    """Take away what was made, newest first; a folder that something else lies in stays."""
    for path in reversed(made):
        if path.name == ".git":
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_dir():
            try:
                path.rmdir()
            except OSError:
                continue
        else:
            path.unlink(missing_ok=True)
