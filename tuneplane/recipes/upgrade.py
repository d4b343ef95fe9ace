"""What re-locking an experiment against the catalog of today changes, in its lock and for its owner (C3).

`tp recipe upgrade` shows it, and writes the lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneplane.kernel.errors import Fault, UsageError
from tuneplane.recipes.catalog import Catalog
from tuneplane.recipes.lock import LOCK_NAME, Lock, lock_of, parse_lock, read_lock_json, write_lock
from tuneplane.recipes.values import flatten, written


@dataclass(frozen=True)
class Change:
    """One field of a lock that an upgrade changes. None: absent on that side."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True)
class LockUpgrade:
    """What `tp recipe upgrade` does to one experiment.

    changes: of the file, empty where the lock is as it would be. told: what they mean to the owner, in sentences.
    """

    path: Path
    lock: Lock
    changes: tuple[Change, ...]
    told: tuple[str, ...] = ()
    kept: Mapping[str, Any] = field(default_factory=dict, hash=False)  # keys at the top that are not ours


def plan_upgrade(folder: Path, catalog: Catalog, method: str | None = None) -> LockUpgrade:
    """What re-locking an experiment would change; writes nothing.

    method: where the lock is too broken to say which recipe it was for, or its recipe is gone.
    Raises UsageError: no method known, an unknown one, a broken manifest or scaffold; OperationError.
    """
    path = folder / LOCK_NAME
    before: Any = None
    locked: Lock | None = None
    problems: tuple[Fault, ...] = ()
    try:
        before = read_lock_json(path)
        locked = parse_lock(before, str(path), folder.name)
    except UsageError as error:
        problems = error.faults
    chosen = method or _method_in(before)
    if chosen is None:
        remedy = f"tp recipe upgrade {folder.name} --method METHOD (tp methods lists them)"
        raise UsageError(*(Fault(f.what, f.where, remedy) for f in problems))
    recipe = catalog.get(chosen)
    lock = lock_of(recipe, catalog.scaffold(recipe).digest)
    ours = lock.as_json()
    kept = (
        {key: value for key, value in before.items() if key not in ours} if isinstance(before, dict) else {}
    )
    changes = tuple(_changes(before, {**ours, **kept}))
    return LockUpgrade(path, lock, changes, tuple(_told(locked, lock)) if changes else (), kept)


def write_upgrade(upgrade: LockUpgrade) -> None:
    """Write the planned lock where anything changes. Raises OperationError."""
    if upgrade.changes:
        write_lock(upgrade.path, upgrade.lock, upgrade.kept)


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


def _told(old: Lock | None, new: Lock) -> Iterator[str]:
    """What differs, as the owner of an experiment meets it; digests alone tell nobody anything."""
    if old is None:
        yield "the lock is missing or malformed, so what it was made against is not known"
        return
    yield from _interface(old, new)
    yield from _parameters(old, new)
    if old.template_digest != new.template_digest:
        yield "the files that tp new writes changed; those of this experiment stay as they are"
    if old.digest != new.digest and old.manifest_digest == new.manifest_digest:
        yield "of the recipe's words, ranges, defaults, metrics or images some changed: tp methods shows them"
    if old.created_by_core != new.created_by_core:
        yield f"locked by tuneplane {old.created_by_core} -> {new.created_by_core}"


def _interface(old: Lock, new: Lock) -> Iterator[str]:
    pairs = (
        ("recipe", old.recipe, new.recipe),
        ("version", old.version, new.version),
        ("entry", _entry(old), _entry(new)),
        ("runtime", _runtime(old), _runtime(new)),
        ("needs tuneplane", old.requires_core or "any", new.requires_core or "any"),
    )
    for what, before, after in pairs:
        if before != after:
            yield f"{what}: {before} -> {after}"


def _entry(lock: Lock) -> str:
    return f"{lock.entrypoint.kind} {lock.entrypoint.value}"


def _runtime(lock: Lock) -> str:
    parts = dict.fromkeys(part for part in (lock.framework, lock.framework_version, lock.runtime_id) if part)
    return " ".join(parts)


def _parameters(old: Lock, new: Lock) -> Iterator[str]:
    for name, kind in new.params.items():
        if name not in old.params:
            default = f"default {written(new.defaults[name])}" if name in new.defaults else "needs a value"
            yield f"parameter added: {name} ({kind}, {default})"
            continue
        if old.params[name] not in (None, kind):
            yield f"parameter {name}: {old.params[name]} -> {kind}"
        if name not in old.defaults:
            continue
        before = written(old.defaults[name])
        if name not in new.defaults:
            yield f"parameter {name} needs a value now, its default was {before}"
        elif written(new.defaults[name]) != before:
            yield f"default of {name}: {before} -> {written(new.defaults[name])}"
    for name in old.params:
        if name not in new.params:
            yield f"parameter gone: {name}"
