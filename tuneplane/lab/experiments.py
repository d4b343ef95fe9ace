"""The experiments of a lab: listing them, making a new one from a method's scaffold, finding the entrypoint.

`tp ls`, `tp new`, `tp recipe status` and submit call it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.lab.marker import Lab
from tuneplane.recipes.catalog import Catalog, ScaffoldFile
from tuneplane.recipes.compatibility import LockState, LockStatus, lock_state
from tuneplane.recipes.lock import LOCK_NAME, Lock, lock_of, write_lock
from tuneplane.recipes.names import remedy_for

NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
LONGEST_NAME = 128
"""A run id is the name and 21 more characters, and a file system takes 255 bytes, our suffixes included."""


@dataclass(frozen=True)
class Experiment:
    """One experiment as `tp ls` shows it. method: empty where its lock does not tell."""

    name: str
    path: Path
    method: str
    state: LockState


def check_name(name: str) -> None:
    """Return where `name` can be an experiment's; raise UsageError where it cannot (C1)."""
    if not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise UsageError(
            Fault(
                f"{name[: LONGEST_NAME + 1]!r} is not a name for an experiment",
                "",
                "lower-case letters, digits, '.', '_' and '-', starting with a letter or digit, "
                f"at most {LONGEST_NAME}",
            )
        )


def experiment_names(lab: Lab) -> list[str]:
    """The names of the experiments, sorted: every folder below experiments/ that is not hidden.

    Raises OperationError.
    """
    try:
        return sorted(p.name for p in lab.experiments.iterdir() if not p.name.startswith(".") and p.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise OperationError(Fault(f"cannot be read: {error.strerror}", str(lab.experiments))) from None


def find_experiment(lab: Lab, name: str) -> Path:
    """The folder of an experiment. Raises UsageError: a bad name, or no such experiment (with the nearest)."""
    check_name(name)
    folder = lab.experiments / name
    if not folder.is_dir():
        known = experiment_names(lab)
        remedy = remedy_for(name, known, "tp ls lists the experiments")
        raise UsageError(Fault(f"there is no experiment {name}", str(lab.experiments), remedy))
    return folder


def list_experiments(lab: Lab, catalog: Catalog) -> list[Experiment]:
    """Every experiment with its method and what its lock is worth today (`tp ls`, `tp recipe status`)."""
    return [_experiment(lab.experiments / name, catalog) for name in experiment_names(lab)]


def _experiment(folder: Path, catalog: Catalog) -> Experiment:
    try:
        state = lock_state(folder, catalog)
    except OperationError as error:  # one that cannot be read hides no other
        state = LockState(LockStatus.REFUSED, None, error.faults)
    return Experiment(folder.name, folder, state.lock.recipe if state.lock else "", state)


def new_experiment(lab: Lab, name: str, method: str, catalog: Catalog) -> Path:
    """Make `experiments/NAME/` from the method's scaffold, with its lock; whole or not at all (C1).

    Raises UsageError with all that is wrong: a bad name, a folder that exists, an unknown method (with the
    nearest); OperationError where the machine refused.
    """
    faults: list[Fault] = []
    target = lab.experiments / name
    try:
        check_name(name)
        if os.path.lexists(target):
            faults.append(_exists(target))
    except UsageError as error:
        faults.extend(error.faults)
    try:
        recipe = catalog.get(method)
        scaffold = catalog.scaffold(recipe)
    except UsageError as error:
        raise UsageError(*faults, *error.faults) from None
    if faults:
        raise UsageError(*faults)
    if lab.experiments.is_symlink():  # an experiment elsewhere is not in the lab's commits
        raise UsageError(Fault("experiments is a link", str(lab.experiments), "make it a folder of the lab"))
    half = lab.experiments / f".new-{secrets.token_hex(6)}"
    try:
        lab.experiments.mkdir(exist_ok=True)
        half.mkdir()
        _write_files(half, scaffold.filled(name, method))
        write_lock(half / LOCK_NAME, lock_of(recipe, scaffold.digest))
        _move(half, target)
    except OSError as error:
        where = str(error.filename or target)
        raise OperationError(Fault(f"no experiment was made: {error.strerror or error}", where)) from None
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return target


def _exists(target: Path) -> Fault:
    return Fault(
        f"{target} exists, and nothing is overwritten", "", "choose another name, or remove it first"
    )


def _write_files(folder: Path, files: tuple[ScaffoldFile, ...]) -> None:
    for file in files:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
        if file.executable:  # for whoever may read it, as the umask says
            mode = path.stat().st_mode
            path.chmod(mode | (mode & 0o444) >> 2)


def _move(half: Path, target: Path) -> None:
    """Give a finished folder its name. Taking the name is exclusive: of two at once, one is refused."""
    try:
        target.mkdir()
    except FileExistsError:
        raise UsageError(_exists(target)) from None
    try:
        half.rename(target)  # replaces the empty folder that we just made, in one step
    except OSError:
        target.rmdir()
        raise


def find_entrypoint(lab: Lab, experiment: str, lock: Lock, adapter: str = "custom") -> Path:
    """The experiment's entry as a path below the lab's root, links not resolved (C4).

    It is a file by the very name that the lock holds; a link counts where it stays in the experiment's
    folder. Raises UsageError.
    """
    folder = lab.experiments / experiment
    path = folder / lock.entrypoint.value
    try:
        inside = lab.root.resolve(strict=True) / "experiments" / experiment
        real = path.resolve(strict=True)
        found = folder.resolve(strict=True) == inside and real.is_relative_to(inside) and real.is_file()
    except (OSError, RuntimeError, ValueError):  # RuntimeError: a loop of links; ValueError: a NUL
        found = False
    if not found or ".." in Path(lock.entrypoint.value).parts:
        raise UsageError(
            Fault(
                f"{adapter} entrypoint is missing or escapes the experiment directory",
                str(path),
                f"the entry of {experiment} is the file {lock.entrypoint.value} in its own folder: "
                "give it that name, and no link that leads out",
            )
        )
    return path
