"""`tp methods`: the catalog, and one of its methods."""

from __future__ import annotations

import dataclasses
import io
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from tuneplane.cli.context import load_methods
from tuneplane.cli.show import show_json, show_notices, show_table, terminal_width
from tuneplane.kernel.errors import Exit, UsageError

if TYPE_CHECKING:
    from tuneplane.cli.method_page import Language

_PIPED_WIDTH = 80
_WIDEST = 100


def language_of(environ: Mapping[str, str]) -> Language:
    """The language of a locale's messages: the first of LC_ALL, LC_MESSAGES, LANG that is set (POSIX, 8.2)."""
    locale = next((environ[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if environ.get(name)), "")
    return "zh" if locale.lower().startswith("zh") else "en"


@click.command("methods")
@click.argument("name", required=False)
@click.option("--lang", type=click.Choice(["en", "zh"]), help="Of texts; your locale's where not given.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def methods_command(name: str | None, lang: Language | None, as_json: bool) -> int:
    """List the catalog's methods, or show the one called NAME with its parameters."""
    from tuneplane.cli.method_page import method_page, said

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # Chinese in a terminal that is not of UTF-8
    language = lang or language_of(os.environ)
    catalog = load_methods()
    if name is not None:
        recipe = catalog.get(name)
        if as_json:
            show_json([dataclasses.asdict(recipe)])
            return Exit.DONE
        for line in method_page(recipe, language, min(_WIDEST, terminal_width() or _PIPED_WIDTH)):
            click.echo(line)
        return Exit.DONE
    recipes = []
    for method in catalog.methods():
        try:
            recipes.append(catalog.get(method))
        except UsageError as error:  # a manifest that is wrong hides no other method
            show_notices(f"{method} is left out: {fault}" for fault in error.faults)
    if as_json:
        show_json([dataclasses.asdict(recipe) for recipe in recipes])
    else:
        rows = [(recipe.id, recipe.version, said(recipe.title, language)) for recipe in recipes]
        show_table(("METHOD", "VERSION", "TITLE"), rows)
    return Exit.DONE
