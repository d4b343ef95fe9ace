"""What a row must look like to be trained on: its columns, text and conversations. Pure; `check.py` asks.

The forms are those of TRL's "Dataset formats and types".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tuneplane.recipes.names import nearest
from tuneplane.recipes.values import kind_of, shown

CONVERSATION = ("messages",)
"""Columns that are a list of messages."""

EITHER = ("prompt", "completion", "chosen", "rejected")
"""Columns that are text or a list of messages, all of a row alike. Other declared columns are text."""

MAY_BE_EMPTY = ("prompt",)
"""Of a row that has more: an answer to nothing can be learned."""

Columns = tuple[str, ...]


def choose(sets: Sequence[Columns], present: Iterable[str]) -> Columns | None:
    """The first set of columns of which all are there."""
    there = set(present)
    return next((columns for columns in sets if there.issuperset(columns)), None)


def lacking(sets: Sequence[Columns], present: Sequence[str]) -> tuple[str, str]:
    """What is to be said where no set is there, and the remedy."""
    wanted = "; or ".join(" and ".join(columns) for columns in sets)
    has = ", ".join(map(shown, present[:20])) or "no columns"
    near = dict.fromkeys(
        f"{found} → {column}"
        for columns in sets
        for column in columns
        if column not in present
        for found in nearest(column, present, 1)
    )
    remedy = f"rename {', '.join(near)}?" if near else "rename its columns, or write them anew"
    return f"has no columns {wanted}; it has {has}", remedy


def problem(row: Any, columns: Columns) -> tuple[str, str]:
    """What is wrong with a row: a sort, by which alike are counted, and the sentence. Empty where nothing is."""
    if not isinstance(row, dict):
        return "row", f"is {kind_of(row)}, not a mapping of columns"
    missing = [column for column in columns if column not in row]
    if missing:
        return f"missing {missing}", f"has no {' and '.join(missing)}"
    for column in columns:
        found = _column_problem(column, row[column], alone=len(columns) == 1)
        if found:
            return re.sub(r"\[[0-9]+\]", "[]", found), found
    kinds = {column: isinstance(row[column], list) for column in columns if column in EITHER}
    if len(set(kinds.values())) > 1:
        text = next(column for column, listed in kinds.items() if not listed)
        messages = next(column for column, listed in kinds.items() if listed)
        return "mixed", f"{text} is text and {messages} a list of messages: one kind in a row"
    return "", ""


def shape(row: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
    """Which columns are text and which lists: the same in every row of a data set."""
    return tuple(f"{c} is {kind_of(row[c])}" for c in columns)


def _column_problem(column: str, value: Any, alone: bool) -> str:
    if value is None:
        return f"{column} is null"
    if column in CONVERSATION and not isinstance(value, list):
        return f"{column} is {kind_of(value)}, not a list of messages with role and content"
    if (
        column not in CONVERSATION
        and not isinstance(value, str)
        and not (column in EITHER and isinstance(value, list))
    ):
        return f"{column} is {kind_of(value)}, not text" + (
            " or a list of messages" if column in EITHER else ""
        )
    if isinstance(value, str):
        return "" if value.strip() or (column in MAY_BE_EMPTY and not alone) else f"{column} is empty"
    if not value:
        return f"{column} is empty"
    return next(
        (p for i, message in enumerate(value) if (p := _message_problem(f"{column}[{i}]", message))), ""
    )


def _message_problem(place: str, message: Any) -> str:
    if not isinstance(message, dict):
        return f"{place} is {kind_of(message)}, not a message with role and content"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        return f"{place} has no role"
    content = message.get("content")
    calls = message.get("tool_calls")
    if content is None and not calls:
        return f"{place} has no content"
    if content is not None and not isinstance(content, (str, list)):
        return f"{place}.content is {kind_of(content)}, not text"
    if isinstance(content, list) and not all(isinstance(part, dict) and "type" in part for part in content):
        return f"{place}.content is a list, of which a part has no type"
    return ""
