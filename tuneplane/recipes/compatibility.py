"""Whether an experiment's lock still fits the catalog (C3).

A lock records, compatibility admits. Submit, `tp ls` and `tp recipe status` ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tuneplane import __version__
from tuneplane.kernel.errors import Fault, UsageError
from tuneplane.recipes.catalog import Catalog
from tuneplane.recipes.lock import LOCK_NAME, Lock, read_lock
from tuneplane.recipes.recipe import USER_MANAGED, Recipe

FAR_BEHIND_MINORS = 2
"""A lock of an older major version, or of more minor versions ago than this, gets advice."""


class LockStatus(str, Enum):
    CURRENT = "current"  # made against the very recipe that the catalog holds
    ADMITTED = "admitted"  # against another, and nothing that it bound has changed
    REFUSED = "refused"


@dataclass(frozen=True)
class LockState:
    """What a lock is worth today. faults: why it is refused. advice: sentences, where it is far behind."""

    status: LockStatus
    lock: Lock | None
    faults: tuple[Fault, ...] = ()
    advice: tuple[str, ...] = ()


def check_lock(lock: Lock, recipe: Recipe | None, experiment: str, where: str = LOCK_NAME) -> LockState:
    """The state of an experiment's lock; `recipe` is the catalog's of that name, None where it has none."""
    upgrade = f"tp recipe upgrade {experiment}"
    if recipe is None:
        what = f"the recipe {lock.recipe} is gone from the catalog"
        remedy = f"ask its publisher, or choose another: tp methods, then {upgrade} --method METHOD"
        return LockState(LockStatus.REFUSED, lock, (Fault(what, where, remedy),))
    differences = [*_differences(lock, recipe), *_core_too_old(lock)]
    if differences:
        faults = tuple(
            Fault(what, where, f"{upgrade} shows and records what changed") for what in differences
        )
        return LockState(LockStatus.REFUSED, lock, faults)
    advice = _advice(lock, recipe, upgrade)
    status = LockStatus.CURRENT if lock.digest == recipe.digest else LockStatus.ADMITTED
    return LockState(status, lock, (), tuple(advice))


def lock_state(folder: Path, catalog: Catalog) -> LockState:
    """The state of the lock in an experiment's folder.

    One that is missing or malformed is refused, and one whose recipe has a broken manifest.
    Raises OperationError where a file cannot be read.
    """
    path = folder / LOCK_NAME
    lock = None
    try:
        lock = read_lock(path)
        recipe = catalog.find(lock.recipe)
    except UsageError as error:
        return LockState(LockStatus.REFUSED, lock, error.faults)
    return check_lock(lock, recipe, folder.name, str(path))


def _differences(lock: Lock, recipe: Recipe) -> list[str]:
    """What the experiment bound and the recipe no longer has."""
    found = []
    if lock.entrypoint != recipe.entrypoint:
        found.append(
            f"the entrypoint was {lock.entrypoint.kind} {lock.entrypoint.value}, "
            f"{recipe.id} now has {recipe.entrypoint.kind} {recipe.entrypoint.value}"
        )
    for name, kind in lock.params.items():
        parameter = recipe.parameter(name)
        if parameter is None:
            if not recipe.free_parameters:
                found.append(f"the parameter {name} is gone from {recipe.id}")
        elif kind is not None and kind != parameter.type:
            found.append(f"the parameter {name} was {kind}, in {recipe.id} it is {parameter.type} now")
    if not _runtime_there(lock, recipe):
        has = ", ".join(runtime.id for runtime in recipe.runtimes)
        found.append(f"the runtime {lock.runtime_id} is gone from {recipe.id}, which has {has}")
    return found


def _runtime_there(lock: Lock, recipe: Recipe) -> bool:
    """Whether the locked runtime still exists. Where users bring their image there is none to lose."""
    if lock.runtime_id is None or lock.runtime_id in (runtime.id for runtime in recipe.runtimes):
        return True
    return recipe.user_managed and lock.framework_version in (None, USER_MANAGED)


def _unmet_core(lock: Lock) -> list[Any]:
    """The parts of `requires.core` that this TunePlane, its pre-releases counted as released, does not meet."""
    if not lock.requires_core:
        return []
    from packaging.specifiers import SpecifierSet

    ours = _released()
    return [part for part in SpecifierSet(lock.requires_core) if not part.contains(ours, prereleases=True)]


def _core_too_old(lock: Lock) -> list[str]:
    """A lock that asks for a newer TunePlane may mean what this one does not know; never an older one."""
    from packaging.version import InvalidVersion, Version

    for part in _unmet_core(lock):
        try:
            asked = Version(part.version.removesuffix(".*"))
        except InvalidVersion:  # `===` takes any text
            continue
        if part.operator in (">=", ">", "~=", "==", "===") and Version(_released()) <= asked:
            return [f"requires.core is {lock.requires_core}, this is tuneplane {__version__}: it is too old"]
    return []


def _advice(lock: Lock, recipe: Recipe, upgrade: str) -> list[str]:
    advice = []
    if lock.digest != recipe.digest and _far(lock.version, recipe.version):
        advice.append(
            f"locked to {recipe.id} {lock.version}, the catalog has {recipe.version}: {upgrade} when it suits"
        )
    if _unmet_core(lock):
        advice.append(
            f"requires.core is {lock.requires_core}, this is tuneplane {__version__}: {upgrade} when it suits"
        )
    return advice


def _far(locked: str, published: str) -> bool:
    """Whether two versions are so far apart that an owner should look; one that is no version is."""
    from packaging.version import InvalidVersion, Version

    try:
        old, new = Version(locked), Version(published)
    except InvalidVersion:
        return True
    return old > new or old.major != new.major or new.minor - old.minor > FAR_BEHIND_MINORS


def _released() -> str:
    """This TunePlane's version without dev and pre-release marks: 0.5.0.dev1 knows what 0.5 knows."""
    from packaging.version import Version

    return Version(__version__).base_version
