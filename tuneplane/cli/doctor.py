"""`tp doctor`: what runs need of this machine and of a cluster, and how to mend what is missing."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tuneplane.cli.completion import complete_profiles
from tuneplane.cli.context import load_methods
from tuneplane.cli.show import show_json
from tuneplane.kernel.errors import Exit


@click.command("doctor")
@click.option("--profile", shell_complete=complete_profiles, help="Look at this cluster profile too.")
@click.option("--image", help="Judge this image as a submit would.")
@click.option("--deep", is_flag=True, help="Look at a node by a one-minute job of the profile.")
@click.option("--wait", "wait_s", default=300, show_default=True, help="Seconds to wait for that job.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def doctor_command(profile: str | None, image: str | None, deep: bool, wait_s: int, as_json: bool) -> int:
    """Look whether this machine, and the cluster of a profile, have what runs need.

    Exit 1 where something fails; a warning alone does not.
    """
    from tuneplane.doctor.check import FAIL, WARN
    from tuneplane.doctor.checkup import check_up
    from tuneplane.kernel.errors import Fault, UsageError
    from tuneplane.lab.marker import find_lab, marked_folder
    from tuneplane.profile import parse_profile

    if deep and profile is None:
        raise UsageError(
            Fault("--deep looks at a node of a profile", "--profile", "say which: --profile NAME --deep")
        )
    name = parse_profile(profile).name if profile is not None else None
    lab = find_lab(Path.cwd()) if marked_folder(Path.cwd()) is not None else None
    checks = check_up(
        dict(os.environ), profile=name, image=image, deep=deep, lab=lab, catalog=load_methods(), wait_s=wait_s
    )
    if as_json:
        show_json([check.as_dict() for check in checks])
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            click.echo(f"{check.level:<4}  {check.name:<{width}}  {_plain(check.said)}".rstrip())
            if check.remedy and check.level != "ok":
                click.echo(f"{'':<{width + 8}}→ {_plain(check.remedy)}")
        failed = sum(check.level == FAIL for check in checks)
        warned = sum(check.level == WARN for check in checks)
        click.echo(f"{len(checks)} checks, {failed} failed, {warned} warnings")
    return Exit.FAILED if any(check.level == FAIL for check in checks) else Exit.DONE


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
