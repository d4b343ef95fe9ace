"""`recipe.lock.json`: what an experiment was made against (C3). `tp new` and `tp recipe upgrade` write it.

The public client writes the same format; keys that we do not know are read over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneplane import __version__
from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.kernel.files import write_json
from tuneplane.recipes.manifest import METHOD
from tuneplane.recipes.recipe import Entrypoint, Recipe
from tuneplane.recipes.values import TYPES, kind_of

API_VERSION = "tuneplane/recipe-lock/v1"
LOCK_NAME = "recipe.lock.json"
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Lock:
    """A lock.

    params: bound parameter → its type, None where the lock does not say which it had. defaults: of those with a
    default, where the lock says it.
    """

    recipe: str  # the method in full
    version: str
    digest: str
    manifest_digest: str
    template_digest: str
    framework: str
    framework_version: str | None
    runtime_id: str | None
    entrypoint: Entrypoint
    created_by_core: str
    requires_core: str
    params: Mapping[str, str | None] = field(default_factory=dict, hash=False)
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def as_json(self) -> dict[str, Any]:
        """The file's value, keys in the order of the format."""
        return {
            "apiVersion": API_VERSION,
            "recipe": {
                "name": self.recipe,
                "version": self.version,
                "digest": self.digest,
                "manifest_digest": self.manifest_digest,
                "template_digest": self.template_digest,
            },
            "framework": {
                "kind": self.framework,
                "version": self.framework_version,
                "runtime_id": self.runtime_id,
            },
            "bindings": {
                "entrypoint": {"kind": self.entrypoint.kind, "value": self.entrypoint.value},
                "params": {name: self._param(name) for name in self.params},
            },
            "created_by": {"core_version": self.created_by_core},
            "requires": {"core": self.requires_core},
        }

    def _param(self, name: str) -> dict[str, Any]:
        default = {"default": self.defaults[name]} if name in self.defaults else {}
        return {"type": self.params[name], **default}


def lock_of(recipe: Recipe, template_digest: str) -> Lock:
    """The lock of an experiment that is made against `recipe` now."""
    return Lock(
        recipe=recipe.id,
        version=recipe.version,
        digest=recipe.digest,
        manifest_digest=recipe.manifest_digest,
        template_digest=template_digest,
        framework=recipe.framework,
        framework_version=recipe.runtime.version,
        runtime_id=recipe.runtime.id,
        entrypoint=recipe.entrypoint,
        created_by_core=__version__,
        requires_core=recipe.requires_core,
        params={p.name: p.type for p in recipe.parameters},
        defaults={p.name: p.default for p in recipe.parameters if not p.required},
    )


def write_lock(path: Path, lock: Lock, others: Mapping[str, Any] | None = None) -> None:
    """Write the lock, whole or not at all. others: keys of somebody else's, which stay. Raises OperationError."""
    try:
        write_json(path, {**lock.as_json(), **(others or {})})
    except OSError as error:
        raise OperationError(Fault(f"cannot be written: {error.strerror}", str(path))) from None


def read_lock(path: Path) -> Lock:
    """The lock in a file. Raises UsageError with all that is wrong with it; OperationError: unreadable."""
    return parse_lock(read_lock_json(path), str(path), path.parent.name)


def read_lock_json(path: Path) -> Any:
    """The JSON value in a lock file. Raises UsageError: missing, or not JSON; OperationError: unreadable."""
    remedy = f"tp recipe upgrade {path.parent.name} --method METHOD writes it anew"
    try:
        if path.is_symlink() or not path.is_file():
            raise UsageError(Fault(f"{LOCK_NAME} is missing or not a file", str(path), remedy))
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise OperationError(Fault(f"cannot be read: {error.strerror}", str(path))) from None
    try:
        if len(data) > MOST_BYTES:
            raise ValueError(f"larger than {MOST_BYTES} bytes")
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise UsageError(Fault(f"is not JSON: {error.msg}", f"{path}:{error.lineno}", remedy)) from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UsageError(Fault(f"is not JSON: {what}", str(path), remedy)) from None


def parse_lock(value: Any, where: str, experiment: str) -> Lock:
    """The lock that a JSON value is. Raises UsageError with every missing key and wrong type."""
    reader = _Reader(where, _remedy(experiment))
    if not isinstance(value, dict):
        raise UsageError(reader.fault(f"the lock is {kind_of(value)}, not an object"))
    version = value.get("apiVersion")
    if version != API_VERSION:
        reader.fault(f"apiVersion is {version!r}, not {API_VERSION!r}")
    name = reader.text(value, "recipe.name")
    if name and not METHOD.fullmatch(name):
        reader.fault(f"recipe.name {name!r} is not a method's name in full, like custom/custom")
    lock = Lock(
        recipe=name,
        version=reader.text(value, "recipe.version"),
        digest=reader.text(value, "recipe.digest"),
        manifest_digest=reader.text(value, "recipe.manifest_digest"),
        template_digest=reader.text(value, "recipe.template_digest"),
        framework=reader.text(value, "framework.kind"),
        framework_version=reader.text(value, "framework.version", nullable=True) or None,
        runtime_id=reader.text(value, "framework.runtime_id", nullable=True) or None,
        entrypoint=Entrypoint(
            reader.text(value, "bindings.entrypoint.kind"), reader.text(value, "bindings.entrypoint.value")
        ),
        created_by_core=reader.text(value, "created_by.core_version"),
        requires_core=reader.specifier(value, "requires.core"),
        params=reader.params(value, "bindings.params"),
        defaults=_defaults_in(value),
    )
    if reader.faults:
        raise UsageError(*reader.faults)
    return lock


class _Reader:
    """Looks up dotted keys of a JSON value, collecting what is wrong."""

    def __init__(self, where: str, remedy: str) -> None:
        self.where = where
        self.remedy = remedy
        self.faults: list[Fault] = []

    def fault(self, what: str) -> Fault:
        self.faults.append(Fault(what, self.where, self.remedy))
        return self.faults[-1]

    def find(self, value: Any, dotted: str) -> tuple[bool, Any]:
        """Whether the key is there, and its value."""
        for name in dotted.split("."):
            if not isinstance(value, dict) or name not in value:
                return False, None
            value = value[name]
        return True, value

    def text(self, value: Any, dotted: str, nullable: bool = False) -> str:
        there, found = self.find(value, dotted)
        if not there:
            self.fault(f"{dotted} is missing")
        elif found is None and nullable:
            return ""
        elif not isinstance(found, str) or not (found or nullable):
            self.fault(f"{dotted} is {'empty' if found == '' else kind_of(found)}, not text")
        else:
            return found
        return ""

    def specifier(self, value: Any, dotted: str) -> str:
        there, found = self.find(value, dotted)
        if there and found == "":  # anything will do
            return ""
        text = self.text(value, dotted)
        if text:
            from packaging.specifiers import InvalidSpecifier, SpecifierSet

            try:
                SpecifierSet(text)
            except InvalidSpecifier:
                self.fault(f"{dotted} {text!r} is not a version specifier, like >=0.5")
        return text

    def params(self, value: Any, dotted: str) -> dict[str, str | None]:
        """Bound parameters, in any of the forms met: names, name → type, name → {type: …}, name → value."""
        there, found = self.find(value, dotted)
        if not there:
            self.fault(f"{dotted} is missing")
        if found is None:
            return {}
        if isinstance(found, list) and all(isinstance(name, str) for name in found):
            return dict.fromkeys(found)
        if not isinstance(found, dict):
            self.fault(f"{dotted} is {kind_of(found)}, not an object")
            return {}
        return {name: _type_in(entry) for name, entry in found.items()}


def _type_in(entry: Any) -> str | None:
    if isinstance(entry, dict):
        entry = entry.get("type")
    return entry if isinstance(entry, str) and entry in TYPES else None


def _defaults_in(lock: Mapping[str, Any]) -> dict[str, Any]:
    bindings = lock.get("bindings")
    params = bindings.get("params") if isinstance(bindings, dict) else None
    found = params.items() if isinstance(params, dict) else ()
    return {name: entry["default"] for name, entry in found if isinstance(entry, dict) and "default" in entry}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice")
        found[key] = value
    return found


def _remedy(experiment: str) -> str:
    return f"tp recipe upgrade {experiment} writes it anew"
