"""One YAML file of the configuration, as nodes that know their lines. Compose's other modules read these.

Nodes, not values: what a scalar means is decided by the key it stands under, so that `time: 12:00:00` and
`run_folder_mode: 0700` are the text that was written, not YAML 1.1's 43200 and 448.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tuneplane.compose.layers import Layer
from tuneplane.kernel.errors import Fault, OperationError, UsageError

LIMIT_BYTES = 1 << 20
"""No configuration is a megabyte; what is was meant for something else."""

DEEPEST = 32
"""Nesting of a file; the schema has four levels, a defaults list two more."""

_NULL = "tag:yaml.org,2002:null"
_MERGE = "tag:yaml.org,2002:merge"
_PLAIN_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "int", "float", "bool", "null", "timestamp", "value", "merge", "map", "seq")
)
_HEADER = re.compile(r"#\s*@package\s+(\S+)\s*")

DEFAULTS = "defaults"


@dataclass(frozen=True)
class Document:
    """A file's top-level mapping, and the package that its header names."""

    path: Path
    layer: Layer
    entries: tuple[tuple[Any, Any], ...]  # (key node, value node)
    package: str | None

    def where(self, node: Any) -> str:
        """`file:line` of a node."""
        return f"{self.path}:{node.start_mark.line + 1}"

    @property
    def defaults(self) -> Any | None:
        """The node of the file's Hydra defaults list, where it has one."""
        return next((value for key, value in self.entries if key.value == DEFAULTS), None)

    def scalars(self) -> Iterator[tuple[str, Any]]:
        """Every scalar of the file with the dotted key that it stands under; keys count as scalars too."""
        seen: set[int] = set()
        for key, value in self.entries:
            yield str(key.value), key
            yield from _scalars(str(key.value), value, seen)


def read_document(path: Path, layer: Layer) -> Document:
    """The file's content.

    Raises UsageError with every structural fault (not YAML, a key twice, a tag, not a mapping), each with its
    line, and OperationError where the file cannot be read.
    """
    text = _read_text(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UsageError(Fault(f"not YAML: {_one_line(error)}", f"{path}{line}")) from None
    except yaml.YAMLError as error:
        raise UsageError(Fault(f"not YAML: {_one_line(error)}", str(path))) from None
    except RecursionError:
        raise UsageError(Fault("nested deeper than any configuration is", str(path))) from None
    package = _package(text)
    if root is None or root.tag == _NULL:
        return Document(path, layer, (), package)
    document = Document(path, layer, (), package)
    faults: list[Fault] = []
    if not isinstance(root, yaml.MappingNode):
        faults.append(Fault("must be a mapping of keys to values", document.where(root)))
    else:
        _check(document, root, frozenset(), set(), faults)
    if faults:
        raise UsageError(*faults)
    return Document(path, layer, tuple(root.value), package)


def is_null(node: Any) -> bool:
    """Whether a node is `null`, `~` or nothing at all."""
    return isinstance(node, yaml.ScalarNode) and bool(node.tag == _NULL)


def plain(node: Any) -> Any:
    """A node as Python values of text, None, lists and dicts: what a defaults list is made of."""
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): plain(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [plain(item) for item in node.value]
    return None if is_null(node) else node.value


def _read_text(path: Path) -> str:
    try:
        # Not blocking: a named pipe of this name must not hold up the command.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(Fault("is not a regular file", str(path)))
            data = file.read(LIMIT_BYTES + 1)
    except OSError as error:
        raise OperationError(
            Fault(f"cannot be read: {error.strerror or error}", str(path), "mend it, or have its owner do so")
        ) from None
    if len(data) > LIMIT_BYTES:
        raise UsageError(Fault(f"is larger than {LIMIT_BYTES} bytes: not a configuration file", str(path)))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError(Fault("is not UTF-8 text", f"{path}:{line}")) from None


def _check(document: Document, node: Any, above: frozenset[int], done: set[int], faults: list[Fault]) -> None:
    """Collect what no configuration may hold, whatever its keys mean. `done`: an alias is checked once."""
    if id(node) in above or len(above) > DEEPEST:
        faults.append(Fault("is nested in itself, or deeper than any configuration", document.where(node)))
        return
    if id(node) in done:
        return
    done.add(id(node))
    if node.tag not in _PLAIN_TAGS:
        faults.append(Fault(f"the YAML tag {node.tag} means nothing here", document.where(node)))
        return
    above = above | {id(node)}
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check(document, item, above, done, faults)
    elif isinstance(node, yaml.MappingNode):
        first: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                faults.append(Fault("a key must be plain text", document.where(key)))
                continue
            if key.tag == _MERGE:
                faults.append(
                    Fault(
                        "<< is not read here",
                        document.where(key),
                        "write the keys out, or name the other file in a `defaults:` list",
                    )
                )
            elif key.value in first:
                line = first[key.value].start_mark.line + 1
                faults.append(
                    Fault(f"the key {key.value} stands twice, first in line {line}", document.where(key))
                )
            first.setdefault(key.value, key)
            _check(document, value, above, done, faults)


def _scalars(key: str, node: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _scalars(key, item, seen)
    elif isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield f"{key}.{name.value}", name
            yield from _scalars(f"{key}.{name.value}", value, seen)
    else:
        yield key, node


def _package(text: str) -> str | None:
    """The package of a `# @package NAME` line among the file's first comments, as Hydra has it."""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            return None
        if match := _HEADER.fullmatch(stripped):
            return match[1]
    return None


def _one_line(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        said = [part for part in (error.context, error.problem) if part]
        return ", ".join(said) or "unreadable"
    return " ".join(str(error).split())
