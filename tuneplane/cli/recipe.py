"""`tp recipe status` and `tp recipe upgrade`: experiments' locks, and the catalog of today."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from tuneplane.cli.context import lab_here, load_methods
from tuneplane.cli.show import plain, show_json, show_notices, show_table
from tuneplane.kernel.errors import Exit, Fault, UsageError

if TYPE_CHECKING:
    from tuneplane.recipes.catalog import Catalog
    from tuneplane.recipes.compatibility import LockState


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
        rows = [(n, _locked(s), s.status.value, _meaning(s, catalog)) for n, s in states.items()]
        show_table(("EXPERIMENT", "LOCKED TO", "LOCK", ""), rows)
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
    from tuneplane.recipes.upgrade import plan_upgrade, write_upgrade

    if name is None and method is not None:
        raise UsageError(Fault("--method is for one experiment", "--method", "name the experiment"))
    lab, catalog = lab_here(folder), load_methods()
    names = [name] if name else experiment_names(lab)
    upgrades = [(n, plan_upgrade(find_experiment(lab, n), catalog, method)) for n in names]  # all, then write
    for experiment, upgrade in upgrades:
        if not upgrade.changes:
            click.echo(f"{experiment}: nothing to change, the lock is current")
            continue
        click.echo(f"{experiment}: {upgrade.lock.recipe} {upgrade.lock.version}")
        for sentence in upgrade.told:
            click.echo(f"  {plain(sentence)}")
        if dry_run:
            click.echo("  nothing was written (--dry-run)")
        else:
            write_upgrade(upgrade)
            click.echo(f"  wrote {upgrade.path}; look with tp validate {experiment}, then commit it")


def _locked(state: LockState) -> str:
    return f"{state.lock.recipe} {state.lock.version}" if state.lock else "?"


def _meaning(state: LockState, catalog: Catalog) -> str:
    """What the state of a lock means to its owner, in a few words."""
    if state.status.value == "refused":
        count = len(state.faults)
        return f"cannot be submitted: {count} reason{'s' if count != 1 else ''} below"
    recipe = catalog.find(state.lock.recipe) if state.lock else None
    if state.status.value == "current" or recipe is None or state.lock is None:
        return "made against the catalog of today"
    if recipe.version == state.lock.version:
        return "the recipe changed since, but nothing that this experiment uses"
    return f"the catalog has {recipe.version}, and all that this experiment uses is unchanged"
