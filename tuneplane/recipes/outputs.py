"""Outputs that a recipe declares in its manifest, or an experiment in `outputs.yaml`, besides those of every run.

The manifest reads its section with `OutputFields`; compiling calls `all_outputs` (C13, C21).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from tuneplane import spec
from tuneplane.kernel.errors import Fault, UsageError
from tuneplane.recipes import values
from tuneplane.recipes.documents import Key, read_document
from tuneplane.recipes.fields import Fields
from tuneplane.recipes.recipe import Output, Recipe

OUTPUTS_NAME = "outputs.yaml"
"""In the experiment's folder, where it declares any."""

STANDARD_OUTPUTS = (
    Output("checkpoints", "checkpoints/*"),
    Output("logs", "logs"),
    Output("hf_export", "hf_export"),
    Output("eval", "eval/report.json"),
)
"""What the platform finds below every output folder (C13)."""

OUTPUT_KINDS = ("artifact", "tensorboard", "jsonl")
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


class OutputFields(Fields):
    """Reads a table `outputs`: name → path, kind, step_key."""

    def outputs(self, top: dict[str, Any]) -> tuple[Output, ...]:
        return self.table(top, ("outputs",), _NAME, self.output)

    def output(self, name: str, given: dict[str, Any], key: Key) -> Output | None:
        if self.mapping(given, key, ("path", "kind", "step_key")) is None:
            return None
        path = self.text(given, (*key, "path"))
        problem = wrong_pattern(path) if path else ""
        if problem:
            self.fault((*key, "path"), f"output {values.shown(path)} {problem}")
        kind = self.one_of(given, (*key, "kind"), OUTPUT_KINDS) if "kind" in given else "artifact"
        step_key = self.text(given, (*key, "step_key"), default="")
        if (kind == "jsonl") != bool(step_key):
            self.fault(key, f"output {name}: step_key goes with kind jsonl, and jsonl needs one")
        return Output(name, path, kind, step_key)


def wrong_pattern(path: str) -> str:
    """Why a glob below the output folder can find nothing, or not what is meant; empty where it can."""
    parts = path.split("/")
    if "" in parts[1:]:
        return "has an empty part: two / in a row, or one at its end"
    if not values.stays_below(path):
        return "leaves the output folder"
    if any("[" in re.sub(r"\[!?\]?[^]]*\]", "", part) for part in parts):
        return "has a [ without its ]: [[] stands for the character itself"
    return ""


def all_outputs(experiment: Path, recipe: Recipe) -> list[spec.Output]:
    """What is looked for below the output folder of a run. Raises UsageError with all faults, OperationError."""
    taken = {output.name: "every run" for output in STANDARD_OUTPUTS}
    taken.update((output.name, recipe.id) for output in recipe.outputs)
    declared = (*STANDARD_OUTPUTS, *recipe.outputs, *read_outputs(experiment, taken))
    return [spec.Output(o.name, o.path, o.kind, o.step_key) for o in declared]


def read_outputs(experiment: Path, taken: dict[str, str]) -> tuple[Output, ...]:
    """What an experiment declares in its `outputs.yaml`; none where it has no such file.

    taken: names that are declared already, and by whom. Raises UsageError with all faults, OperationError.
    """
    path = experiment / OUTPUTS_NAME
    if not os.path.lexists(path):
        return ()
    if path.is_symlink() and not path.resolve().is_relative_to(experiment.resolve()):
        raise UsageError(Fault("is a link that leaves the experiment folder", str(path)))
    document = read_document(path)
    fields = OutputFields(document)
    top = fields.mapping(document.value, (), ("outputs",))
    found = fields.outputs(top) if top else ()
    for output in found:
        if output.name in taken:
            what = f"{output.name} is declared already, by {taken[output.name]}"
            fields.fault(("outputs", output.name), what, "give it another name")
    if fields.faults:
        raise UsageError(*fields.faults)
    return found
