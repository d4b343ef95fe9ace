"""The tree of configuration as key → value with its origin: what files, flags and environment said.

Compose merges statements into it, later ones over earlier, and builds the typed configuration from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tuneplane.compose.document import Document, is_null
from tuneplane.compose.schema import (
    LIST,
    SECTION,
    TABLE,
    TEXT,
    Key,
    Kind,
    dotted,
    fields,
    from_text,
    kind_of,
    nearest,
)
from tuneplane.kernel.errors import Fault
from tuneplane.site import Config

BUILT_IN = "built in"
MISSING = "???"
"""Hydra's mark of a value that a later file has to give."""


@dataclass(frozen=True)
class Statement:
    """One key set to one value, by one line of a file, a flag or a variable of the environment.

    layer: name of the layer that said it, or of what stands in for one.
    interpolated: the value holds `${…}` of a file, still to be resolved.
    """

    key: Key
    value: Any
    where: str
    layer: str
    interpolated: bool = False


Tree = dict[Key, Statement]


def built_in() -> Tree:
    """The defaults of the dataclasses."""
    return {key: Statement(key, value, BUILT_IN, BUILT_IN) for key, value in _leaves((), Config())}


def merge(tree: Tree, statements: Iterable[Statement]) -> None:
    """Put statements over a tree. A null in a mapping of names takes that name out again."""
    for statement in statements:
        above = kind_of(statement.key[:-1])
        if statement.value is None and above is not None and above.word == TABLE:
            tree.pop(statement.key, None)
        else:
            tree[statement.key] = statement


def build(tree: Tree) -> Config:
    """The typed configuration; every value has its type already."""
    return _build(Config, (), tree)  # type: ignore[no-any-return]


def statements(document: Document, package: Key, faults: list[Fault]) -> list[Statement]:
    """What a file says, where Hydra put its content under the key `package`; its faults are collected."""
    said: list[Statement] = []
    reader = _Reader(document, said, faults)
    kind = kind_of(package)
    pairs = [(key, value) for key, value in document.entries if key.value != "defaults"]
    if kind is None or kind.word not in (SECTION, TABLE):
        what = f"its content would land under {dotted(package)}, which is no section of the configuration"
        faults.append(Fault(what, str(document.path), "see its `# @package` line and who names it"))
    else:
        reader.read_pairs(package, kind, pairs)
    return said


@dataclass(frozen=True)
class _Reader:
    document: Document
    said: list[Statement]
    faults: list[Fault]

    def read_pairs(self, key: Key, kind: Kind, pairs: Iterable[tuple[Any, Any]]) -> None:
        for name, node in pairs:
            below = (*key, str(name.value))
            if kind.word == TABLE:
                self._read_scalar(below, Kind(TEXT, optional=True), node)
            elif kind.section is not None:
                found = fields(kind.section).get(str(name.value))
                if found is None:
                    self._fault(
                        name, f"unknown key {dotted(below)}", nearest(str(name.value), fields(kind.section))
                    )
                else:
                    self._read(below, found, node)

    def _read(self, key: Key, kind: Kind, node: Any) -> None:
        empty = is_null(node)
        if kind.word in (SECTION, TABLE):
            if isinstance(getattr(node, "value", None), list) and node.tag.endswith(":map"):
                self.read_pairs(key, kind, node.value)
            elif not empty:  # a heading whose keys are all commented out says nothing
                self._fault(node, f"{dotted(key)} is not {kind.word}")
        elif kind.word == LIST:
            self._read_list(key, kind, node, empty)
        else:
            self._read_scalar(key, kind, node)

    def _read_list(self, key: Key, kind: Kind, node: Any, empty: bool) -> None:
        if empty:
            self._say(key, None if kind.optional else [], node)
        elif node.tag.endswith(":seq"):
            items = []
            for item in node.value:
                if isinstance(item.value, str) and not is_null(item):
                    items.append(item.value)
                else:
                    self._fault(item, f"{dotted(key)} has an item that is not text")
            self._say(key, items, node, any("${" in item for item in items))
        elif isinstance(node.value, str) and "${" in node.value:
            self._say(key, node.value, node, True)
        else:
            self._fault(node, f"{dotted(key)} is not {LIST}", "write [a, b], or one `- item` a line")

    def _read_scalar(self, key: Key, kind: Kind, node: Any) -> None:
        if not isinstance(node.value, str):
            self._fault(node, f"{dotted(key)} is not {kind.word}")
        elif is_null(node):
            if kind.optional:
                self._say(key, None, node)
            else:
                self._fault(node, f"{dotted(key)} has no value", f"give it {kind.word}, or leave the key out")
        elif node.value == MISSING:
            self._say(key, MISSING, node)
        elif "${" in node.value:
            self._say(key, node.value, node, True)
        else:
            try:
                self._say(key, from_text(node.value, kind), node)
            except ValueError as error:
                self._fault(node, f"{dotted(key)}: {error}")

    def _say(self, key: Key, value: Any, node: Any, interpolated: bool = False) -> None:
        layer = self.document.layer.name
        self.said.append(Statement(key, value, self.document.where(node), layer, interpolated))

    def _fault(self, node: Any, what: str, remedy: str = "") -> None:
        self.faults.append(Fault(what, self.document.where(node), remedy))


def _leaves(key: Key, value: Any) -> Iterator[tuple[Key, Any]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves((*key, field.name), getattr(value, field.name))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield (*key, name), item
    else:
        yield key, value


def _build(section: type, key: Key, tree: Tree) -> Any:
    values: dict[str, Any] = {}
    for name, kind in fields(section).items():
        below = (*key, name)
        if kind.section is not None:
            values[name] = _build(kind.section, below, tree)
        elif kind.word == TABLE:
            values[name] = {k[-1]: s.value for k, s in tree.items() if k[:-1] == below}
        else:
            values[name] = tree[below].value
    return section(**values)
