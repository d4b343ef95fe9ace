"""The fields of a document, read one by one: what is wrong is collected with its line, never raised half-way.

The recipe manifest and the lab's marker are read with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from tuneplane.kernel.errors import Fault
from tuneplane.recipes.documents import Document, Key
from tuneplane.recipes.names import remedy_for
from tuneplane.recipes.values import is_finite, kind_of


class Fields:
    """Reads one document; a field that is wrong comes back as its kind's empty value, and as a fault."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.faults: list[Fault] = []

    def fault(self, key: Key, what: str, remedy: str = "") -> None:
        self.faults.append(Fault(what, self.document.where(*key), remedy))

    def mapping(self, value: Any, key: Key, known: Iterable[str] | None = None) -> dict[str, Any] | None:
        label = dotted(key) or "the document"
        if value is None:
            self.fault(key, f"{label} is missing or empty")
            return None
        if not isinstance(value, dict):
            self.fault(key, f"{label} is {kind_of(value)}, not a mapping")
            return None
        allowed = None if known is None else tuple(known)
        for name in value:
            if allowed is not None and name not in allowed:
                remedy = remedy_for(name, allowed, f"keys here: {', '.join(allowed)}")
                self.fault((*key, name), f"unknown key {dotted((*key, name))}", remedy)
        return value

    def table(
        self,
        holder: dict[str, Any],
        key: Key,
        name: re.Pattern[str],
        read: Callable[[str, dict[str, Any], Key], Any],
    ) -> tuple[Any, ...]:
        """A mapping of names to mappings, each read by `read`; those that are wrong are left out."""
        given = self.mapping(holder.get(str(key[-1]), {}), key)
        rows = []
        for row, value in (given or {}).items():
            if not name.fullmatch(row):
                self.fault((*key, row), f"{row!r} is not a name for {key[-1]}")
            rows.append(read(row, value, (*key, row)))
        return tuple(row for row in rows if row is not None)

    def text(
        self,
        holder: dict[str, Any],
        key: Key,
        pattern: re.Pattern[str] | None = None,
        form: str = "",
        default: str | None = None,
    ) -> str:
        label = dotted(key)
        value = holder.get(str(key[-1]))
        if value is None:
            if default is None:
                self.fault(key, f"{label} is missing")
            return default or ""
        if not isinstance(value, str):
            self.fault(key, f"{label} is {kind_of(value)}, not text", "put it in quotes")
            return ""
        if not value or (pattern and not pattern.fullmatch(value)):
            self.fault(key, f"{label} cannot be {value!r}", form)
            return ""
        return value

    def texts(self, holder: dict[str, Any] | None, key: Key) -> tuple[str, ...]:
        items = self.items(holder or {}, key)
        for item in items:
            if not isinstance(item, str) or not item:
                self.fault(key, f"{dotted(key)} holds {item!r}, not text")
        return tuple(item for item in items if isinstance(item, str))

    def items(self, holder: dict[str, Any], key: Key) -> list[Any]:
        value = holder.get(str(key[-1]))
        if value is None:
            return []
        if not isinstance(value, list):
            self.fault(key, f"{dotted(key)} is {kind_of(value)}, not a list")
            return []
        return value

    def flag(self, holder: dict[str, Any], key: Key, default: bool = False) -> bool:
        value = holder.get(str(key[-1]), default)
        if not isinstance(value, bool):
            self.fault(key, f"{dotted(key)} is {kind_of(value)}, not true or false")
            return default
        return value

    def number(self, holder: dict[str, Any], key: Key) -> float | None:
        value = holder.get(str(key[-1]))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_finite(value):
            self.fault(key, f"{dotted(key)} is {kind_of(value)}, not a number")
            return None
        return value

    def one_of(self, holder: dict[str, Any], key: Key, allowed: tuple[str, ...]) -> str:
        value = self.text(holder, key)
        if value and value not in allowed:
            remedy = remedy_for(value, allowed, f"one of {', '.join(allowed)}")
            self.fault(key, f"{dotted(key)} cannot be {value!r}", remedy)
            return ""
        return value


def dotted(key: Key) -> str:
    """A key path as people write it."""
    return ".".join(map(str, key))
