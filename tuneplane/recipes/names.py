"""Names that users type, and the known names nearest to them. The catalog, parameters and the lab ask."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The known names most like `name`, nearest first; none where nothing is near."""
    by_folded = {k.casefold(): k for k in known}
    near = difflib.get_close_matches(name.casefold(), list(by_folded), n=most, cutoff=0.6)
    near += [n for n in by_folded if n not in near and _initials(n) == name.casefold()]
    return [by_folded[n] for n in near[:most]]


def _initials(name: str) -> str:
    """`lr` of `learning_rate`; nothing of a single word."""
    words = re.split("[._-]", name)
    return "".join(word[:1] for word in words) if len(words) > 1 else ""


def remedy_for(name: str, known: Iterable[str], all_of_them: str) -> str:
    """What to tell somebody whose `name` is not among `known`: the nearest, else how to see all of them."""
    near = nearest(name, known)
    return f"did you mean {' or '.join(near)}? {all_of_them}" if near else all_of_them
