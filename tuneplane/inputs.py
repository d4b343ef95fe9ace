"""What an experiment and a submit say to a recipe: parameters and bindings, from config.yaml and flags.

Compile calls `read_inputs`. Of a recipe with free parameters config.yaml is not parsed: it is the user's (C5).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneplane.findings import Findings
from tuneplane.kernel.errors import Fault, UsageError
from tuneplane.recipes.documents import Document, Key, read_document
from tuneplane.recipes.names import remedy_for
from tuneplane.recipes.parameters import Override, check_parameters, ignored_bindings, parse_sets
from tuneplane.recipes.recipe import Binding, Recipe
from tuneplane.runs.index import find_run
from tuneplane.spec import read

CONFIG_NAME = "config.yaml"
EXPORT = "hf_export"
"""Below a run's output folder: what `--init-from` takes of it (C13)."""

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?", re.ASCII)

_DATA_FILE = re.compile(r"\.(jsonl?|parquet|csv|tsv|txt)(\.(gz|bz2|xz))?$")
"""A name that is mistyped, or said from another folder: no id of the hub ends so."""


@dataclass(frozen=True)
class Inputs:
    """What was said. params: flat. bindings: `model`, … → hub id, or absolute path of something that is there."""

    params: dict[str, Any] = field(default_factory=dict)
    bindings: dict[str, str] = field(default_factory=dict)


def read_inputs(
    found: Findings,
    recipe: Recipe,
    experiment: Path,
    sets: tuple[str, ...],
    flags: Mapping[str, str | None],
    init_from: str | None,
) -> Inputs:
    """Parameters and bindings of a run, what is wrong with them in `found`.

    sets: the `--set` texts. flags: a binding's name → what its flag said, None where it was not given.
    init_from: a run whose exported weights are the model, `run/RUN_ID`.
    """
    said: list[Override] = []
    bound: dict[str, tuple[str, str]] = {}
    if not recipe.free_parameters:
        document = _config(found, experiment)
        said, bound = _of_config(found, recipe, document) if document else ([], {})
    faults, overrides = parse_sets(sets)
    found.faults += faults
    faults, params = check_parameters(recipe, [*said, *overrides])
    found.faults += faults
    found.notices += ignored_bindings(recipe, flags)
    bound |= {name: (value, flag_of(name)) for name, value in flags.items() if value is not None}
    if init_from is not None:
        model = found.attempt(exported_model, recipe, init_from, flags.get("model"))
        if model:
            bound["model"] = (str(model), "--init-from")
    return Inputs(params, dict(_checked(found, recipe, bound)))


def flag_of(binding: str) -> str:
    """The flag of a binding."""
    return f"--{binding.replace('_', '-')}"


def exported_model(recipe: Recipe, text: str, model: str | None) -> Path:
    """The weights that the run `run/RUN_ID` exported. Raises UsageError, OperationError."""
    where = "--init-from"
    if recipe.binding("model") is None:
        raise UsageError(Fault(f"{recipe.id} starts from no model", where, "leave it away"))
    if model is not None:
        raise UsageError(Fault("--model and --init-from name two models", where, "keep one"))
    try:
        run = find_run(text.removeprefix("run/"))
    except UsageError as error:
        raise UsageError(*(dataclasses.replace(fault, where=where) for fault in error.faults)) from None
    weights = run.out / EXPORT
    if not weights.is_dir() or weights.is_symlink():
        made = "export" in _operations(run.job)
        remedy = f"tp export {run.run_id}" if made else "it must have trained, and its method must export"
        raise UsageError(Fault(f"{run.run_id} has no {EXPORT} in its output folder", where, remedy))
    return weights


def _operations(job: Path) -> tuple[str, ...]:
    from tuneplane.recipes.adapters import load_adapter

    return tuple(load_adapter(read(job).spec.recipe.adapter).OPERATIONS)


def _config(found: Findings, experiment: Path) -> Document | None:
    path = experiment / CONFIG_NAME
    if not path.exists() and not path.is_symlink():
        return None
    document = found.attempt(read_document, path)
    if document is None or document.value is None:
        return None
    if not isinstance(document.value, dict):
        found.faults.append(Fault("is not a mapping of parameters", str(path), "write KEY: VALUE lines"))
        return None
    return document


def _of_config(
    found: Findings, recipe: Recipe, document: Document
) -> tuple[list[Override], dict[str, tuple[str, str]]]:
    """What config.yaml says: parameters, and bindings by their names."""
    said: list[Override] = []
    bound: dict[str, tuple[str, str]] = {}
    for key, value in _leaves(document.value, ()):
        name, where = ".".join(map(str, key)), document.where(*key)
        if recipe.binding(name) is None:
            said.append(Override(name, value, None, where))
        elif isinstance(value, str) and value:
            bound[name] = (value, where)
        elif value is not None:
            found.faults.append(Fault(f"{name} is not text", where, f"write {name}: PATH"))
    return said, bound


def _leaves(value: dict[str, Any], key: Key) -> Iterator[tuple[Key, Any]]:
    for name, item in value.items():
        if isinstance(item, dict) and item:
            yield from _leaves(item, (*key, name))
        else:
            yield (*key, name), item


def _checked(
    found: Findings, recipe: Recipe, bound: Mapping[str, tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    for binding in recipe.bindings:
        if binding.name in bound:
            text, where = bound[binding.name]
            value = found.attempt(located, binding, text, where)
            if value:
                yield binding.name, value
        elif binding.required:
            flag = flag_of(binding.name)
            found.missing.append(Fault(f"{recipe.id} needs {flag}: {binding.help.en}", flag, f"say {flag} …"))
            found.unchecked.append(f"{binding.name.replace('_', ' ')}: {flag} was not given")


def located(binding: Binding, text: str, where: str) -> str:
    """What a binding names: an absolute path that is there, or the id of something on the hub. Raises UsageError.

    As Hugging Face's own tools do, a path that is there wins over an id of the same letters.
    """
    path = Path(os.path.expanduser(text))  # noqa: PTH111 (Path.expanduser raises where there is no such user)
    if text and os.path.exists(path):  # noqa: PTH110 (Path.exists raises for a name that is too long)
        return str(path.absolute())
    looks_like_path = text.startswith(("/", ".", "~")) or text.count("/") > 1 or _DATA_FILE.search(text)
    if binding.hub and not looks_like_path and _HUB_ID.fullmatch(text):
        return text
    name = f"{binding.name.replace('_', ' ')} {text!r}"
    if os.path.islink(path):  # noqa: PTH114 (as above)
        leads = f"{name} is a link to {os.readlink(path)!r}, which is not there"  # noqa: PTH115
        raise UsageError(Fault(leads, where, "name what the link is to lead to"))
    remedy = remedy_for(path.name, _beside(path), "name a path that this host and the compute nodes see")
    raise UsageError(Fault(f"{name} is not there", where, remedy))


def _beside(path: Path) -> list[str]:
    """Some names in the folder of `path`; none where that cannot be read."""
    try:
        with os.scandir(path.parent) as entries:
            return [entry.name for entry in itertools.islice(entries, 1000)]
    except (OSError, ValueError):
        return []
