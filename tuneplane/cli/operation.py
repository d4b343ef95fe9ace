"""`tp export` and `tp eval`: what is done with a run that trained, as a run of its own (C7)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tuneplane.cli.completion import complete_profiles, complete_runs
from tuneplane.cli.context import cache_folder, lab_here, load_methods
from tuneplane.cli.progress import image_progress
from tuneplane.cli.submit import SLURM_FLAGS, show_submitted, slurm_options
from tuneplane.kernel.errors import Fault, UsageError

if TYPE_CHECKING:
    from tuneplane.kernel.runfolder import RunFolder

F = TypeVar("F", bound=Callable[..., Any])


def _options(command: F) -> F:
    """The flags that both have: where it runs, and in what."""
    options: list[Callable[[F], F]] = [
        click.option(
            "--profile",
            shell_complete=complete_profiles,
            help="NAME[:GPUS]; one GPU of RUN's where not given.",
        ),
        click.option("--image", help="Container image: HOST/NAME:TAG, or a .sif path."),
        click.option("--gpus-per-node", type=int, help="GPUs."),
        click.option("--mount", "mounts", multiple=True, metavar="SRC:DST[:ro]", help="Repeatable."),
        *slurm_options(),
        click.option("--follow", is_flag=True, help="Show the log until it ends; exit 3 if it failed."),
        click.option(
            "--lab", "folder", type=click.Path(), help="A folder of the lab, where RUN is an experiment."
        ),
        click.option("--json", "as_json", is_flag=True, help="For programs."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command("export")
@click.argument("run", shell_complete=complete_runs)
@_options
def export_command(run: str, folder: str | None, follow: bool, as_json: bool, **given: Any) -> int:
    """Export the model that RUN trained, where its method declares it.

    RUN is a run id, a unique prefix of one, an experiment (its latest run) or a Slurm job id.
    """
    return _operate("export", run, folder, follow, as_json, given)


@click.command("eval")
@click.argument("run", shell_complete=complete_runs)
@click.option("--tasks", multiple=True, metavar="A,B", help="Tasks by lm-eval's names; repeatable.")
@click.option("--include-path", metavar="FOLDER", help="Task files of your own, which compute nodes see.")
@click.option(
    "--limit", type=float, metavar="N", help="Samples of each task, or their share below 1; to try out."
)
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="A parameter of evalkit/benchmark; repeatable."
)
@_options
def eval_command(run: str, folder: str | None, follow: bool, as_json: bool, **given: Any) -> int:
    """Evaluate the model that RUN exported, with lm-eval, where its method declares it.

    RUN is a run id, a unique prefix of one, an experiment (its latest run) or a Slurm job id.
    """
    return _operate("eval", run, folder, follow, as_json, given)


def _operate(
    operation: str, text: str, folder: str | None, follow: bool, as_json: bool, given: dict[str, Any]
) -> int:
    run = _find(operation, text, folder)
    from tuneplane import operate
    from tuneplane.operation import Asked, plan

    names = [name.replace("-", "_") for name in SLURM_FLAGS]
    flags = {name: value for name in names if (value := given.pop(name)) is not None}
    asked = Asked(operation, flags=flags, **{k: v for k, v in given.items() if v is not None})
    planned = plan(run, asked, load_methods(), os.environ, cache_folder(), image_progress())
    done = operate.start(run, planned, os.environ, image_progress())
    return show_submitted(done, planned.notices, follow, as_json, subject=(operation, run.run_id))


def _find(operation: str, text: str, folder: str | None) -> RunFolder:
    """The run that is meant; of an experiment that cannot have one, why."""
    from tuneplane.runs.index import find_run

    try:
        return find_run(text)
    except UsageError as error:
        _refuse_experiment(operation, text, folder, error)
        raise


def _refuse_experiment(operation: str, name: str, folder: str | None, unknown: UsageError) -> None:
    """Raise UsageError where the lab has an experiment of that name, which was never run."""
    from tuneplane.lab.experiments import find_experiment
    from tuneplane.operation import check_declared
    from tuneplane.recipes.compatibility import lock_state

    try:
        experiment = find_experiment(lab_here(folder), name)
    except UsageError:
        raise unknown from None
    catalog = load_methods()
    state = lock_state(experiment, catalog)
    if state.lock is None:
        raise UsageError(*state.faults)
    check_declared(catalog.get(state.lock.recipe), operation)
    raise UsageError(
        Fault(f"{name} has no run yet", f"tp {operation}", f"tp submit {name} … --then {operation}")
    )
