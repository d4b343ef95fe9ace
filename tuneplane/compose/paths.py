"""`~` in configured paths: the submitting user's home, written out at compose (C41)."""

from __future__ import annotations

import os.path
import pwd
import re
from collections.abc import Mapping
from dataclasses import replace

from tuneplane.compose.layers import home
from tuneplane.compose.schema import Key, dotted
from tuneplane.compose.tree import Statement, Tree
from tuneplane.kernel.errors import Fault

_PATHS = frozenset(
    {"cluster.storage_root", "cluster.scratch", "cluster.python", "site.image_cache", "site.image_scratch"}
)
_PATH_LISTS = frozenset({"site.image_folders", "cluster.shared"})
_MOUNTS = "cluster.mounts"


def is_folder_variable(name: str) -> bool:
    """Variables that name a folder, which is mounted into the container (C10)."""
    return name == "HF_HOME" or name.endswith("_DATA_DIR")


def expand(tree: Tree, environ: Mapping[str, str], faults: list[Fault]) -> Tree:
    """The tree with every path plain: homes written out, `//` and a `/` at the end gone."""
    return {key: _expanded(key, statement, environ, faults) for key, statement in tree.items()}


def _expanded(key: Key, statement: Statement, environ: Mapping[str, str], faults: list[Fault]) -> Statement:
    name, value = dotted(key), statement.value
    try:
        if name in _PATHS or (dotted(key[:-1]).endswith("environment") and is_folder_variable(key[-1])):
            if isinstance(value, str):
                return replace(statement, value=expand_path(value, environ))
        elif name in _PATH_LISTS and isinstance(value, list):
            return replace(statement, value=[expand_path(item, environ) for item in value])
        elif name == _MOUNTS:
            return replace(statement, value=[_expand_mount(item, environ) for item in value])
    except KeyError as error:
        faults.append(
            Fault(f"{name} names the home of {error.args[0]}, who is no user here", statement.where)
        )
    return statement


def expand_path(text: str, environ: Mapping[str, str]) -> str:
    """A path with `~` or `~user` written out. Raises KeyError with the name of a user who is not known."""
    if text.startswith("~"):
        user, slash, rest = text[1:].partition("/")
        if user:
            try:
                folder = pwd.getpwnam(user).pw_dir
            except KeyError:
                raise KeyError(user) from None
        else:
            folder = str(home(environ))
        text = folder + slash + rest
    if not text.startswith("/") or ".." in text.split("/"):
        return text  # refused later, as it was written
    return "/" + os.path.normpath(text).lstrip("/")


def _expand_mount(text: str, environ: Mapping[str, str]) -> str:
    if not text.startswith("~"):
        return text
    head = re.split(r"[/:]", text, maxsplit=1)[0]
    folder = re.sub(r"([\\:])", r"\\\1", expand_path(head, environ))
    return folder + text[len(head) :]
