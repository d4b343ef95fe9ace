"""`tp job logs`, and following a run: what it printed, from its own files. Imports neither Hydra nor submitit."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from tuneplane.cli.run import find, json_option, run_argument
from tuneplane.cli.show import show_json, show_notices
from tuneplane.kernel.errors import Exit, Fault, UsageError

if TYPE_CHECKING:
    from tuneplane.kernel.runfolder import RunFolder
    from tuneplane.runs.state import RunState

SILENT_S = 3.0
"""How long following a run shows nothing before it says what the run waits for."""


@click.command("logs")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Until the run ends; exit 3 if it failed.")
@click.option("--node", help="One node, by number or host.")
@click.option("--attempt", type=int, help="An earlier attempt.")
@json_option
def logs_command(run: str, follow: bool, node: str | None, attempt: int | None, as_json: bool) -> int:
    """Show what RUN printed, its nodes told apart where there are several."""
    from tuneplane.runs.logs import RunLog, known_secrets
    from tuneplane.runs.state import read_state

    folder = find(run)
    if follow and as_json:
        raise UsageError(Fault("--follow and --json exclude each other", "tp job logs", "leave one away"))
    if follow:
        return follow_run(folder, node=node, attempt=attempt)
    log = RunLog(folder, attempt=attempt, node=node, masks=known_secrets(folder))
    if attempt is not None and log.current() is None and not read_state(folder).cleared:
        have = ", ".join(str(a.number) for a in folder.attempts()) or "none"
        raise UsageError(Fault(f"{folder.run_id} has no attempt {attempt}", "--attempt", f"it has: {have}"))
    shown = False
    lines = []
    for line in log.read_lines(final=True):
        if as_json:
            lines.append(line)
        else:
            click.echo(line)
        shown = True
    if node is not None and not log.tails and not read_state(folder).cleared:
        known = ", ".join(f"{n.rank} ({n.host})" for n in read_state(folder).nodes) or "none yet"
        raise UsageError(Fault(f"{folder.run_id} has no node {node}", "--node", f"nodes: {known}"))
    if as_json:
        show_json({"run_id": folder.run_id, "lines": lines, "slurm": list(log.batch_lines())})
    elif not shown:
        for line in log.batch_lines():
            click.echo(line)
        show_notices([no_output(read_state(folder))])
    return Exit.DONE


def no_output(state: RunState) -> str:
    """Why nothing of a run's command can be shown."""
    if state.cleared:
        return f"what it printed was cleared by tp job gc; its outputs are left: {state.folder}/out"
    if state.is_final:
        return f"its command printed nothing: {state.state} {state.reason}".rstrip()
    return f"no output of the command yet: {state.state} {state.reason}".rstrip()


def follow_run(
    folder: RunFolder, *, node: str | None = None, attempt: int | None = None, to_stderr: bool = False
) -> int:
    """Show a run's log until it ends, or its attempt has. Exit 3 where it did not complete."""
    from tuneplane.runs.logs import RunLog, follow, known_secrets
    from tuneplane.runs.secrets import remove_secrets
    from tuneplane.runs.state import read_state

    log = RunLog(folder, attempt=attempt, node=node, masks=known_secrets(folder))

    shown = False
    waits, begun = "", time.monotonic()

    def has_ended() -> bool:
        nonlocal waits
        state = read_state(folder)
        told = f"{state.state} {state.reason}".rstrip()
        silent = not shown and time.monotonic() - begun > SILENT_S
        if silent and not state.is_final and state.state != "RUNNING" and told != waits:
            waits = told
            show_notices([told])
        chosen = log.current() if attempt is not None else None
        return (chosen is not None and chosen.end.exists()) or state.is_final

    try:
        for line in follow(log, has_ended):
            click.echo(line, err=to_stderr)
            shown = True
    except KeyboardInterrupt:
        show_notices([f"the run goes on: tp job logs {folder.run_id} -f, or tp job stop {folder.run_id}"])
        raise
    state = read_state(folder)
    remove_secrets(folder, state)
    if not shown:
        for line in log.batch_lines():
            click.echo(line, err=to_stderr)
        if state.cleared:
            show_notices([no_output(state)])
    told = f"{state.run_id}: {state.state}"
    told += f", exit code {state.code}" if state.code is not None else ""
    click.echo(f"{told}: {state.reason}" if state.reason else told, err=True)
    return Exit.DONE if state.state == "COMPLETED" else Exit.JOB_FAILED
