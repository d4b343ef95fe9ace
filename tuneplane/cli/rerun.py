"""`tp job rerun`: a new run of what an earlier one froze, with other hyper-parameters."""

from __future__ import annotations

import os
from typing import Any

import click

from tuneplane.cli.context import load_methods
from tuneplane.cli.run import find, run_argument
from tuneplane.cli.show import show_json, show_notices
from tuneplane.cli.submit import SLURM_FLAGS, show_submitted, slurm_options
from tuneplane.kernel.errors import Exit


def _options(command: Any) -> Any:
    for option in reversed(slurm_options()):
        command = option(command)
    return command


@click.command("rerun")
@run_argument
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="A hyper-parameter over RUN's own; repeatable."
)
@_options
@click.option("--dry-run", is_flag=True, help="Print the script; leave nothing behind.")
@click.option("--follow", is_flag=True, help="Show the log until the run ends; exit 3 if it failed.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def rerun_command(
    run: str, sets: tuple[str, ...], dry_run: bool, follow: bool, as_json: bool, **given: str | None
) -> int:
    """Make a new run from RUN: its very code and image, its parameters but for --set. The lab is not looked at."""
    from tuneplane import rerun

    names = [name.replace("-", "_") for name in SLURM_FLAGS]
    flags = {name: value for name in names if (value := given[name]) is not None}
    planned = rerun.plan(find(run), sets, flags, load_methods(), os.environ)
    if dry_run:
        job, script = rerun.preview(planned)
        if as_json:
            show_json({"script": script, "hyperparams": job.spec.hyperparams, "notices": planned.notices})
        else:
            show_notices(planned.notices)
            click.echo(script, nl=False)
        return Exit.DONE
    done = rerun.rerun(planned, os.environ)
    return show_submitted(done, planned.notices, follow, as_json, of=planned.of.run_id)
