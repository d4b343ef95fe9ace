"""`tp cluster`: a first profile of a site that nobody has described, and the proof that Slurm takes it."""

from __future__ import annotations

import os
import time

import click

from tuneplane.cli.completion import complete_profiles
from tuneplane.cli.show import show_json, show_notices
from tuneplane.kernel.errors import Exit


@click.group("cluster")
def cluster_command() -> None:
    """Describe a site's Slurm as a cluster profile, and prove it."""


@cluster_command.command("discover")
@click.argument("name")
@click.option("--partition", help="The partition to describe; a fitting one where not given.")
@click.option("--print", "only_print", is_flag=True, help="Print the profile; write nothing.")
def discover_command(name: str, partition: str | None, only_print: bool) -> None:
    """Write a first cluster profile NAME from what Slurm says, into your own configuration folder.

    Every value has a comment that says where it came from; guesses are marked. Nothing is overwritten.
    """
    from tuneplane.clusterspec import base_interpreter
    from tuneplane.discover.choice import choose
    from tuneplane.discover.here import look
    from tuneplane.discover.profile import profile_path, profile_text, write_profile
    from tuneplane.discover.said import ask
    from tuneplane.discover.slurm import read_site
    from tuneplane.runs.index import current_user

    environ = dict(os.environ)
    path = profile_path(name, environ)
    said = ask(current_user())
    show_notices(f"{command}: {words}" for command, words in said.refused.items())
    site, here = read_site(said), look(environ, base_interpreter())
    chosen = choose(site, here, partition)
    text = profile_text(name, chosen, site, here, time.strftime("%Y-%m-%d"))
    if only_print:
        click.echo(text, nl=False)
        return
    write_profile(path, text)
    guesses = [value.key for value in chosen.values if value.guess]
    click.echo(f"profile {name} in {path}")
    if guesses:
        click.echo(f"guessed: {', '.join(guesses)}")
    click.echo(f"next: read it, then tp cluster check {name}, tp doctor --profile {name} --deep")


@cluster_command.command("check")
@click.argument("name", shell_complete=complete_profiles)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def check_command(name: str, as_json: bool) -> int:
    """Render scripts of profile NAME and have `sbatch --test-only` judge them; nothing is queued."""
    from tuneplane.discover.check import check_profile

    results = check_profile(name, dict(os.environ))
    if as_json:
        show_json([{"asked": r.asked, "ok": r.ok, "said": r.said} for r in results])
    for result in results if not as_json else ():
        click.echo(f"{'ok  ' if result.ok else 'FAIL'}  {result.asked}: {result.said}")
    return Exit.DONE if all(result.ok for result in results) else Exit.FAILED
