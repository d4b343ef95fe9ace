"""The configuration's keys and types, read from the dataclasses of `tuneplane.site`.

Compose asks it what a key means; nothing else knows how an annotation becomes a rule.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tuneplane.site import Config

Key = tuple[str, ...]

TEXT, WHOLE, NUMBER, SWITCH, LIST, TABLE, SECTION = (
    "text",
    "a whole number",
    "a number",
    "true or false",
    "a list of texts",
    "a mapping of names to texts",
    "a mapping of keys",
)

_WHOLE = re.compile(r"[+-]?[0-9]{1,15}")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?", re.ASCII)
_SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Kind:
    """What may stand under a key: one of the words above. `section`: the dataclass of a SECTION."""

    word: str
    optional: bool = False
    section: type | None = None


ROOT = Kind(SECTION, section=Config)
ENTRY = Kind(TEXT, optional=True)
"""A value in a TABLE; null takes an inherited entry out."""


@functools.cache
def fields(section: type) -> Mapping[str, Kind]:
    """The keys of a section."""
    hints = typing.get_type_hints(section)
    return {field.name: _kind(hints[field.name]) for field in dataclasses.fields(section)}


def kind_of(key: Key) -> Kind | None:
    """What stands under a key of the whole tree; None where there is no such key."""
    kind = ROOT
    for name in key:
        if kind.word == TABLE:
            kind = ENTRY
        elif kind.section is not None and name in fields(kind.section):
            kind = fields(kind.section)[name]
        else:
            return None
    return kind


def nearest(name: str, known: Iterable[str]) -> str:
    """The remedy for a name that is not known: the nearest ones, else all."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"


def dotted(key: Key) -> str:
    """A key as people write it."""
    return ".".join(key)


def from_text(text: str, kind: Kind) -> Any:
    """The value that a scalar's text has under a key of this kind. Raises ValueError with what it is not."""
    if kind.word == TEXT:
        return text
    if kind.word == WHOLE and _WHOLE.fullmatch(text):
        return int(text)
    if kind.word == NUMBER and _NUMBER.fullmatch(text):
        return float(text)
    if kind.word == SWITCH and text.lower() in _SWITCH:
        return _SWITCH[text.lower()]
    raise ValueError(f"{text!r} is not {kind.word}")


def from_value(value: Any, kind: Kind) -> Any:
    """A Python value (of a flag, of an interpolation) under a key of this kind. Raises ValueError."""
    if value is None and kind.optional:
        return None
    if kind.word == LIST:
        if isinstance(value, (list, tuple)):
            return [from_value(item, Kind(TEXT)) for item in value]
    elif kind.word == TABLE:
        if isinstance(value, Mapping):
            return {str(name): from_value(item, Kind(TEXT)) for name, item in value.items()}
    elif isinstance(value, bool):
        if kind.word == SWITCH:
            return value
        if kind.word == TEXT:
            return str(value).lower()
    elif isinstance(value, (str, int, float)):
        return from_text(str(value), kind)
    raise ValueError(f"{value!r} is not {kind.word}")


def _kind(hint: Any) -> Kind:
    optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(argument for argument in typing.get_args(hint) if argument is not type(None))
        optional = True
    if dataclasses.is_dataclass(hint):
        return Kind(SECTION, optional, typing.cast(type, hint))
    origin = typing.get_origin(hint) or hint
    word = {str: TEXT, int: WHOLE, float: NUMBER, bool: SWITCH, list: LIST, dict: TABLE}[origin]
    return Kind(word, optional)
