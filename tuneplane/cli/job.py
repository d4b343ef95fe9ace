"""`tp job …`: runs, from their folders and Slurm's words. Imports neither Hydra nor submitit.

`ls` and `status` are here; the other commands have files of their own.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuneplane.cli.actions import pause_command, resume_command, retry_command, stop_command
from tuneplane.cli.clear import gc_command
from tuneplane.cli.export import export_command
from tuneplane.cli.logs import logs_command
from tuneplane.cli.look import artifacts_command, shell_command, verify_command
from tuneplane.cli.metrics import metrics_command
from tuneplane.cli.rerun import rerun_command
from tuneplane.cli.run import exit_code, find, json_option, run_argument
from tuneplane.cli.show import (
    age,
    clock,
    show_fields,
    show_json,
    show_listing,
    show_notices,
    show_table,
    terminal_width,
)
from tuneplane.cli.sync import sync_command
from tuneplane.cli.why import why_command

if TYPE_CHECKING:
    from tuneplane.kernel.runfolder import RunFolder
    from tuneplane.runs.attempts import Attempt
    from tuneplane.runs.state import RunState

MOST_ROWS = 200
"""Of a report in a terminal: groups of tasks have hundreds."""


@click.group("job")
def job_command() -> None:
    """Look at runs, end them, let them go on.

    RUN is a run id, a unique prefix of one, an experiment (its latest run), a Slurm job id or a run folder.
    """


@job_command.command("ls")
@click.option("--experiment", help="Only runs of this experiment.")
@click.option("--root", type=click.Path(path_type=Path), help="Only this storage root.")
@click.option(
    "--limit",
    default=30,
    show_default=True,
    type=click.IntRange(0),
    help="How many at the most, newest first; 0: all.",
)
@json_option
def ls_command(experiment: str | None, root: Path | None, limit: int, as_json: bool) -> None:
    """List your runs, newest first."""
    from tuneplane.runs.index import iterate_runs, started_order
    from tuneplane.runs.secrets import remove_secrets
    from tuneplane.runs.state import read_states

    runs = [r for r in iterate_runs([root] if root else None) if experiment in (None, r.path.parent.name)]
    runs.sort(key=started_order, reverse=True)
    shown = runs[:limit] if limit else runs
    states = read_states(shown)
    for folder, state in zip(shown, states, strict=True):
        remove_secrets(folder, state)
    if as_json:
        show_json([state.as_dict() for state in states])
        return
    if not states:
        click.echo("no runs yet: tp submit NAME --profile …")
    rows = [
        (
            s.run_id,
            s.state,
            exit_code(s),
            s.job_id,
            s.profile,
            str(s.attempts),
            _since(s),
            _told(s),
        )
        for s in states
    ]
    headings = ("RUN", "STATE", "EXIT", "JOB", "PROFILE", "ATTEMPTS", "AGE", "REASON")
    show_listing(headings, rows, terminal_width())
    if len(runs) > len(shown):
        click.echo(f"{len(runs) - len(shown)} older ones: tp job ls --limit 0")


@job_command.command("status")
@run_argument
@json_option
def status_command(run: str, as_json: bool) -> None:
    """Say how RUN is: state, exit code, attempts, nodes."""
    from tuneplane.runs.attempts import read_attempts
    from tuneplane.runs.secrets import remove_secrets
    from tuneplane.runs.state import read_state

    folder = find(run)
    state = read_state(folder)
    remove_secrets(folder, state)
    attempts = read_attempts(folder, state) if state.state != "UNKNOWN" or state.attempts else []
    if as_json:
        from tuneplane.runs.evaluation import read_evaluation

        report = read_evaluation(folder)
        show_json({**state.as_dict(), "history": [a.as_dict() for a in attempts], "report": report.as_dict()})
        return
    attempt = "" if state.attempt is None else f"{state.attempt} (of {state.attempts})"
    show_fields(
        [
            ("run", state.run_id),
            ("state", state.state),
            ("exit code", exit_code(state)),
            ("reason", state.reason),
            ("job", state.job_id),
            ("profile", state.profile),
            ("rerun of", state.rerun_of),
            (f"{state.operation} of", state.subject),
            ("attempt", attempt),
            ("submitted", clock(state.submitted_at)),
            ("started", clock(state.started_at)),
            ("ended", clock(state.ended_at)),
            ("folder", state.folder),
        ]
    )
    _show_report(folder, state)
    _show_attempts(attempts)
    if state.nodes:
        click.echo()
        rows = [
            (
                str(n.rank),
                n.host,
                "gone" if state.is_final and n.code is None else n.state,
                "" if n.code is None else str(n.code),
                "" if n.beat_age_s is None or n.state == "ended" else f"{age(n.beat_age_s)} ago",
                n.reason,
            )
            for n in state.nodes
        ]
        show_table(("NODE", "HOST", "STATE", "EXIT", "HEARTBEAT", "REASON"), rows)


def _show_report(folder: RunFolder, state: RunState) -> None:
    """What an evaluation found, and why a report is not read."""
    from tuneplane.runs.evaluation import read_evaluation

    found = read_evaluation(folder)
    if found.rows:
        click.echo()
        rows = [
            (row.task, row.name, *map(_figure, (row.value, row.stderr, row.samples, row.fewshot)))
            for row in found.rows[:MOST_ROWS]
        ]
        show_table(("TASK", "METRIC", "VALUE", "STDERR", "SAMPLES", "FEWSHOT"), rows)
        if len(found.rows) > MOST_ROWS:
            click.echo(f"{len(found.rows) - MOST_ROWS} more: tp job status {state.run_id} --json")
    show_notices(found.notices)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _show_attempts(attempts: list[Attempt]) -> None:
    """Where there is more to say than of one attempt that speaks for the run."""
    told = [a for a in attempts if a.cause or a.not_restarted or a.follows]
    if len(attempts) < 2 and not told:
        return
    click.echo()
    rows = [
        (
            str(a.number),
            a.job_id,
            clock(a.started_at),
            clock(a.ended_at),
            a.how,
            "" if a.code is None else str(a.code),
            "" if a.step is None else str(a.step),
            _why(a),
        )
        for a in attempts
    ]
    show_table(("ATTEMPT", "JOB", "STARTED", "ENDED", "HOW", "EXIT", "STEP", "WHY"), rows)


def _why(attempt: Attempt) -> str:
    """Why an attempt began, where a restart began it, and why it ended and the run did not go on."""
    from tuneplane.runs.causes import words

    begun = f"began because attempt {attempt.number - 1} {words(attempt.follows)}" if attempt.follows else ""
    ended = words(attempt.cause) if attempt.cause else attempt.reason
    if attempt.cause == "node_failure" and attempt.reason:  # which node
        ended += f" ({attempt.reason})"
    stayed = f"not restarted: {attempt.not_restarted}" if attempt.not_restarted else ""
    return "; ".join(part for part in (begun, ended, stayed) if part)


def _told(state: RunState) -> str:
    """What an operation is of, and why a run is as it is, on one line."""
    of = f"{state.operation} of {state.subject}" if state.subject else ""
    return "; ".join(filter(None, (of, state.reason.partition("\n")[0])))


def _since(state: RunState) -> str:
    moment = state.ended_at or state.started_at or state.submitted_at
    return age(time.time() - moment) if moment else ""


for command in (
    *(
        logs_command,
        metrics_command,
        export_command,
        sync_command,
        artifacts_command,
        verify_command,
        shell_command,
        why_command,
    ),
    *(stop_command, pause_command, resume_command, retry_command, rerun_command, gc_command),
):
    job_command.add_command(command)
