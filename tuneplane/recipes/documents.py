"""YAML that people write, read strictly, every value with its line. The catalog and the lab's marker use it.

Scalars are those of a Hydra override: `1e-4` is a float, `yes` and `010` are text, `true` is a bool.
"""

from __future__ import annotations

import functools
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneplane.kernel.errors import Fault, OperationError, UsageError

MOST_BYTES = 1 << 20
"""Nobody writes a megabyte of manifest by hand: such a file is the wrong file."""

Key = tuple[str | int, ...]

_DIGITS = r"[0-9](?:_?[0-9])*"
_WHOLE = r"(?:0|[1-9](?:_?[0-9])*)"
_POINT = rf"(?:{_WHOLE}\.|{_WHOLE}?\.{_DIGITS})"
_INT = re.compile(rf"[+-]?{_WHOLE}")
_FLOAT = re.compile(
    rf"[+-]?(?:{_POINT}|(?:{_WHOLE}|{_POINT})[eE][+-]?{_DIGITS}|[Ii][Nn][Ff]|[Nn][Aa][Nn])", re.ASCII
)


def scalar(text: str) -> Any:
    """The value of an unquoted scalar, by the grammar of Hydra's overrides.

    Raises ValueError for an integer of so many digits that Python will not read it.
    """
    folded = text.casefold()
    if folded == "null":
        return None
    if folded in ("true", "false"):
        return folded == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


@dataclass(frozen=True)
class Document:
    """One parsed YAML file.

    value: mappings with text keys, lists, and scalars.
    lines: key path → line, 1 and up.
    """

    path: Path
    value: Any
    lines: Mapping[Key, int]

    def where(self, *keys: str | int) -> str:
        """`file:line` of a key, or of the nearest one around it that exists."""
        for length in range(len(keys), -1, -1):
            if keys[:length] in self.lines:
                return f"{self.path}:{self.lines[keys[:length]]}"
        return str(self.path)


def read_document(path: Path) -> Document:
    """The document in a file; an empty file holds None.

    Raises UsageError, with the line, where it is not YAML of the plain kind (no aliases, no tags, no key
    twice); OperationError where it cannot be read.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for, a folder not understood
            raise UsageError(Fault("is not a file", str(path)))
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise OperationError(Fault(f"cannot be read: {error.strerror or error}", str(path))) from None
    if len(data) > MOST_BYTES:
        raise UsageError(Fault(f"is larger than {MOST_BYTES} bytes", str(path)))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError(Fault("is not UTF-8", f"{path}:{line}", "save it as UTF-8")) from None
    lines: dict[Key, int] = {}
    value = _parse(text, str(path), lines)
    return Document(path, value, lines)


def parse_text(text: str, where: str) -> Any:
    """The value of a piece of YAML given on the command line. Raises UsageError."""
    return _parse(text, where, {}, numbered=False)


def _parse(text: str, where: str, lines: dict[Key, int], numbered: bool = True) -> Any:
    import yaml

    def place(mark: Any) -> str:
        return f"{where}:{mark.line + 1}" if numbered and mark is not None else where

    try:
        node = yaml.compose(text, Loader=_loader())
        return None if node is None else _build(node, (), lines)
    except yaml.MarkedYAMLError as error:
        what = ", ".join(part for part in (error.context, error.problem) if part)
        mark = error.problem_mark or error.context_mark
        raise UsageError(Fault(f"is not the YAML expected here: {what}", place(mark))) from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        at = f"{where}:{line}" if numbered else where
        raise UsageError(Fault(f"holds a character that YAML forbids: {error.reason}", at)) from None
    except RecursionError:
        raise UsageError(Fault("is nested too deeply", where)) from None


def _build(node: Any, key: Key, lines: dict[Key, int]) -> Any:
    """The plain value of a composed node. Raises yaml.MarkedYAMLError at the node that is wrong."""
    import yaml

    def wrong(problem: str, at: Any = node) -> yaml.MarkedYAMLError:
        return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)

    lines[key] = node.start_mark.line + 1
    kind = node.tag.rpartition(":")[2]
    if isinstance(node, yaml.MappingNode) and kind == "map":
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise wrong("a key is a single word", key_node)
            if key_node.value in built:
                raise wrong(f"the key {key_node.value!r} stands twice", key_node)
            below = (*key, key_node.value)
            built[key_node.value] = _build(value_node, below, lines)
            lines[below] = key_node.start_mark.line + 1
        return built
    if isinstance(node, yaml.SequenceNode) and kind == "seq":
        return [_build(item, (*key, i), lines) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode) and kind in ("str", "plain"):
        if kind == "str":
            return node.value
        if node.value in ("", "~"):
            return None
        try:
            return scalar(node.value)
        except ValueError:
            raise wrong("a number of too many digits") from None
    raise wrong(f"the tag {node.tag} is not known here")


@functools.cache
def _loader() -> Any:
    """A SafeLoader whose unquoted scalars carry one tag, `tp:plain`, and which knows no aliases."""
    import yaml

    class Plain(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                peek: Any = self.peek_event
                raise yaml.MarkedYAMLError(
                    problem="aliases are not used here", problem_mark=peek().start_mark
                )
            return super().compose_node(parent, index)

    Plain.yaml_implicit_resolvers = {}
    Plain.add_implicit_resolver("tp:plain", re.compile(""), None)
    return Plain
