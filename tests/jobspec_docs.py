"""docs/jobspec.schema.json and the table in docs/jobspec.md, made from `tuneplane.spec`.

`python tests/jobspec_docs.py` writes both; a test says when they are old. Meanings are the comments of the fields.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import json
import re
import tokenize
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Union

from tuneplane import spec
from tuneplane.spec import API_VERSION, AtLeast, JobSpec, OneOf

DOCS = Path(__file__).resolve().parents[1] / "docs"
SCHEMA, PAGE = DOCS / "jobspec.schema.json", DOCS / "jobspec.md"
BEGIN, END = "<!-- keys: made by tests/jobspec_docs.py -->", "<!-- end of keys -->"

_ESCAPED = r"\\\1"
"""What Markdown would take for its own, as itself."""

JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}


def schema() -> dict[str, Any]:
    """The JSON Schema that says what `tuneplane.spec.load` takes."""
    definitions: dict[str, Any] = {}
    root = _schema_of(JobSpec, definitions)
    run = definitions["Spec"]
    run["if"] = {
        "properties": {"resources": {"properties": {"scheduler": {"const": "slurm"}}}},
        "required": ["resources"],
    }
    run["then"] = {"properties": {"slurm": {"type": "object"}}, "required": ["slurm"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "job.json: the JobSpec of a TunePlane run",
        **root,
        "$defs": dict(sorted(definitions.items())),
    }


def schema_text() -> str:
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def table() -> str:
    """Markdown rows of every key, in the order of the file."""
    rows = ["| key | value | meaning |", "|---|---|---|"]
    for key, value, meaning in _rows(JobSpec, ""):
        rows.append(f"| `{key}` | {value} | {re.sub('([|<*])', _ESCAPED, meaning)} |")
    return "\n".join(rows)


def page_text(page: str) -> str:
    """The page with its table as it should be."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def _schema_of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        name = typing.cast(type, kind).__name__
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = _object_of(kind, definitions)
        return {"$ref": f"#/$defs/{name}"}
    if origin is Annotated:
        base, rule = inner
        made = _schema_of(base, definitions)
        if isinstance(rule, OneOf):
            return {**made, "enum": list(rule.words)}
        assert isinstance(rule, AtLeast)
        return {**made, "minimum": rule.least}
    if origin is Union:
        made = _schema_of(inner[0], definitions)
        return {"type": [made["type"], "null"]} if "type" in made else {"anyOf": [made, {"type": "null"}]}
    if origin is list:
        return {"type": "array", "items": _schema_of(inner[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of(inner[1], definitions)}
    return {} if kind is Any else {"type": JSON_TYPES[kind]}


def _object_of(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    properties, required = {}, []
    for field, hint, meaning in _fields(kind):
        value = _schema_of(hint, definitions)
        if field.name == "apiVersion":
            value = {"const": API_VERSION}
        if meaning:
            value = {"description": meaning, **value}
        if field.default not in (dataclasses.MISSING, None) and field.name != "apiVersion":
            value["default"] = field.default
        if _is_required(field):
            required.append(field.name)
        properties[field.name] = value
    return {
        "description": inspect.getdoc(kind),
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _rows(kind: Any, prefix: str) -> Iterator[tuple[str, str, str]]:
    for field, hint, meaning in _fields(kind):
        key = f"{prefix}{field.name}"
        words, below, mark = _words(hint)
        if field.name == "apiVersion":
            words = f"`{API_VERSION}`"
        default = "" if _is_required(field) else _default(field)
        yield key, words + default, meaning or (inspect.getdoc(below) or "" if below else "")
        if below is not None:
            yield from _rows(below, f"{key}{mark}.")


def _words(hint: Any) -> tuple[str, Any, str]:
    """A type in words, the dataclass in it, and what stands between the key and that one's keys."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return "object", hint, ""
    if origin is Annotated:
        words, below, mark = _words(inner[0])
        if isinstance(inner[1], OneOf):
            return " or ".join(f"`{word}`" for word in inner[1].words), below, mark
        return f"{words}, at least {inner[1].least:g}", below, mark
    if origin is Union:
        words, below, mark = _words(inner[0])
        return f"{words} or null", below, mark
    if origin is list:
        words, below, _ = _words(inner[0])
        return f"array of {words}s", below, "[]"
    if origin is dict:
        return f"object of {_words(inner[1])[0]}s", None, ""
    return ("value" if hint is Any else JSON_TYPES[hint]), None, ""


def _default(field: dataclasses.Field[Any]) -> str:
    if field.name == "apiVersion":
        return ""
    value = field.default_factory() if field.default is dataclasses.MISSING else field.default  # type: ignore[misc]
    value = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
    return f"; `{json.dumps(value)}` where left out"


def _is_required(field: dataclasses.Field[Any]) -> bool:
    absent = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    return absent or field.name == "apiVersion"


def _fields(kind: Any) -> Iterator[tuple[dataclasses.Field[Any], Any, str]]:
    """Fields with their types and comments; apiVersion first, as in the file."""
    hints = typing.get_type_hints(kind, include_extras=True)
    meanings = _meanings()[kind.__name__]
    for field in sorted(dataclasses.fields(kind), key=lambda f: f.name != "apiVersion"):
        yield field, hints[field.name], meanings.get(field.name, "")


@functools.cache
def _meanings() -> dict[str, dict[str, str]]:
    """Class → field → the comment on its line."""
    source = inspect.getsource(spec)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    return {
        node.name: {
            item.target.id: comments.get(item.end_lineno or 0, "")
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


if __name__ == "__main__":
    SCHEMA.write_text(schema_text(), encoding="utf-8")
    PAGE.write_text(page_text(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
