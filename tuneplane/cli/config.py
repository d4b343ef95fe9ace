"""`tp config`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tuneplane.cli.completion import complete_profiles
from tuneplane.cli.show import show_notices
from tuneplane.kernel.errors import Fault, UsageError


@click.command("config")
@click.argument("name", shell_complete=complete_profiles)
@click.option("--profile", shell_complete=complete_profiles, help="Where NAME is an experiment.")
@click.option("--lab", "folder", type=click.Path(), help="A folder of the lab; here, if it is one.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def config_command(name: str, profile: str | None, folder: str | None, as_json: bool) -> None:
    """Show what packaged, site, user and lab files make of a profile, and where each value came from.

    NAME is a profile, or an experiment of the lab with --profile.
    """
    from tuneplane.compose import compose, list_profiles, render_config
    from tuneplane.lab.marker import marked_folder
    from tuneplane.profile import parse_profile

    root = marked_folder(Path(folder) if folder else Path.cwd())
    is_experiment = root is not None and (root / "experiments" / name).is_dir()
    environ = dict(os.environ)
    if profile is None and is_experiment and name not in list_profiles(root, environ):
        raise UsageError(
            Fault(f"{name} is an experiment", "tp config", f"tp config {name} --profile PROFILE")
        )
    if profile is not None and not is_experiment:
        raise UsageError(Fault(f"this lab has no experiment {name}", "tp config", "tp ls lists them"))
    asked = parse_profile(profile or name).name
    composed = compose(asked, lab_root=root, flags={}, environ=environ)
    click.echo(render_config(composed, as_json=as_json))
    if not as_json:
        show_notices(composed.notices)
