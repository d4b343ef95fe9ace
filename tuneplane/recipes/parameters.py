"""What a submit says about parameters, against what the recipe declares (C29). Compose and submit call it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tuneplane.kernel.errors import Fault, UsageError
from tuneplane.recipes.documents import parse_text, scalar
from tuneplane.recipes.names import remedy_for
from tuneplane.recipes.recipe import Recipe
from tuneplane.recipes.values import KEY, coerce, flatten, nested_pairs, shown, unfit

QUOTE = "text that looks like something else goes in quotes of its own: --set 'KEY=\"…\"'"


@dataclass(frozen=True)
class Override:
    """One parameter that somebody gave a value.

    key: flat (`optimizer.lr`). text: the value as written on the command line; None from a file.
    where: the flag or the file it stands in, for messages.
    """

    key: str
    value: Any
    text: str | None
    where: str


def parse_set(text: str) -> list[Override]:
    """`KEY=VALUE` of one `--set`; a mapping (`opt={lr: 1}`) gives one override for each of its keys.

    The value is a scalar as in a Hydra override, a list `[1, 2]`, a mapping `{a: 1}` or text in quotes;
    whatever else it is, it is text, to the letter: `a: b`, `*.txt`, `x # y`, `1,2`. Raises UsageError.
    """
    key, equals, written = text.partition("=")
    where = f"--set {shown(text)}"
    if not equals:
        raise UsageError(Fault("has no =", where, "write --set KEY=VALUE"))
    if not KEY.fullmatch(key):
        bare = key.strip().lstrip("+~")
        remedy = (
            f"write --set {bare}=…" if KEY.fullmatch(bare) else "a key is words joined by dots: optimizer.lr"
        )
        raise UsageError(Fault(f"{key!r} is not a key" if key else "has no key", where, remedy))
    value, bare_text = _value(written, where)
    problem = unfit(value)
    if problem:
        raise UsageError(Fault(problem, where, QUOTE))
    if not isinstance(value, dict) or not value:
        return [Override(key, value, bare_text, where)]
    flat = flatten(value, f"{key}.")
    for inner in flat:
        if not KEY.fullmatch(inner):
            raise UsageError(Fault(f"{inner!r} is not a key", where, "a key is words joined by dots"))
    return [Override(inner, item, None, where) for inner, item in flat.items()]


def _value(written: str, where: str) -> tuple[Any, str | None]:
    """The value that a command line means, and its text where it was not quoted."""
    stripped = written.strip(" \t\n")
    wanted: dict[str, type] = {"[": list, "{": dict, '"': str, "'": str}
    kind = wanted.get(stripped[:1])
    if kind is None:
        try:
            return scalar(stripped), stripped
        except ValueError:
            raise UsageError(Fault(f"{shown(stripped)} has too many digits", where, QUOTE)) from None
    value = parse_text(stripped, where)
    if not isinstance(value, kind):
        raise UsageError(Fault(f"{shown(stripped)} is not one {kind.__name__}", where, QUOTE))
    return value, None


def parse_sets(texts: Iterable[str]) -> tuple[list[Fault], list[Override]]:
    """Every `--set` of a command line, with all that is wrong with them: a key given twice is."""
    faults: list[Fault] = []
    overrides: dict[str, Override] = {}
    for text in texts:
        try:
            parsed = parse_set(text)
        except UsageError as error:
            faults.extend(error.faults)
            continue
        for override in parsed:
            if override.key in overrides:
                earlier = overrides[override.key].where
                faults.append(
                    Fault(f"{override.key} was given by {earlier} already", override.where, "keep one")
                )
            overrides.setdefault(override.key, override)
    return faults, list(overrides.values())


def overrides_of(config: Mapping[str, Any], where: str) -> list[Override]:
    """What a parsed config.yaml says, as overrides. `where` names the file."""
    return [Override(key, value, None, f"{where}: {key}") for key, value in flatten(config).items()]


def check_parameters(recipe: Recipe, given: Iterable[Override]) -> tuple[list[Fault], dict[str, Any]]:
    """`spec.hyperparams`: the declared defaults with what was given over them, later wins; and all faults.

    A recipe with free parameters takes any key. Declared parameters without a value are faults.
    """
    faults: list[Fault] = []
    values = {p.name: p.default for p in recipe.parameters if not p.required}
    names = [p.name for p in recipe.parameters]
    said: dict[str, Override] = {}
    for override in given:
        said[override.key] = override
        parameter = recipe.parameter(override.key)
        problem = unfit(override.value)
        if parameter is not None:
            try:
                values[override.key] = coerce(parameter, override.value, override.text)
            except ValueError as error:
                unit = f" (in {parameter.unit})" if parameter.unit else ""
                remedy = f"{parameter.help.en}{unit}" if parameter.help.en else ""
                faults.append(Fault(f"{override.key}: {error}", override.where, remedy))
        elif problem:
            faults.append(Fault(problem, override.where, QUOTE))
        elif recipe.free_parameters:
            values[override.key] = override.value
        else:
            remedy = remedy_for(override.key, names, f"tp methods {recipe.id} lists the parameters")
            if recipe.binding(override.key) is not None:  # one of config.yaml is none of these any more
                remedy = f"say --{override.key.replace('_', '-')} PATH"
            faults.append(Fault(f"{recipe.id} has no parameter {override.key}", override.where, remedy))
    for parameter in recipe.parameters:
        if parameter.required and parameter.name not in said:
            remedy = f"--set {parameter.name}=… ({parameter.type}: {parameter.help.en})"
            faults.append(Fault(f"{recipe.id} needs a value for {parameter.name}", "", remedy))
    for group, inner in nested_pairs(said):
        faults.append(
            Fault(f"{group} cannot have a value and be the group of {inner}", said[inner].where, "keep one")
        )
    return faults, values


def ignored_bindings(recipe: Recipe, flags: Mapping[str, str | None]) -> list[str]:
    """What submit says about `--model`, `--train-data` and the like that the recipe does not bind (C29).

    flags: binding name (`train_data`) → what the flag said, None where it was not given.
    """
    bound = {b.name for b in recipe.bindings}
    return [
        f"{recipe.id} ignores --{name.replace('_', '-')}: its recipe binds no {name.replace('_', ' ')}"
        for name, value in flags.items()
        if value is not None and name not in bound
    ]
