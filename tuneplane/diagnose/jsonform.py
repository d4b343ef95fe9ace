"""Evidence as JSON and back, and a change made to every text in it.

`case.py` keeps evidence so, `anonymous.py` and `tp job why` change its texts.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

from tuneplane.diagnose.evidence import Evidence

FORMAT = "tuneplane/evidence/v1"

T = TypeVar("T")


def as_json(evidence: Evidence) -> dict[str, Any]:
    """Evidence as one JSON object. Values that say nothing are left out."""
    return {"format": FORMAT, **_plain(evidence)}


def from_json(value: Any) -> Evidence:
    """The evidence of `as_json`. Raises ValueError where it is something else."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ValueError(f"it is no {FORMAT}")
    try:
        found: Evidence = _built(Evidence, {k: v for k, v in value.items() if k != "format"})
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"it is no sound {FORMAT}: {error}") from None
    return found


def map_texts(value: T, change: typing.Callable[[str], str]) -> T:
    """The same evidence with `change` made to every text in it, keys of mappings but for field names aside."""
    if isinstance(value, str):
        return typing.cast(T, change(value))
    if isinstance(value, tuple):
        return typing.cast(T, tuple(map_texts(v, change) for v in value))
    if isinstance(value, dict):
        return typing.cast(T, {k: map_texts(v, change) for k, v in value.items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: map_texts(getattr(value, f.name), change) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    return value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {}
        for f in dataclasses.fields(value):
            inner = getattr(value, f.name)
            default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
            if inner != default:
                found[f.name] = _plain(inner)
        return found
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _built(kind: Any, value: Any) -> Any:
    """`value` as `kind`: one of the dataclasses above, or one of the few forms that their fields have."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _built(inner[0], value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(value, dict):
            raise TypeError(f"{value!r} is no object")
        known = {f.name for f in dataclasses.fields(kind)}
        return typing.cast(Any, kind)(**{k: _built(hints[k], v) for k, v in value.items() if k in known})
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is no list")
        return tuple(_built(inner[0], v) for v in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise TypeError(f"{value!r} is no object")
        return {str(k): _built(inner[1], v) for k, v in value.items()}
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
