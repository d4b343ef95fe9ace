"""Which metrics a user means by the names given, and the nearest to one that fits none. Pure."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Sequence

from tuneplane.kernel.errors import Fault, UsageError

SYSTEM = "system/"
"""What names of hardware metrics begin with: their steps are times."""

REGEX = "re:"

_MOST_COMPARED = 2000
_LONGEST_COMPARED = 200
_MOST_NEAR = 3


def is_system(name: str) -> bool:
    """Whether a metric is of the hardware, to be shown by time."""
    return name.startswith(SYSTEM)


def choose(patterns: Iterable[str], names: Iterable[str]) -> tuple[list[str], list[str]]:
    """The names that are meant, in the order of the patterns, and the patterns that fit none.

    A pattern is, whichever fits first: a whole name; the parts at a name's beginning or end (`train`, `loss`: of
    `train/loss`); a glob whose `*` passes `/`; after `re:` a regular expression, found anywhere in the name.
    Raises UsageError where an expression is none.
    """
    have = sorted(names)
    known = set(have)
    chosen: dict[str, None] = {}
    unknown = []
    for pattern in patterns:
        found = [pattern] if pattern in known else _fitting(pattern, have)
        if not found:
            unknown.append(pattern)
        chosen.update(dict.fromkeys(found))
    return list(chosen), unknown


def _fitting(pattern: str, names: Sequence[str]) -> list[str]:
    if pattern.startswith(REGEX):
        try:
            expression = re.compile(pattern.removeprefix(REGEX))
        except (re.error, RecursionError, OverflowError) as error:
            raise UsageError(
                Fault(f"{pattern} is no regular expression: {error}", "NAME", "or give a glob: 'train/*'")
            ) from None
        return [name for name in names if expression.search(name)]
    part = pattern.strip("/")
    if part:
        found = [name for name in names if name.startswith(f"{part}/") or name.endswith(f"/{part}")]
        if found:
            return found
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def nearest(pattern: str, names: Iterable[str]) -> list[str]:
    """Names much like one that fits none, the most alike first; else the first few there are."""
    some = [name for name in sorted(names) if len(name) <= _LONGEST_COMPARED][:_MOST_COMPARED]
    wanted = pattern[:_LONGEST_COMPARED].lower()
    by_end = {name.lower().rpartition("/")[2]: name for name in reversed(some)}
    whole = {name.lower(): name for name in reversed(some)}
    found = [whole[near] for near in difflib.get_close_matches(wanted, whole, _MOST_NEAR)]
    found += [by_end[near] for near in difflib.get_close_matches(wanted, by_end, _MOST_NEAR)]
    return list(dict.fromkeys(found))[:_MOST_NEAR] or some[:_MOST_NEAR]
