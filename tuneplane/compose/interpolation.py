"""`${…}` in configuration files: resolved to plain values at submit, and no secret read by it (C11).

OmegaConf resolves; what is ours is where `oc.env` looks, what it refuses, and that faults name file and key.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tuneplane.compose.document import Document
from tuneplane.compose.schema import Key, dotted, from_value, kind_of
from tuneplane.compose.tree import Statement, Tree
from tuneplane.kernel.errors import Fault
from tuneplane.kernel.secret_names import is_secret_name

SECRET_REMEDY = "list the name in site.secrets: its value then reaches the job by a file of mode 0600 alone"

_NOT_GIVEN: Any = object()
_ENV = re.compile(r"""oc\.env\s*:\s*["']?([A-Za-z0-9_]+)""")


class SecretRefused(Exception):
    """Raised inside a resolution that asks for a secret's value."""


class VariableMissing(Exception):
    """Raised inside a resolution that asks for a variable that is not set, with no default."""


def secret_faults(document: Document) -> Iterator[Fault]:
    """Every place of a file, used or not, where a secret-named variable is interpolated by its name."""
    for key, node in document.scalars():
        for name in _ENV.findall(node.value):
            if is_secret_name(name):
                yield _secret_fault(name, key, document.where(node))


@contextmanager
def environment(environ: Mapping[str, str], secrets: Collection[str] = ()) -> Iterator[None]:
    """Let `oc.env` read `environ`, and refuse secrets however their names were put together.

    Resolvers are OmegaConf's, for the whole process; the original is put back.
    """
    from omegaconf import OmegaConf
    from omegaconf import __version__ as omegaconf_version
    from omegaconf.resolvers import oc
    from packaging import version

    def read(key: str, default: Any = _NOT_GIVEN) -> Any:
        if is_secret_name(str(key)) or key in secrets:
            raise SecretRefused(str(key))
        if str(key) in environ:
            return environ[str(key)]
        if default is _NOT_GIVEN:
            raise VariableMissing(f"the environment has no variable {key}")
        return None if default is None else str(default)

    # From 2.4 on the long name warns; in 2.3 the short one is another, older function.
    old = version.parse(omegaconf_version).release < (2, 4)
    register: Any = OmegaConf.register_new_resolver if old else OmegaConf.register_resolver
    register("oc.env", read, replace=True)
    try:
        yield
    finally:
        register("oc.env", oc.env, replace=True)


def resolve(tree: Tree, environ: Mapping[str, str], faults: list[Fault]) -> Tree:
    """The tree with every interpolation replaced by its value, of the key's type.

    What cannot be resolved is collected as a fault, and its key left out.
    """
    if not any(statement.interpolated for statement in tree.values()):
        return dict(tree)
    secrets = tree["site", "secrets"].value
    resolved: Tree = {}
    with environment(environ, secrets if isinstance(secrets, list) else ()):
        config = _omegaconf(tree, faults)
        for key, statement in tree.items():
            if not statement.interpolated:
                resolved[key] = statement
            elif config is not None and key in config.readable:
                value = _value(config.root, key, statement, faults)
                if value is not _NOT_GIVEN:
                    resolved[key] = replace(statement, value=value, interpolated=False)
    return resolved


class _Configuration:
    """The whole tree as OmegaConf has it; `readable`: keys whose `${…}` are well-formed."""

    def __init__(self, root: Any, readable: set[Key]) -> None:
        self.root = root
        self.readable = readable


def _omegaconf(tree: Tree, faults: list[Fault]) -> _Configuration:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    plain: dict[str, Any] = {}
    readable: set[Key] = set()
    for key, statement in tree.items():
        value = statement.value if statement.interpolated else _literal(statement.value)
        if statement.interpolated:
            try:
                OmegaConf.create([value])
            except OmegaConfBaseException as error:
                faults.append(_fault(statement, error))
                continue
            readable.add(key)
        section = plain
        for name in key[:-1]:
            section = section.setdefault(name, {})
        section[key[-1]] = value
    return _Configuration(OmegaConf.create(plain), readable)


def _value(root: Any, key: Key, statement: Statement, faults: list[Fault]) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    kind = kind_of(key)
    assert kind is not None
    try:
        node = root
        for name in key[:-1]:
            node = node[name]
        value = node[key[-1]]
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        fault = _fault(statement, error)
        if not any(_same_secret(fault, told) for told in faults):
            faults.append(fault)
        return _NOT_GIVEN
    try:
        return from_value(value, kind)
    except ValueError as error:
        faults.append(Fault(f"{dotted(key)} is, after interpolation, wrong: {error}", statement.where))
        return _NOT_GIVEN


def _fault(statement: Statement, error: BaseException) -> Fault:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else "it refers to itself"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, SecretRefused):
            return _secret_fault(str(cause), dotted(statement.key), statement.where)
        if isinstance(cause, VariableMissing):
            reason = str(cause)
            break
        cause = cause.__cause__ or cause.__context__
    return Fault(f"{dotted(statement.key)} cannot be resolved: {reason}", statement.where)


def _secret_fault(name: str, key: str, where: str) -> Fault:
    return Fault(f"{key} interpolates {name}, whose name says that it is a secret", where, SECRET_REMEDY)


def _same_secret(fault: Fault, told: Fault) -> bool:
    """Whether both say of one place that it asks for one secret; the file's own keys are shorter."""
    both = (fault.where, fault.remedy) == (told.where, told.remedy) and told.remedy == SECRET_REMEDY
    return both and fault.what.partition(" ")[2] == told.what.partition(" ")[2]


def _literal(value: Any) -> Any:
    """A value that is no interpolation, so that OmegaConf leaves its `${` alone."""
    if isinstance(value, list):
        return [_literal(item) for item in value]
    if isinstance(value, str) and "${" in value:
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value
