"""`tp export` and `tp eval`: operations that a recipe may declare; refused where its adapter has none (C7)."""

from __future__ import annotations

import click

from tuneplane.cli.context import lab_here, load_methods


@click.command("export")
@click.argument("name")
@click.option("--lab", "folder", type=click.Path(), help="A folder of the lab; here where not given.")
def export_command(name: str, folder: str | None) -> None:
    """Export the model of experiment NAME, where its method declares it."""
    _refuse("export", name, folder)


@click.command("eval")
@click.argument("name")
@click.option("--lab", "folder", type=click.Path(), help="A folder of the lab; here where not given.")
def eval_command(name: str, folder: str | None) -> None:
    """Evaluate the model of experiment NAME, where its method declares it."""
    _refuse("eval", name, folder)


def _refuse(operation: str, name: str, folder: str | None) -> None:
    from tuneplane.kernel.errors import Fault, UsageError
    from tuneplane.lab.experiments import find_experiment
    from tuneplane.recipes.adapters import check_operation
    from tuneplane.recipes.compatibility import lock_state

    catalog = load_methods()
    state = lock_state(find_experiment(lab_here(folder), name), catalog)
    if state.lock is None:
        raise UsageError(*state.faults)
    recipe = catalog.get(state.lock.recipe)
    check_operation(recipe.adapter, operation)
    if operation not in recipe.operations:
        raise UsageError(Fault(f"{recipe.id} declares no operation {operation}", f"tp {operation}"))
