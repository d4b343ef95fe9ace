"""`tp config`."""

from __future__ import annotations

import os

import click

from tuneplane.cli.show import show_notices


@click.command("config")
@click.argument("profile")
@click.option("--lab", "folder", type=click.Path(), help="A folder of the lab; here, if it is one.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def config_command(profile: str, folder: str | None, as_json: bool) -> None:
    """Show PROFILE as composed from packaged, site, user and lab files, and where each value came from."""
    from pathlib import Path

    from tuneplane.compose import compose, render_config
    from tuneplane.lab.marker import marked_folder
    from tuneplane.profile import parse_profile

    root = marked_folder(Path(folder) if folder else Path.cwd())
    name = parse_profile(profile).name
    composed = compose(name, lab_root=root, flags={}, environ=dict(os.environ))
    click.echo(render_config(composed, as_json=as_json))
    if not as_json:
        show_notices(composed.notices)
