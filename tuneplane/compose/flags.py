"""Flags of the command line as statements about the configuration. Compose puts them over all files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tuneplane.compose.schema import LIST, SECTION, TABLE, from_value, kind_of
from tuneplane.compose.tree import Statement, Tree
from tuneplane.kernel.errors import Fault

LAYER = "flags"

Flags = Mapping[str, "tuple[str, object]"]


def read_flags(flags: Flags, faults: list[Fault]) -> tuple[list[Statement], list[Statement]]:
    """(What replaces a value, what is added to a list.) A None is a flag that was not given."""
    replacing: list[Statement] = []
    adding: list[Statement] = []
    for name, (flag, value) in flags.items():
        key = tuple(name.split("."))
        kind = kind_of(key)
        if value is None:
            continue
        if kind is None or kind.word == SECTION:
            faults.append(Fault(f"{name} is no key of the configuration", flag))
            continue
        try:
            typed = from_value(value, kind)
        except ValueError as error:
            faults.append(Fault(str(error), flag))
            continue
        if kind.word == TABLE:
            replacing += [Statement((*key, entry), text, flag, LAYER) for entry, text in typed.items()]
        elif kind.word == LIST:
            adding.append(Statement(key, typed, flag, LAYER))
        else:
            replacing.append(Statement(key, typed, flag, LAYER))
    return replacing, adding


def add_to_lists(tree: Tree, adding: list[Statement]) -> Tree:
    """The tree with items put behind those that files gave; both origins are named."""
    result = dict(tree)
    for more in adding:
        if not more.value:
            continue
        base = result[more.key]
        where = f"{base.where} and {more.where}" if base.value else more.where
        result[more.key] = replace(more, value=[*(base.value or []), *more.value], where=where)
    return result
