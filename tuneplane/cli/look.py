"""`tp job artifacts`, `verify` and `shell`: what a run left, whether it is as submitted, and a shell beside it."""

from __future__ import annotations

import os
import sys

import click

from tuneplane.cli.run import find, json_option, read_job, run_argument
from tuneplane.cli.show import clock, show_json, show_notices, show_table, size
from tuneplane.kernel.errors import Exit


@click.command("artifacts")
@run_argument
@json_option
def artifacts_command(run: str, as_json: bool) -> None:
    """List what RUN left below its output folder."""
    from dataclasses import asdict

    from tuneplane.runs.artifacts import list_artifacts, output_folder

    folder = find(run)
    job = read_job(folder)
    found, skipped = list_artifacts(folder, job)
    out = output_folder(folder, job)
    if as_json:
        show_json({"folder": out, "artifacts": [asdict(a) for a in found], "skipped": skipped})
        return
    click.echo(f"output folder  {out}")
    rows = [
        (
            a.name,
            a.path,
            _files(a.files) if a.kind == "folder" else "file",
            size(a.size_bytes),
            clock(a.modified_at),
        )
        for a in found
    ]
    show_table(("OUTPUT", "PATH", "KIND", "SIZE", "CHANGED"), rows)
    if not found:
        click.echo("no artifacts: checkpoints/, logs, hf_export or eval/report.json below $TUNEPLANE_OUT_DIR")
    show_notices(f"skipped {told}" for told in skipped)


@click.command("verify")
@run_argument
@json_option
def verify_command(run: str, as_json: bool) -> int:
    """Derive every digest of RUN again and compare it with what was recorded at submit."""
    from tuneplane.verify import verify

    folder = find(run)
    checked, faults = verify(folder)
    if as_json:
        show_json({"run_id": folder.run_id, "checked": checked, "faults": [str(f) for f in faults]})
    else:
        for what in checked:
            click.echo(f"checked {what}")
        for fault in faults:
            click.echo(str(fault), err=True)
        click.echo(f"{folder.run_id}: {'differs from what was submitted' if faults else 'as submitted'}")
    return Exit.FAILED if faults else Exit.DONE


@click.command("shell", context_settings={"ignore_unknown_options": True})
@run_argument
@click.option("--node", default="0", show_default=True, help="Which node, by number or host.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def shell_command(run: str, node: str, command: tuple[str, ...]) -> int:
    """Open a shell in RUN's container on a node, with the job's environment; or run COMMAND there."""
    from tuneplane.runs.shell import shell_argv

    argv = shell_argv(find(run), node, list(command), terminal=sys.stdin.isatty())
    sys.stdout.flush()
    os.execvp(argv[0], argv)


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"
