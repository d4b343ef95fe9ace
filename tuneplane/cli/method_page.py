"""A method as a page of text for a terminal: what it is, its parameters by group, and what it leaves. Pure.

`tp methods NAME` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from tuneplane.cli.show import columns_of, plain
from tuneplane.recipes.outputs import STANDARD_OUTPUTS
from tuneplane.recipes.recipe import USER_MANAGED, Binding, Parameter, Recipe, Runtime, Words
from tuneplane.recipes.values import written

Language = Literal["en", "zh"]

_NARROWEST = 40
_WIDEST_CELL = 28
"""Columns that one cell of a table takes at most, the last one apart."""

_HEADINGS = ("PARAMETER", "TYPE", "DEFAULT", "VALUES")
_INDENT = 2

_BESIDE = 6
"""Before the help below a parameter."""


def method_page(recipe: Recipe, language: Language, width: int) -> Iterator[str]:
    """The lines of a page of so many columns; nothing is cut, long texts are wrapped."""
    width = max(_NARROWEST, width)
    yield from _fields(_about(recipe, language), width)
    sections = (
        ("bindings", _table(_bindings(recipe, language), width)),
        ("metrics, and the names that stand for them", _table(_metrics(recipe), width)),
        ("outputs, below the output folder", _table(_outputs(recipe), width)),
        ("runtimes", _fields(_runtimes(recipe), width)),
    )
    yield from _parameters(recipe, language, width)
    for title, lines in sections:
        body = list(lines)
        if body:
            yield from ("", title, *body)


def said(words: Words, language: Language) -> str:
    """A text in that language."""
    return plain(words.zh if language == "zh" else words.en)


def _about(recipe: Recipe, language: Language) -> Iterator[tuple[str, str]]:
    yield "method", f"{recipe.id} {recipe.version}"
    yield "title", said(recipe.title, language)
    yield "about", said(recipe.summary, language)
    kind = (
        "in the experiment's folder" if recipe.entrypoint.kind == "experiment" else "of Python, in the image"
    )
    noun = "" if recipe.entrypoint.kind == "experiment" else "module "
    yield "entry", f"{noun}{recipe.entrypoint.value}, {kind}"
    yield "adapter", recipe.adapter
    external = recipe.observability == "external"
    yield "metrics go", "to your own tracker, at --observability-url" if external else "to the platform"
    yield "operations", ", ".join(recipe.operations)
    if recipe.objective is not None:
        yield "objective", f"{recipe.objective.goal} {recipe.objective.metric}"
    yield "plugins", f"needs {', '.join(recipe.plugins)}" if recipe.plugins else ""
    yield "tuneplane", recipe.requires_core
    yield "digest", recipe.digest


def _parameters(recipe: Recipe, language: Language, width: int) -> Iterator[str]:
    if recipe.free_parameters:
        yield from (
            "",
            "parameters: any --set is taken" + (", these are declared" if recipe.parameters else ""),
        )
    groups = list(dict.fromkeys(parameter.group for parameter in recipe.parameters))
    cells = {p.name: (p.name, p.type, _default(p), _range(p)) for p in recipe.parameters}
    widths = _widths([_HEADINGS, *cells.values()], width)
    to = {parameter.to for parameter in recipe.parameters}
    for group in groups:
        yield from ("", f"parameters, {plain(group)}" if group else "parameters")
        yield from _row(_HEADINGS, widths)
        for parameter in recipe.parameters:
            if parameter.group != group:
                continue
            name, kind, default, values = cells[parameter.name]
            below = [said(parameter.help, language)]
            if columns_of(values) > widths[-1]:
                below, values = [*below, values], ""
            if len(to) > 1 and parameter.to not in ("", parameter.name):
                below.append(f"goes to {plain(parameter.to)}")
            yield from _row((name, kind, default, values), widths)
            for text in below:
                for line in wrapped(text, width - _BESIDE):
                    yield " " * _BESIDE + line


def _default(parameter: Parameter) -> str:
    return "required" if parameter.required else written(parameter.default)


def _range(parameter: Parameter) -> str:
    low, high = parameter.minimum, parameter.maximum
    parts = []
    if low is not None and high is not None:
        parts.append(f"{_bound(low)} to {_bound(high)}")
    elif low is not None:
        parts.append(f"at least {_bound(low)}")
    elif high is not None:
        parts.append(f"at most {_bound(high)}")
    if parameter.choices:
        parts.append(" | ".join(map(written, parameter.choices)))
    if parameter.unit:
        parts.append(f"({parameter.unit})")
    return " ".join(parts)


def _bound(number: float) -> str:
    return str(int(number)) if number == int(number) and abs(number) < 1e15 else repr(number)


def _bindings(recipe: Recipe, language: Language) -> list[tuple[str, ...]]:
    rows = [
        (
            f"--{binding.name.replace('_', '-')}",
            "required" if binding.required else "optional",
            "a hub id or a path" if binding.hub else "a path",
            said(binding.help, language) + _form(binding),
        )
        for binding in recipe.bindings
    ]
    return [("FLAG", "", "TAKES", ""), *rows] if rows else []


def _form(binding: Binding) -> str:
    """What the data must be, where its binding says so."""
    if binding.class_folders:
        return f" (folders of classes: {plain(', '.join(binding.class_folders))})"
    sets = " | ".join(", ".join(columns) for columns in binding.columns)
    return f" (columns: {plain(sets)})" if sets else ""


def _metrics(recipe: Recipe) -> list[tuple[str, ...]]:
    rows = [(name, ", ".join(aliases)) for name, aliases in recipe.metrics.items()]
    return [("METRIC", "ALSO CALLED"), *rows] if rows else []


def _outputs(recipe: Recipe) -> list[tuple[str, ...]]:
    every = {output.name for output in STANDARD_OUTPUTS}
    rows = [
        (
            output.name,
            output.kind + (f", step in {output.step_key}" if output.step_key else ""),
            output.path + (" (every run)" if output.name in every else ""),
        )
        for output in (*recipe.outputs, *STANDARD_OUTPUTS)
    ]
    return [("OUTPUT", "KIND", "PATH"), *rows]


def _runtimes(recipe: Recipe) -> list[tuple[str, str]]:
    if recipe.user_managed:
        return [(USER_MANAGED, "the image is yours, by --image")]
    found = []
    for index, runtime in enumerate(recipe.runtimes):
        found += [
            (runtime.version, f"{runtime.id}{' (default)' if index == 0 else ''}"),
            ("  needs", ", ".join(runtime.requirements)),
            ("  image", _image(runtime)),
            ("  pinned to", runtime.image.digest if runtime.image else ""),
        ]
    return found


def _image(runtime: Runtime) -> str:
    if runtime.image is None:
        return "none pinned: the site's, or --image"
    checked = "checked against a registry" if runtime.image.checked else "not checked against a registry"
    return f"{runtime.image.reference} ({checked})"


# Lines that fit


def _fields(pairs: Sequence[tuple[str, str]] | Iterator[tuple[str, str]], width: int) -> Iterator[str]:
    told = [(name, value) for name, value in pairs if value]
    longest = min(_WIDEST_CELL, max((columns_of(name) for name, _ in told), default=0))
    for name, value in told:
        yield from _row((name, value), [longest, width - _INDENT - longest], indent=0)


def _table(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    widths = _widths(rows, width) if rows else []
    for row in rows:
        yield from _row(row, widths)


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Of each column; the last one has the rest."""
    widest = [max(columns_of(cell) for cell in column) for column in zip(*rows, strict=True)]
    fixed = [min(_WIDEST_CELL, each) for each in widest[:-1]]
    while sum(fixed) + _INDENT * (len(fixed) + 1) > width - 16 and max(fixed) > 12:
        fixed[fixed.index(max(fixed))] -= 1
    return [*fixed, width - sum(fixed) - _INDENT * (len(fixed) + 1)]


def _row(cells: Sequence[str], widths: Sequence[int], indent: int = _INDENT) -> Iterator[str]:
    """One row in as many lines as its longest cell needs."""
    parts = [wrapped(plain(cell), width) or [""] for cell, width in zip(cells, widths, strict=True)]
    for index in range(max(map(len, parts))):
        line = [part[index] if index < len(part) else "" for part in parts]
        padded = (cell + " " * (width - columns_of(cell)) for cell, width in zip(line, widths, strict=True))
        yield (" " * indent + "  ".join(padded)).rstrip()


_AFTER = frozenset("/_-.,@:=|")
"""Behind these a word too long for its line is broken, where one of them is near."""


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most so many columns: broken at spaces, before wide characters, else behind a separator."""
    lines: list[str] = []
    line = ""
    for piece in _pieces(text, width):
        if line and columns_of(line + piece.rstrip()) > width:
            lines.append(line.rstrip())
            line = ""
        line += piece
    return [*lines, line.rstrip()] if line.strip() else lines


def _pieces(text: str, width: int) -> Iterator[str]:
    """Words, those that are longer than a line in parts."""
    for word in _words(text):
        rest = word
        while columns_of(rest.rstrip()) > width and not word.startswith(_WHOLE):
            cut = _cut(rest, width)
            yield rest[:cut]
            rest = rest[cut:]
        yield rest


_WHOLE = "sha256:"
"""A word that begins so is longer than some lines, and of no use in parts."""

_CLINGING = frozenset(" ，。；：、）！？")
"""No line begins with these."""


def _words(text: str) -> Iterator[str]:
    """Pieces between which a line may end, each with the spaces behind it."""
    word = ""
    for before, character in zip(" " + text, text, strict=False):
        wide = columns_of(character) > 1
        begins = before == " " or wide or columns_of(before) > 1
        if word and begins and character not in _CLINGING:
            yield word
            word = ""
        word += character
    if word:
        yield word


def _cut(word: str, width: int) -> int:
    """How many characters of a word fill a line, ending behind a separator where one is in its second half."""
    end = 0
    while end < len(word) and columns_of(word[: end + 1]) <= width:
        end += 1
    for place in range(end, end // 2, -1):
        if word[place - 1] in _AFTER:
            return place
    return max(1, end)
