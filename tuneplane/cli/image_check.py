"""`tp image check`: what an image has of what a run needs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuneplane.cli.completion import complete_profiles
from tuneplane.cli.context import load_methods
from tuneplane.cli.show import show_json, show_notices
from tuneplane.kernel.errors import Exit, Fault, UsageError

if TYPE_CHECKING:
    from tuneplane.site import ContainerRuntime


@click.command("check")
@click.argument("image")
@click.option("--profile", shell_complete=complete_profiles, help="Whose container runtime starts it.")
@click.option("--method", help="Whose packages it must have; without it, what your own train.sh needs.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def check_command(image: str, profile: str | None, method: str | None, as_json: bool) -> int:
    """Start the file IMAGE once, on this host, and say what a run would miss in it.

    Exit code 1 where something would fail.
    """
    from tuneplane.image_check import check_image, runtime_for
    from tuneplane.images.local import inspect

    recipe = load_methods().get(method) if method else None
    runtime = _runtime(profile) if profile else None
    file = inspect(image, None, trusted=True, where="IMAGE")
    if isinstance(file, list):
        raise UsageError(*file)
    chosen = runtime or runtime_for(file.format, os.environ)
    check = check_image(file.path, file.format, chosen, recipe, os.environ)
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


def _runtime(profile: str) -> ContainerRuntime:
    """The container runtime of a profile, composed as for a submit. Raises UsageError where it has none."""
    from tuneplane.compose import compose
    from tuneplane.lab.marker import marked_folder
    from tuneplane.profile import parse_profile

    name = parse_profile(profile).name
    composed = compose(name, lab_root=marked_folder(Path.cwd()), flags={}, environ=dict(os.environ))
    runtime = composed.config.cluster.container
    if runtime.runtime == "none":
        what = f"profile {name} runs without containers, so no image is started"
        raise UsageError(Fault(what, "--profile", "name a profile with a container runtime"))
    return runtime
