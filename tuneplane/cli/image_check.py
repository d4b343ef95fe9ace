"""`tp image check`: what an image has of what a run needs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from tuneplane.cli.completion import complete_profiles
from tuneplane.cli.context import cache_folder, compose_here, load_methods
from tuneplane.cli.progress import image_progress
from tuneplane.cli.show import show_json, show_notices
from tuneplane.kernel.errors import Exit, Fault, UsageError

if TYPE_CHECKING:
    from tuneplane.compose import Composed


@click.command("check")
@click.argument("image")
@click.option("--profile", shell_complete=complete_profiles, help="Whose container runtime starts it.")
@click.option("--method", help="Whose packages it must have; without it, what your own train.sh needs.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def check_command(image: str, profile: str | None, method: str | None, as_json: bool) -> int:
    """Start IMAGE once, on this host, and say what a run would miss in it.

    A registry's image is prepared first, as for a run of the profile. Exit code 1 where something would fail.
    """
    from tuneplane.image_check import check_image, runtime_for
    from tuneplane.images.local import inspect, is_local

    recipe = load_methods().get(method) if method else None
    composed = _composed(profile) if profile else None
    path = image if is_local(image) else _prepared(image, composed)
    file = inspect(path, None, trusted=True, where="IMAGE")
    if isinstance(file, list):
        raise UsageError(*file)
    runtime = composed.config.cluster.container if composed else runtime_for(file.format, os.environ)
    check = check_image(file.path, file.format, runtime, recipe, os.environ, image_progress())
    if as_json:
        show_json(
            {
                "image": file.path,
                "runtime": check.runtime,
                "started_by": check.started_by,
                "never_run_by_this_projects_tests": check.never_run_here,
                "findings": [
                    {"level": found.level, "what": found.what, "remedy": found.remedy}
                    for found in check.findings
                ],
            }
        )
    else:
        for found in check.findings:
            click.echo(f"{found.level:<9}  {found.what}")
            if found.remedy:
                click.echo(f"{'':<9}  → {found.remedy}")
        show_notices(_notices(check.runtime, check.started_by, check.never_run_here))
    return Exit.FAILED if check.failed else Exit.DONE


def _notices(runtime: str, started_by: str, never_run_here: bool) -> list[str]:
    notices = []
    if started_by != runtime:
        notices.append(f"started by {started_by}: {runtime} starts images in Slurm jobs alone")
    if never_run_here:
        notices.append(
            f"{runtime} is checked against its documentation: this project's own tests never run it;"
            " tests/live does, on a cluster that has it"
        )
    return notices


def _prepared(image: str, composed: Composed | None) -> str:
    """The file of a registry's image: made now where there is none."""
    from tuneplane.runimage import named_image

    if composed is None:
        what = f"image {image!r} lies in a registry, and each runtime has files of its own form"
        raise UsageError(Fault(what, "IMAGE", "say --profile, or give a .sif or .sqsh file"))
    progress = image_progress()
    chosen = named_image(image, composed.config, os.environ, cache_folder(), progress)
    show_notices(chosen.notices)
    return chosen.fetch(progress).path


def _composed(profile: str) -> Composed:
    """A profile as composed for a submit. Raises UsageError where it has no container runtime."""
    composed = compose_here(profile)
    cluster = composed.config.cluster
    if cluster.container.runtime == "none":
        what = f"profile {cluster.name} runs without containers, so no image is started"
        raise UsageError(Fault(what, "--profile", "name a profile with a container runtime"))
    return composed
