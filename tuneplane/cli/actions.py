"""`tp job stop`, `pause`, `resume` and `retry`: ending a run and letting it go on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from tuneplane.cli.run import find, json_option, run_argument
from tuneplane.cli.show import show_fields, show_json, show_notices
from tuneplane.kernel.errors import Exit, Fault, OperationError

if TYPE_CHECKING:
    from tuneplane.runs.state import RunState
    from tuneplane.start import Submitted

wait_option = click.option(
    "--wait/--no-wait", default=True, show_default=True, help="Return once it is done, or once it is asked."
)


@click.command("stop")
@run_argument
@wait_option
@json_option
def stop_command(run: str, wait: bool, as_json: bool) -> int:
    """End RUN for good, and wait until it is gone. Nothing of it starts again by itself."""
    from tuneplane.runs.state import read_state
    from tuneplane.runs.stop import stop_run

    folder = find(run)
    before = read_state(folder)
    done: list[str] = []
    state = stop_run(folder, told=_Teller(done, as_json), wait=wait)
    if as_json:
        show_json({**state.as_dict(), "done": done})
    elif state.state in ("PREPARED", "INCOMPLETE"):
        click.echo(f"{state.run_id} was never submitted: nothing is to be stopped")
    elif before.is_final and not done:
        click.echo(f"{state.run_id} had ended already: {state.state}")
    else:
        click.echo(f"{state.run_id}: {state.state}")
    if state.is_final or not wait or state.state in ("PREPARED", "INCOMPLETE"):
        return Exit.DONE
    remedy = f"say tp job stop {state.run_id} again; tell the administrators if it stays so"
    if state.state == "COMPLETING":
        remedy = f"Slurm still clears its nodes, and it does not start again; {remedy}"
    raise OperationError(Fault(f"{state.run_id} is still {state.state}", "Slurm", remedy))


@click.command("pause")
@run_argument
@wait_option
@json_option
def pause_command(run: str, wait: bool, as_json: bool) -> int:
    """Hold RUN while it waits; ask it to save and end while it runs. tp job resume lets it go on."""
    from tuneplane.runs.pause import pause_run
    from tuneplane.runs.state import HELD

    done: list[str] = []
    state = pause_run(find(run), told=_Teller(done, as_json), wait=wait)
    if as_json:
        show_json({**state.as_dict(), "done": done})
    else:
        click.echo(_line(state))
    if state.is_final or state.reason == HELD or not wait:
        return Exit.DONE
    remedy = f"tp job status {state.run_id} tells once it has ended; tp job stop {state.run_id} ends it now"
    raise OperationError(Fault(f"{state.run_id} was asked and is still {state.state}", "RUN", remedy))


@click.command("resume")
@run_argument
@json_option
def resume_command(run: str, as_json: bool) -> None:
    """Let a paused RUN go on, or start the next attempt of one that ended before it was complete."""
    from tuneplane.start import resume

    _show_started(resume(find(run), os.environ), as_json)


@click.command("retry")
@run_argument
@json_option
def retry_command(run: str, as_json: bool) -> None:
    """Start an ended RUN again as its next attempt: same script, secrets written anew from this shell."""
    from tuneplane.start import retry

    _show_started(retry(find(run), os.environ), as_json)


def _show_started(done: Submitted, as_json: bool) -> None:
    if as_json:
        show_json({"run_id": done.run.run_id, "job_id": done.job_id, "released": done.released})
        return
    job = f"{done.job_id} (it was held, and is released)" if done.released else done.job_id
    show_fields([("run", done.run.run_id), ("job", job), ("estimate", done.estimate)])


class _Teller:
    """Shows what is done as it is done; for programs it is kept."""

    def __init__(self, done: list[str], silent: bool) -> None:
        self.done, self.silent = done, silent

    def __call__(self, sentence: str) -> None:
        self.done.append(sentence)
        if not self.silent:
            show_notices([sentence])


def _line(state: RunState) -> str:
    return f"{state.run_id}: {state.state}" + (f", {state.reason}" if state.reason else "")
