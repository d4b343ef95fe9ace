"""A recipe's manifest: YAML in, a `Recipe` out, every unknown key and wrong type named with its line.

The catalog calls `recipe_of`; the format is `tuneplane/recipe/v1`, explained in docs/adapters.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tuneplane.kernel.errors import UsageError
from tuneplane.recipes import values
from tuneplane.recipes.adapters import Launch, adapter_names, does, load_adapter
from tuneplane.recipes.documents import Document, Key
from tuneplane.recipes.names import remedy_for
from tuneplane.recipes.outputs import OutputFields
from tuneplane.recipes.recipe import (
    USER_MANAGED,
    Binding,
    Entrypoint,
    ImagePin,
    Objective,
    Parameter,
    Recipe,
    Runtime,
    Words,
    digest_of,
)
from tuneplane.spec import ENTRYPOINTS, OPERATIONS

SCHEMA = "tuneplane/recipe/v1"
OBSERVABILITY = ("external", "platform")
BINDINGS = ("model", "train_data", "validation_data")
METHOD = re.compile(r"[a-z0-9][a-z0-9._-]*/[a-z0-9][a-z0-9._-]*")
PARAMETER_NAME = values.KEY
_VERSION = re.compile(r"[0-9]+(\.[0-9]+){1,2}")
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


def recipe_of(document: Document, method: str) -> Recipe:
    """The recipe in `document`, the manifest of that method. Raises UsageError with all faults."""
    reader = _Manifest(document)
    recipe = reader.recipe(method)
    if reader.faults or recipe is None:
        raise UsageError(*reader.faults)
    return recipe


class _Manifest(OutputFields):
    """Reads one manifest."""

    def recipe(self, method: str) -> Recipe | None:
        top = self.mapping(self.document.value, (), RECIPE_KEYS)
        if top is None:
            return None
        self.one_of(top, ("schema",), (SCHEMA,))
        name = self.text(top, ("id",), METHOD)
        if name and name != method:
            self.fault(("id",), f"id is {name}, but the file's place says {method}", "let them agree")
        parameters = self.table(top, ("parameters",), PARAMETER_NAME, self.parameter)
        self.no_nesting(p.name for p in parameters)
        metrics = self.metrics(top)
        adapter = self.text(top, ("adapter",))
        operations = self.operations(top, adapter)
        return Recipe(
            id=method,
            version=self.text(top, ("version",), _VERSION, "digits and dots, quoted: '1.0'"),
            title=self.words(top, ("title",), required=True),
            summary=self.words(top, ("summary",)),
            adapter=adapter,
            entrypoint=self.entrypoint(top),
            observability=self.one_of(top, ("observability",), OBSERVABILITY),
            runtimes=self.runtimes(top),
            scaffold=self.text(top, ("scaffold",), METHOD, default=method),
            requires_core=self.core(top),
            free_parameters=self.flag(top, ("free_parameters",)),
            parameters=parameters,
            bindings=self.table(top, ("bindings",), _NAME, self.binding),
            outputs=self.outputs(top),
            operations=operations,
            metrics=metrics,
            objective=self.objective(top, metrics),
            plugins=self.texts(top, ("plugins",)),
            digest="" if self.faults else digest_of(self.document.value),
        )

    def entrypoint(self, top: dict[str, Any]) -> Entrypoint:
        key: Key = ("entrypoint",)
        given = self.mapping(top.get("entrypoint"), key, ("kind", "value"))
        if given is None:
            return Entrypoint("", "")
        kind = self.one_of(given, (*key, "kind"), ENTRYPOINTS)
        if kind == "module":
            return Entrypoint(
                kind, self.text(given, (*key, "value"), _MODULE, "a module's name: trl.scripts.sft")
            )
        value = self.text(given, (*key, "value"))
        if value and not values.stays_below(value):
            self.fault((*key, "value"), f"entrypoint {value} leaves the experiment folder")
        return Entrypoint(kind, value)

    def operations(self, top: dict[str, Any], adapter: str) -> tuple[str, ...]:
        operations = self.texts(top, ("operations",)) if "operations" in top else ("train",)
        for operation in operations:
            if operation not in OPERATIONS:
                self.fault(("operations",), f"{operation} is none of {', '.join(OPERATIONS)}")
        if not adapter:
            return operations
        known = adapter_names()
        if adapter not in known:
            remedy = remedy_for(adapter, known, f"adapters: {', '.join(known)}")
            self.fault(("adapter",), f"there is no adapter {adapter}", remedy)
            return operations
        compiles = load_adapter(adapter).OPERATIONS
        for operation in operations:
            if operation in OPERATIONS and not does(adapter, operation):
                self.fault(("operations",), f"the {adapter} adapter does not compile {operation}")
        launches = {compiles[operation] for operation in operations if operation in compiles}
        if top.get("observability") != "platform" and launches - {Launch.EACH_NODE}:
            what = f"the {adapter} adapter starts through TunePlane's own kernel in the image"
            self.fault(("observability",), what, "observability: platform puts it there")
        return operations

    def core(self, top: dict[str, Any]) -> str:
        given = self.mapping(top.get("requires"), ("requires",), ("core",)) if "requires" in top else None
        specifier = self.text(given, ("requires", "core")) if given is not None else ""
        if specifier:
            from packaging.specifiers import InvalidSpecifier, SpecifierSet

            try:
                SpecifierSet(specifier)
            except InvalidSpecifier:
                self.fault(("requires", "core"), f"{specifier!r} is not a version specifier", "as in '>=0.5'")
        return specifier

    def parameter(self, name: str, given: dict[str, Any], key: Key) -> Parameter | None:
        if self.mapping(given, key, PARAMETER_KEYS) is None:
            return None
        kind = self.one_of(given, (*key, "type"), values.TYPES)
        if not kind:
            return None
        numeric = kind.removeprefix("list[").removesuffix("]") in ("int", "float")
        bounds = {b: self.number(given, (*key, b)) for b in ("min", "max") if b in given}
        if bounds and not numeric:
            self.fault(key, f"{name}: min and max belong to numbers, not to {kind}")
        parameter = Parameter(
            name=name,
            type=kind,
            required="default" not in given,
            default=given.get("default"),
            minimum=bounds.get("min"),
            maximum=bounds.get("max"),
            choices=tuple(self.items(given, (*key, "choices"))),
            unit=self.text(given, (*key, "unit"), default=""),
            help=self.words(given, (*key, "help"), required=True),
            group=self.text(given, (*key, "group"), default=""),
            to=self.text(given, (*key, "to"), default=""),
        )
        return self.consistent(parameter, key)

    def consistent(self, parameter: Parameter, key: Key) -> Parameter:
        """The parameter with choices and default as its type has them; faults where they do not fit."""
        import dataclasses

        low, high = parameter.minimum, parameter.maximum
        if low is not None and high is not None and low > high:
            self.fault((*key, "min"), f"{parameter.name}: min {low:g} is above max {high:g}")
        element = dataclasses.replace(
            parameter, type=parameter.type.removeprefix("list[").removesuffix("]"), choices=()
        )
        choices = []
        for choice in parameter.choices:
            try:
                choices.append(values.coerce(element, choice))
            except ValueError as error:
                self.fault((*key, "choices"), f"{parameter.name}: choice {error}")
        parameter = dataclasses.replace(parameter, choices=tuple(choices))
        if parameter.required or parameter.default is None:
            return parameter
        try:
            return dataclasses.replace(parameter, default=values.coerce(parameter, parameter.default))
        except ValueError as error:
            self.fault((*key, "default"), f"{parameter.name}: default {error}")
            return parameter

    def no_nesting(self, names: Iterable[str]) -> None:
        for name, inner in values.nested_pairs(names):
            self.fault(("parameters", inner), f"{name} cannot be a parameter and the group of {inner}")

    def binding(self, name: str, given: dict[str, Any], key: Key) -> Binding | None:
        if name not in BINDINGS:
            self.fault(key, f"{name} is none of {', '.join(BINDINGS)}")
        if self.mapping(given, key, ("required", "hub", "columns", "class_folders", "help", "to")) is None:
            return None
        return Binding(
            name=name,
            required=self.flag(given, (*key, "required")),
            hub=self.flag(given, (*key, "hub")),
            columns=self.columns(given, (*key, "columns")),
            class_folders=self.texts(given, (*key, "class_folders")),
            help=self.words(given, (*key, "help"), required=True),
            to=self.text(given, (*key, "to"), default=""),
        )

    def columns(self, given: dict[str, Any], key: Key) -> tuple[tuple[str, ...], ...]:
        sets = []
        for item in self.items(given, key):
            if isinstance(item, list) and item and all(isinstance(name, str) and name for name in item):
                sets.append(tuple(item))
            else:
                self.fault(
                    key, f"{item!r} is not a set of columns", "as in [[messages], [prompt, completion]]"
                )
        return tuple(sets)

    def metrics(self, top: dict[str, Any]) -> dict[str, tuple[str, ...]]:
        given = self.mapping(top.get("metrics", {}), ("metrics",))
        metrics: dict[str, tuple[str, ...]] = {}
        owner: dict[str, str] = {}
        for name in given or {}:
            metrics[name] = self.texts(given, ("metrics", name))
            for alias in {name, *metrics[name]}:
                if owner.setdefault(alias, name) != name:
                    self.fault(("metrics", name), f"{alias} names two metrics, {owner[alias]} and {name}")
        return metrics

    def objective(self, top: dict[str, Any], metrics: dict[str, tuple[str, ...]]) -> Objective | None:
        if top.get("objective") is None:
            return None
        given = self.mapping(top["objective"], ("objective",), ("metric", "goal"))
        if given is None:
            return None
        metric = self.text(given, ("objective", "metric"))
        if metric and metric not in metrics:
            remedy = remedy_for(metric, metrics, "declare it under metrics")
            self.fault(("objective", "metric"), f"{metric} is no metric of this recipe", remedy)
        return Objective(metric, self.one_of(given, ("objective", "goal"), ("minimize", "maximize")))

    def runtimes(self, top: dict[str, Any]) -> tuple[Runtime, ...]:
        key: Key = ("runtime",)
        given = self.mapping(top.get("runtime"), key, ("default_version", "versions"))
        if given is None:
            return ()
        default = self.text(given, (*key, "default_version"))
        versions = self.table(given, (*key, "versions"), re.compile(r".+"), self.one_runtime)
        if default == USER_MANAGED:
            if versions:
                self.fault((*key, "versions"), f"a {USER_MANAGED} runtime has no versions")
            return (Runtime(USER_MANAGED, USER_MANAGED),)
        if default and default not in (v.version for v in versions):
            self.fault((*key, "default_version"), f"{default} is none of the runtime's versions")
        return tuple(sorted(versions, key=lambda v: v.version != default))

    def one_runtime(self, version: str, given: dict[str, Any], key: Key) -> Runtime | None:
        if self.mapping(given, key, ("id", "requirements", "image")) is None:
            return None
        return Runtime(
            version=version,
            id=self.text(given, (*key, "id"), _NAME),
            requirements=self.texts(given, (*key, "requirements")),
            image=self.image(given["image"], (*key, "image")) if given.get("image") is not None else None,
        )

    def image(self, value: Any, key: Key) -> ImagePin | None:
        given = self.mapping(value, key, ("reference", "digest", "checked"))
        if given is None:
            return None
        return ImagePin(
            reference=self.text(given, (*key, "reference")),
            digest=self.text(given, (*key, "digest"), _DIGEST, "sha256: and 64 hex digits"),
            checked=self.flag(given, (*key, "checked"), default=True),
        )

    def words(self, holder: dict[str, Any], key: Key, required: bool = False) -> Words:
        value = holder.get(str(key[-1]))
        if value is None and not required:
            return Words("", "")
        if isinstance(value, str) and value:  # a site that has one language
            return Words(value, value)
        given = self.mapping(value, key, ("en", "zh"))
        if given is None:
            return Words("", "")
        return Words(self.text(given, (*key, "en")), self.text(given, (*key, "zh")))


RECIPE_KEYS = (
    "schema",
    "id",
    "version",
    "title",
    "summary",
    "adapter",
    "entrypoint",
    "scaffold",
    "requires",
    "free_parameters",
    "parameters",
    "bindings",
    "observability",
    "outputs",
    "operations",
    "metrics",
    "objective",
    "plugins",
    "runtime",
)
PARAMETER_KEYS = ("type", "default", "min", "max", "choices", "unit", "help", "group", "to")
