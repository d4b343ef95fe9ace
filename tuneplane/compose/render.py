"""`tp config NAME`: the composed configuration as YAML, each value with where it came from."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from tuneplane.compose.composed import Composed

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9/._@%+=-]*")
_LOOKS_LIKE_ELSE = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
_WIDEST_VALUE = 60
"""Comments are aligned behind values up to this width; a longer one pushes its own comment out."""


def render_config(composed: Composed, as_json: bool = False) -> str:
    """The configuration as text: YAML with aligned comments that name origins, or one JSON object."""
    if as_json:
        return _json(composed)
    rows = list(_rows(dataclasses.asdict(composed.config), (), composed.origins))
    width = max((len(line) for line, origin in rows if origin and len(line) <= _WIDEST_VALUE), default=0)
    lines = [f"# profile {composed.request.text}; later layers have the last word:"]
    for layer in composed.layers:
        absent = "" if layer.present else "  (not there)"
        lines.append(f"#   {layer.name:<9} {_printable(str(layer.folder))}{absent}")
    lines += [f"# note: {_printable(notice)}" for notice in composed.notices]
    lines += [f"{line:<{width}}  # {_printable(origin)}" if origin else line for line, origin in rows]
    return "\n".join(lines) + "\n"


def _json(composed: Composed) -> str:
    value = {
        "profile": composed.request.text,
        "layers": [
            {"name": layer.name, "folder": str(layer.folder), "present": layer.present}
            for layer in composed.layers
        ],
        "files": [str(path) for path in composed.files],
        "notices": list(composed.notices),
        "config": dataclasses.asdict(composed.config),
        "origins": composed.origins,
    }
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace").decode()  # a folder's name may be no UTF-8


def _printable(text: str) -> str:
    """Text on one line, whatever the name of a folder holds."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _rows(
    value: dict[str, Any], above: tuple[str, ...], origins: dict[str, str]
) -> Iterator[tuple[str, str]]:
    """(line, origin) of each key; a heading has no origin."""
    indent = "  " * len(above)
    for name, item in value.items():
        key = (*above, name)
        if isinstance(item, dict) and item:
            yield f"{indent}{_scalar(name)}:", ""
            yield from _rows(item, key, origins)
        else:
            yield f"{indent}{_scalar(name)}: {_value(item)}", origins.get(".".join(key), "")


def _value(item: Any) -> str:
    if isinstance(item, list):
        return f"[{', '.join(_scalar(part) for part in item)}]"
    if isinstance(item, dict):
        return "{}"
    return _scalar(item)


def _scalar(item: Any) -> str:
    """A scalar that YAML reads as the same value; JSON's quotes are YAML's too."""
    if isinstance(item, str) and _PLAIN.fullmatch(item) and item.lower() not in _LOOKS_LIKE_ELSE:
        return item
    return json.dumps(item, ensure_ascii=False)
