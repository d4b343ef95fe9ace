"""What the site keeps for itself: `site.*`, and every key that its `site.locked` lists.

Compose asks with two trees: what packaged and site files alone give, and what all layers and flags give.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tuneplane.compose.layers import SITE_VARIABLE, TRUSTED
from tuneplane.compose.schema import Key, dotted, kind_of
from tuneplane.compose.tree import BUILT_IN, Statement, Tree
from tuneplane.kernel.errors import Fault

SITE = "site"
_GIVEN_BY_TP = ("cluster", "name")


def foreign_site_faults(statements: Iterable[Statement]) -> list[Fault]:
    """Statements about `site.*` by anyone but the site: they protect it, so only its own files make them."""
    return [
        Fault(
            f"{dotted(statement.key)} is the site's to set",
            statement.where,
            f"take it out; where no site is set up, be the site: name a folder in {SITE_VARIABLE}"
            if statement.layer not in TRUSTED
            else "",
        )
        for statement in statements
        if statement.key[0] == SITE and statement.layer not in TRUSTED
    ]


def locked_keys(sites: Tree) -> list[Key]:
    """The prefixes that the site locked, as keys."""
    names = sites[SITE, "locked"].value
    return [tuple(name.split(".")) for name in names] if isinstance(names, list) else []


def unknown_lock_faults(sites: Tree) -> list[Fault]:
    """Locks of keys that do not exist: a misspelt lock would lock nothing."""
    where = sites[SITE, "locked"].where
    return [
        Fault(f"site.locked names {dotted(key)}, which is no key", where, "see the keys in docs/site.md")
        for key in locked_keys(sites)
        if kind_of(key) is None
    ]


def lock_faults(
    sites: Tree, composed: Tree, locked: Iterable[Key], contact: str, choosers: Sequence[str]
) -> list[Fault]:
    """Every locked key that is not as the site has it.

    sites: what packaged and site files alone compose to. locked: prefixes of keys.
    choosers: lines of `defaults:` lists outside the site's files, which chose among the site's own.
    """
    lock = sites[SITE, "locked"].where
    faults = []
    for prefix in dict.fromkeys(locked):
        keys = [key for key in {**sites, **composed} if key[: len(prefix)] == prefix and key != _GIVEN_BY_TP]
        for key in keys:
            of_site, now = sites.get(key), composed.get(key)
            if _value(of_site) == _value(now):
                continue
            where = now.where if now is not None else ""
            if now is None or now.layer in (*TRUSTED, BUILT_IN):
                where = choosers[0] if choosers else where
            if prefix == (SITE,) and now is not None and now.layer not in (*TRUSTED, BUILT_IN):
                continue  # told by foreign_site_faults
            kept = f"{_value(of_site)!r} ({of_site.where})" if of_site is not None else "unset"
            holder = f"is locked by {lock}" if prefix != (SITE,) else "is the site's to set"
            faults.append(
                Fault(
                    f"{dotted(key)} {holder}: it stays {kept}, and {_value(now)!r} is refused",
                    where,
                    f"take it out, or ask {contact}",
                )
            )
    return faults


def _value(statement: Statement | None) -> Any:
    return None if statement is None else statement.value
