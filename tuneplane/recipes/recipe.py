"""A recipe as types: what its publisher declares and no experiment can change.

`manifest.py` makes one from YAML; compile, the lock and `tp methods` read it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

USER_MANAGED = "user-managed"
"""The runtime version of recipes whose image is the user's affair (C27)."""


@dataclass(frozen=True)
class Words:
    """A text for people, in English and Chinese."""

    en: str
    zh: str


@dataclass(frozen=True)
class Entrypoint:
    """What starts. kind `experiment`: `value` is a file's path inside the experiment folder; kind `module`: the
    name of a Python module in the image.
    """

    kind: str
    value: str


@dataclass(frozen=True)
class Parameter:
    """One declared parameter.

    type: bool, int, float, str, or list[…] of those. minimum, maximum: inclusive, of each element of a list.
    required: it has no default. nullable: its default is null, so null is a value.
    unit: as people read it (`seconds`). to: where the adapter puts it, in the adapter's own words.
    """

    name: str
    type: str
    required: bool
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[Any, ...] = ()
    unit: str = ""
    help: Words = Words("", "")
    group: str = ""
    to: str = ""

    @property
    def nullable(self) -> bool:
        return not self.required and self.default is None


@dataclass(frozen=True)
class Binding:
    """A flag of submit that the recipe binds: `model`, `train_data` or `validation_data` (C29).

    hub: whether it may be the id of a model or dataset of the Hugging Face hub, besides a path.
    columns: sets of columns of which each row of the data must have one; `{name}` is what that parameter says.
    class_folders: folders that must be in it, each with a folder for each class.
    """

    name: str
    required: bool = False
    hub: bool = False
    columns: tuple[tuple[str, ...], ...] = ()
    class_folders: tuple[str, ...] = ()
    help: Words = Words("", "")
    to: str = ""


@dataclass(frozen=True)
class Output:
    """An output besides those that every run has (C13, C21).

    path: a glob below the output folder. kind: artifact, tensorboard or jsonl.
    step_key: of jsonl, the key of each line that holds the step.
    """

    name: str
    path: str
    kind: str = "artifact"
    step_key: str = ""


@dataclass(frozen=True)
class Objective:
    """The metric that a sweep of this recipe optimises. goal: minimize or maximize."""

    metric: str
    goal: str


@dataclass(frozen=True)
class ImagePin:
    """The image of a runtime. digest: `sha256:…`. checked: whether a registry confirmed tag and digest."""

    reference: str
    digest: str
    checked: bool = True


@dataclass(frozen=True)
class Runtime:
    """One version of a recipe's framework: what must be installed, the id that sites know it by, its image."""

    version: str
    id: str
    requirements: tuple[str, ...] = ()
    image: ImagePin | None = None


@dataclass(frozen=True)
class Recipe:
    """A recipe of the catalog. `id` is its name in full, `custom/custom`."""

    id: str
    version: str
    title: Words
    adapter: str
    entrypoint: Entrypoint
    observability: str  # external | platform (C22)
    runtimes: tuple[Runtime, ...]  # the default one first
    scaffold: str  # the method whose scaffold `tp new` copies; its own as a rule
    requires_core: str  # version specifier of TunePlane
    summary: Words = Words("", "")
    free_parameters: bool = False  # takes any --set, declared or not
    parameters: tuple[Parameter, ...] = ()
    bindings: tuple[Binding, ...] = ()
    outputs: tuple[Output, ...] = ()
    operations: tuple[str, ...] = ("train",)
    metrics: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)  # canonical → aliases
    objective: Objective | None = None
    plugins: tuple[str, ...] = ()  # algorithms that it needs (C34)
    digest: str = ""  # of what the manifest says, its comments and key order apart

    @property
    def framework(self) -> str:
        return self.id.partition("/")[0]

    @property
    def runtime(self) -> Runtime:
        """The default runtime."""
        return self.runtimes[0]

    @property
    def user_managed(self) -> bool:
        """Whether the image is the user's affair."""
        return self.runtime.version == USER_MANAGED

    def binding(self, name: str) -> Binding | None:
        return next((b for b in self.bindings if b.name == name), None)

    def parameter(self, name: str) -> Parameter | None:
        return next((p for p in self.parameters if p.name == name), None)

    @property
    def manifest_digest(self) -> str:
        """Digest of the interface alone: what an experiment can have been written against."""
        return digest_of(
            {
                "entrypoint": dataclasses.asdict(self.entrypoint),
                "parameters": {p.name: p.type for p in self.parameters},
                "free_parameters": self.free_parameters,
                "runtime": self.runtime.id,
                "outputs": {o.name: [o.path, o.kind, o.step_key] for o in self.outputs},
            }
        )


def digest_of(value: Any) -> str:
    """`sha256:<hex>` of the canonical JSON of a plain value: keys sorted, no spaces, UTF-8."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=True)
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
