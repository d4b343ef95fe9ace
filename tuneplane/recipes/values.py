"""Values of parameters: which types there are, when a value is of one, how nested ones become flat.

The manifest reader checks defaults with it, `parameters.py` checks what `--set` and config.yaml say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tuneplane.recipes.recipe import Parameter

SCALARS = ("bool", "int", "float", "str")
TYPES = (*SCALARS, *(f"list[{s}]" for s in SCALARS))
KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
"""A parameter's name: words joined by dots, which are groups."""

_PYTHON_TYPES: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}

INT_BITS = 64
"""Whoever reads job.json and params.json may hold integers in 64 bits."""


def kind_of(value: Any) -> str:
    """What a value is, in a word that users know."""
    if value is None:
        return "null"
    names = {bool: "a bool", int: "an int", float: "a float", str: "text", list: "a list", dict: "a mapping"}
    return names.get(type(value), type(value).__name__)


def is_finite(value: float) -> bool:
    """Whether a number can stand in JSON. (An int too large for a float is finite.)"""
    return isinstance(value, int) or math.isfinite(value)


def stays_below(path: str) -> bool:
    """Whether a relative path of a manifest stays below the folder that it is relative to, by its text."""
    parts = path.split("/")
    return not path.startswith(("/", "~")) and ".." not in parts and "" not in parts and "\0" not in path


def coerce(parameter: Parameter, value: Any, text: str | None = None) -> Any:
    """`value` as the parameter has it: an int where a float is wanted becomes one.

    text: how it was written on the command line; a str parameter takes that, so that `007` stays `007`.
    Raises ValueError, saying what the value is and what it should be.
    """
    if value is None:
        if parameter.nullable:
            return None
        raise ValueError(f"null is not {parameter.type}")
    if not parameter.type.startswith("list["):
        return _coerce_scalar(parameter, parameter.type, value, text)
    if not isinstance(value, list):
        raise ValueError(f"{shown(value)} is {kind_of(value)}, not {parameter.type}: write it in [ ]")
    kind = parameter.type.removeprefix("list[").removesuffix("]")
    return [_coerce_scalar(parameter, kind, item, None) for item in value]


def _coerce_scalar(parameter: Parameter, kind: str, value: Any, text: str | None) -> Any:
    if kind == "str" and text is not None and isinstance(value, (bool, int, float)):
        value = text
    if kind == "float" and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise ValueError(f"{shown(value)} is too large") from None
    fits: bool = type(value) is _PYTHON_TYPES[kind]  # a bool is no int here
    if not fits:
        raise ValueError(f"{shown(value)} is {kind_of(value)}, not {kind}")
    problem = unfit(value)
    if problem:
        raise ValueError(problem)
    if parameter.minimum is not None and value < parameter.minimum:
        raise ValueError(f"{shown(value)} is below the smallest value {parameter.minimum:g}")
    if parameter.maximum is not None and value > parameter.maximum:
        raise ValueError(f"{shown(value)} is above the largest value {parameter.maximum:g}")
    if parameter.choices and value not in parameter.choices:
        raise ValueError(f"{shown(value)} is none of {', '.join(map(str, parameter.choices))}")
    return value


def unfit(value: Any) -> str:
    """Why a plain value cannot be written as JSON that every reader reads alike; empty where it can."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{shown(value)} is not a finite number, and JSON has no word for it"
    if type(value) is int and value.bit_length() >= INT_BITS:
        return f"{shown(value)} does not fit in {INT_BITS} bits"
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return f"{shown(value)} is not UTF-8"
    if isinstance(value, list):
        return next((p for p in map(unfit, value) if p), "")
    if isinstance(value, dict):
        return next((p for item in value.items() for p in map(unfit, item) if p), "")
    return ""


def shown(value: Any) -> str:
    """A value for a message, cut where it is long."""
    try:
        text = value if isinstance(value, str) and value.isprintable() and value else repr(value)
    except ValueError:  # an int of more digits than Python prints
        text = "a huge int"
    return text if len(text) <= 60 else text[:57] + "…"


def written(value: Any) -> str:
    """A value as people write it in YAML and in `--set`: `null`, `true`, `2e-05`, `[1, 2]`, `adam`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, str):
        return value if value.isprintable() and value and value == value.strip() else repr(value)
    return repr(value)


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by `.`; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nested_pairs(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Pairs of names of which the first is a group of the second: `a` and `a.b` cannot both have a value."""
    known = set(names)
    for name in sorted(known):
        parts = name.split(".")
        for length in range(1, len(parts)):
            group = ".".join(parts[:length])
            if group in known:
                yield group, name
