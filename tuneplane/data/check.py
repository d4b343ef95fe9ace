"""What a run would read, looked at before the queue: rows and columns, the model's files, an offline site's cache.

Compile calls `check_inputs`; which columns there must be, the recipe says.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneplane.compose import Composed
from tuneplane.data import forms, hub
from tuneplane.data.classes import class_faults
from tuneplane.data.files import HELD_OUT, data_files, described
from tuneplane.data.rows import NotLookedAt, Row, read_rows
from tuneplane.findings import Findings
from tuneplane.hf_export.weights import has_tokenizer, model_problems
from tuneplane.inputs import Inputs, flag_of
from tuneplane.kernel.errors import Fault
from tuneplane.profile import Placement
from tuneplane.recipes.adapters import input_faults
from tuneplane.recipes.recipe import Binding, Recipe

LOOK_S = 10.0
"""How long one data set is looked at: some 100 MB of JSON. A submit is to be answered, not to be waited for."""

DATA = ("train_data", "validation_data")


def check_inputs(
    found: Findings,
    recipe: Recipe,
    inputs: Inputs,
    composed: Composed | None,
    placement: Placement | None,
) -> None:
    """Look at what the bindings name and how it fits the parameters; everything wrong goes to `found`.

    composed: site and profile, None where none was given. placement: None where that is not known either.
    """
    ranks = placement.nodes * placement.gpus_per_node if placement else None
    environment = None
    if composed is not None:
        environment = {**composed.config.site.environment, **composed.config.cluster.environment}
    found.faults += input_faults(recipe.adapter, inputs.params, inputs.bindings, ranks)
    for binding in recipe.bindings:
        value = inputs.bindings.get(binding.name)
        if value is None:
            continue
        if not value.startswith("/"):
            _check_hub(found, binding, value, inputs, environment)
        elif binding.name == "model":
            found.faults += model_faults(Path(value))
        elif binding.class_folders:
            found.faults += class_faults(Path(value), binding.class_folders, binding.name.replace("_", " "))
        elif binding.columns:
            look = look_at(binding, Path(value), inputs.params)
            found.faults += look.faults
            found.notices += look.notices
            found.unchecked += look.unchecked
    found.faults += _split_faults(inputs.bindings)


def model_faults(path: Path) -> list[Fault]:
    """What keeps a local model from being loaded."""
    where = str(path)
    if not path.is_dir():
        return [Fault("model is a file, not a folder with config.json and weights", where, "name its folder")]
    problems = model_problems(path)
    faults = [Fault(f"model {problem}", where, _model_remedy(problem)) for problem in problems]
    if not has_tokenizer(path):
        remedy = "save the tokenizer beside it: tokenizer.save_pretrained(FOLDER)"
        faults.append(Fault("model has no tokenizer", where, remedy))
    return faults


@dataclass
class Look:
    """What looking at one data set found. rows: how many were read."""

    name: str
    columns: forms.Columns | None = None
    shape: tuple[str, ...] | None = None
    rows: int = 0
    faults: list[Fault] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)


def look_at(binding: Binding, path: Path, params: Mapping[str, Any], seconds: float = LOOK_S) -> Look:
    """Read a data set's rows for as long as `seconds` allow, and note what is wrong with them."""
    look = Look(binding.name.replace("_", " "))
    if path.is_dir() and described(path):
        look.unchecked.append(f"{look.name}: {path} has a card that says which files it is made of")
        return look
    try:
        files, faults = data_files(path, look.name)
    except OSError as error:
        files, faults = [], [Fault(f"cannot be read: {error.strerror}", str(path))]
    look.faults += faults
    sets = [tuple(_named(column, params) for column in columns) for columns in binding.columns]
    until = time.monotonic() + seconds
    for index, file in enumerate(files):
        if index and time.monotonic() > until:
            left = f"{len(files) - index:,} of {len(files):,} files were not"
            look.notices.append(f"{look.name}: {look.rows:,} rows were looked at in {seconds:g} s; {left}")
            break
        try:
            whole, share = _read(look, file, sets, until)
        except NotLookedAt as error:
            look.unchecked.append(f"{look.name}: the rows of {file} ({error})")
            continue
        except OSError as error:
            look.faults.append(Fault(f"cannot be read: {error.strerror}", str(file)))
            continue
        if not whole:
            left = f", and {len(files) - index - 1} more files" if index + 1 < len(files) else ""
            look.notices.append(
                f"{look.name}: {look.rows:,} rows were looked at in {seconds:g} s; "
                f"the rest of {file} ({100 - share}% of it{left}) was not"
            )
            break
    return look


def _read(look: Look, file: Path, sets: Sequence[forms.Columns], until: float) -> tuple[bool, int]:
    """Read one file. Whether all of it was read, and else how many percent."""
    counted: dict[str, tuple[Fault, int]] = {}
    size, rows, share, whole = file.stat().st_size, 0, 100, True
    for number, item in enumerate(read_rows(file), 1):
        if number > 1 and time.monotonic() > until:  # of each file one row at least
            offset = item.offset if isinstance(item, Row) else 0
            whole, share = False, min(99, 100 * offset // max(1, size))
            break
        if isinstance(item, Fault):
            _count(counted, item.what.partition(":")[0], item)
            continue
        rows += 1
        if look.columns is None and isinstance(item.value, dict):
            present = [str(name) for name in item.value]
            look.columns = forms.choose(sets, present)
            if look.columns is None:
                what, remedy = forms.lacking(sets, present)
                _count(counted, "columns", Fault(f"{look.name} {what}", item.where, remedy))
                break
        _judge(look, counted, item)
    look.rows += rows
    if not rows and not counted:
        counted["empty"] = Fault(f"{look.name} has no rows", str(file)), 1
    for fault, number in counted.values():
        more = f" (and {number - 1:,} more like it)" if number > 1 else ""
        look.faults.append(Fault(f"{fault.what}{more}", fault.where, fault.remedy))
    return whole, share


def _judge(look: Look, counted: dict[str, tuple[Fault, int]], row: Row) -> None:
    columns = look.columns or ()
    sort, what = forms.problem(row.value, columns)
    if what:
        _count(counted, sort, Fault(what, row.where))
        return
    shape = forms.shape(row.value, columns)
    if look.shape is None:
        look.shape = shape
    elif shape != look.shape:
        differing = next(new for new, first in zip(shape, look.shape, strict=True) if new != first)
        _count(
            counted,
            "shape",
            Fault(f"{differing}, in the rows before it is not", row.where, "one kind in all rows"),
        )


def _count(counted: dict[str, tuple[Fault, int]], sort: str, fault: Fault) -> None:
    first, number = counted.get(sort, (fault, 0))
    counted[sort] = first, number + 1


def _named(column: str, params: Mapping[str, Any]) -> str:
    """The column that a manifest means: `{name}` is the value of that parameter."""
    if column.startswith("{") and column.endswith("}"):
        return str(params.get(column[1:-1], column[1:-1]))
    return column


def _check_hub(
    found: Findings, binding: Binding, value: str, inputs: Inputs, environment: Mapping[str, str] | None
) -> None:
    label, where = binding.name.replace("_", " "), flag_of(binding.name)
    if environment is None or not hub.is_offline(environment):
        found.unchecked.append(f"{label}: {value} on the Hub")
        return
    model = binding.name == "model"
    cache = hub.hub_cache(environment) if model else hub.datasets_cache(environment)
    if cache is None:
        what = (
            f"{value} would come from the Hub, and the site is offline (HF_HUB_OFFLINE) and names no HF_HOME"
        )
        found.faults.append(Fault(what, where, "name a folder of your own, or ask the site for HF_HOME"))
    elif not cache.parent.is_dir():
        found.unchecked.append(f"{label}: {cache} is not to be seen from this host")
    elif model:
        revision = str(inputs.params.get("model_revision") or "main")
        found.faults += hub.cached_model_faults(value, revision, cache, where)
    else:
        found.faults += hub.cached_dataset_faults(value, cache, where)


def _split_faults(bindings: Mapping[str, str]) -> list[Fault]:
    """A folder with splits of its own, and a validation set besides: both would be trained on."""
    train, validation = (bindings.get(name) for name in DATA)
    if not train or not validation or not train.startswith("/") or not Path(train).is_dir():
        return []
    files, _ = data_files(Path(train), "")
    held_out = [file for file in files if HELD_OUT.search(file.relative_to(train).as_posix())]
    if not held_out:
        return []
    what = f"training data holds data to evaluate on, {held_out[0].relative_to(train)}, which would be trained on"
    return [Fault(what, train, "name the training files' own folder, or leave --validation-data away")]


def _model_remedy(problem: str) -> str:
    if "git-lfs" in problem:
        return "git lfs pull in its folder"
    if "LoRA" in problem:
        return "merge them first: tp export RUN makes hf_export of a run"
    return "copy or download it again"
