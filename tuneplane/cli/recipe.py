"""`tp methods`, `tp recipe status`, `tp recipe upgrade`."""

from __future__ import annotations

import dataclasses

import click

from tuneplane.cli.context import lab_here, load_methods
from tuneplane.cli.show import show_fields, show_json, show_notices, show_table
from tuneplane.kernel.errors import Exit, Fault, UsageError


@click.command("methods")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def methods_command(name: str | None, as_json: bool) -> None:
    """List the catalog's methods, or show the one called NAME."""
    catalog = load_methods()
    recipes = [catalog.get(method) for method in ([name] if name else catalog.methods())]
    if as_json:
        show_json([dataclasses.asdict(recipe) for recipe in recipes])
        return
    if name is None:
        show_table(("METHOD", "VERSION", "TITLE"), [(r.id, r.version, r.title.en) for r in recipes])
        return
    recipe = recipes[0]
    show_fields(
        [
            ("method", f"{recipe.id} {recipe.version}"),
            ("title", f"{recipe.title.en} / {recipe.title.zh}"),
            ("about", recipe.summary.en),
            ("", recipe.summary.zh),
            ("entry", recipe.entrypoint.value),
            (
                "metrics go",
                "to your own tracker" if recipe.observability == "external" else "to the platform",
            ),
            ("operations", ", ".join(recipe.operations)),
            ("runtime", recipe.runtime.version),
            ("image", recipe.runtime.image.reference if recipe.runtime.image else "yours, by --image"),
            ("parameters", "any --set" if recipe.free_parameters else ""),
            ("digest", recipe.digest),
        ]
    )
    for parameter in recipe.parameters:
        default = "required" if parameter.required else f"default {parameter.default}"
        click.echo(f"  {parameter.name}  {parameter.type}  {default}  {parameter.unit}  {parameter.help.en}")


@click.group("recipe")
def recipe_command() -> None:
    """State and upgrade of an experiment's lock."""


@recipe_command.command("status")
@click.argument("name", required=False)
@click.option("--lab", "folder", type=click.Path(), help="A folder of the lab; here where not given.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def status_command(name: str | None, folder: str | None, as_json: bool) -> int:
    """Say whether the lock of NAME (of every experiment where not given) is admitted, and why not."""
    from tuneplane.lab.experiments import experiment_names, find_experiment
    from tuneplane.recipes.compatibility import LockStatus, lock_state

    lab, catalog = lab_here(folder), load_methods()
    names = [name] if name else experiment_names(lab)
    states = {n: lock_state(find_experiment(lab, n), catalog) for n in names}
    if as_json:
        show_json(
            [
                {
                    "name": n,
                    "status": s.status.value,
                    "recipe": s.lock.recipe if s.lock else None,
                    "version": s.lock.version if s.lock else None,
                    "faults": [dataclasses.asdict(f) for f in s.faults],
                    "advice": list(s.advice),
                }
                for n, s in states.items()
            ]
        )
    else:
        rows = [
            (n, f"{s.lock.recipe} {s.lock.version}" if s.lock else "?", s.status.value)
            for n, s in states.items()
        ]
        show_table(("EXPERIMENT", "RECIPE", "LOCK"), rows)
        show_notices(advice for s in states.values() for advice in s.advice)
        for state in states.values():
            for fault in state.faults:
                click.echo(str(fault), err=True)
    refused = any(s.status is LockStatus.REFUSED for s in states.values())
    return Exit.WRONG_USE if refused else Exit.DONE


@recipe_command.command("upgrade")
@click.argument("name", required=False)
@click.option("--method", help="Where the lock no longer says which recipe it was for, or that is gone.")
@click.option("--dry-run", is_flag=True, help="Show what would change; write nothing.")
@click.option("--lab", "folder", type=click.Path(), help="A folder of the lab; here where not given.")
def upgrade_command(name: str | None, method: str | None, dry_run: bool, folder: str | None) -> None:
    """Lock NAME (every experiment where not given) against the catalog of today and show what changed."""
    from tuneplane.lab.experiments import experiment_names, find_experiment
    from tuneplane.recipes.compatibility import plan_upgrade, write_upgrade

    if name is None and method is not None:
        raise UsageError(Fault("--method is for one experiment", "--method", "name the experiment"))
    lab, catalog = lab_here(folder), load_methods()
    names = [name] if name else experiment_names(lab)
    upgrades = [(n, plan_upgrade(find_experiment(lab, n), catalog, method)) for n in names]  # all, then write
    for experiment, upgrade in upgrades:
        for change in upgrade.changes:
            click.echo(f"{experiment}: {change.key}: {_shown(change.before)} -> {_shown(change.after)}")
        if not upgrade.changes:
            click.echo(f"{experiment}: nothing to change, the lock is current")
        elif dry_run:
            click.echo(f"{experiment}: nothing was written (--dry-run)")
        else:
            write_upgrade(upgrade)
            click.echo(f"{experiment}: wrote {upgrade.path}; commit it before the next submit")


def _shown(value: object) -> str:
    return "(none)" if value is None else str(value)
