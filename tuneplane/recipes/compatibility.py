"""Whether an experiment's lock still fits the catalog, and what an upgrade would change (C3).

A lock records, compatibility admits. Submit, `tp ls`, `tp recipe status` and `tp recipe upgrade` ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tuneplane import __version__
from tuneplane.kernel.errors import Fault, UsageError
from tuneplane.recipes.catalog import Catalog
from tuneplane.recipes.lock import LOCK_NAME, Lock, lock_of, parse_lock, read_lock, read_lock_json, write_lock
from tuneplane.recipes.recipe import USER_MANAGED, Recipe
from tuneplane.recipes.values import flatten

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


@dataclass(frozen=True)
class Change:
    """One field of a lock that an upgrade changes. None: absent on that side."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True)
class LockUpgrade:
    """What `tp recipe upgrade` does to one experiment. changes: empty where the lock is as it would be."""

    path: Path
    lock: Lock
    changes: tuple[Change, ...]


def plan_upgrade(folder: Path, catalog: Catalog, method: str | None = None) -> LockUpgrade:
    """What re-locking an experiment would change; writes nothing.

    method: where the lock is too broken to say which recipe it was for, or its recipe is gone.
    Raises UsageError: no method known, an unknown one, a broken manifest or scaffold; OperationError.
    """
    path = folder / LOCK_NAME
    before: Any = None
    problems: tuple[Fault, ...] = ()
    try:
        before = read_lock_json(path)
        parse_lock(before, str(path), folder.name)
    except UsageError as error:
        problems = error.faults
    chosen = method or _method_in(before)
    if chosen is None:
        remedy = f"tp recipe upgrade {folder.name} --method METHOD (tp methods lists them)"
        raise UsageError(*(Fault(f.what, f.where, remedy) for f in problems))
    recipe = catalog.get(chosen)
    lock = lock_of(recipe, catalog.scaffold(recipe).digest)
    return LockUpgrade(path, lock, tuple(_changes(before, lock.as_json())))


def write_upgrade(upgrade: LockUpgrade) -> None:
    """Write the planned lock where anything changes. Raises OperationError."""
    if upgrade.changes:
        write_lock(upgrade.path, upgrade.lock)


def _method_in(value: Any) -> str | None:
    """The method that a lock names, however broken the rest of it is."""
    recipe = value.get("recipe") if isinstance(value, dict) else None
    name = recipe.get("name") if isinstance(recipe, dict) else None
    return name if isinstance(name, str) and name else None


def _changes(before: Any, after: Mapping[str, Any]) -> list[Change]:
    old = flatten(before) if isinstance(before, dict) else {}
    new = flatten(after)
    keys = [*new, *(key for key in old if key not in new)]
    return [
        Change(k, old.get(k), new.get(k)) for k in keys if k not in old or k not in new or old[k] != new[k]
    ]
