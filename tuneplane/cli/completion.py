"""`tp completion`, and what completes an argument."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print the script for SHELL. For bash: tp completion bash > ~/.local/share/bash-completion/completions/tp"""
    from tuneplane.cli.main import cli

    completer = get_completion_class(shell)
    assert completer is not None
    click.echo(completer(cli, {}, "tp", "_TP_COMPLETE").source())


def complete_experiments(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the lab's experiments."""
    from tuneplane.cli.context import lab_here
    from tuneplane.kernel.errors import TunePlaneError
    from tuneplane.lab.experiments import experiment_names

    try:
        names = experiment_names(lab_here())
    except TunePlaneError:
        return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def complete_methods(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the catalog's methods."""
    from tuneplane.cli.context import load_methods
    from tuneplane.kernel.errors import TunePlaneError

    try:
        names = load_methods().methods()
    except TunePlaneError:
        return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def complete_profiles(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the cluster profiles known here."""
    import os
    from pathlib import Path

    from tuneplane.compose import list_profiles
    from tuneplane.kernel.errors import TunePlaneError
    from tuneplane.lab.marker import marked_folder

    try:
        names = list_profiles(marked_folder(Path.cwd()), dict(os.environ))
    except TunePlaneError:
        return []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Run ids and experiments that have runs."""
    from tuneplane.runs.index import iterate_runs

    found = {name for run in iterate_runs() for name in (run.run_id, run.path.parent.name)}
    return [CompletionItem(name) for name in sorted(found) if name.startswith(incomplete)]
