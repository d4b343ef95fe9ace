"""`tp job …`: runs, from their folders and Slurm's words. Imports neither Hydra nor submitit."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuneplane.cli.completion import complete_runs
from tuneplane.cli.show import age, clock, show_fields, show_json, show_notices, show_table, size
from tuneplane.cli.why import why_command
from tuneplane.kernel.errors import Exit, Fault, OperationError, UsageError

if TYPE_CHECKING:
    from tuneplane.collect.metrics import LastValue, Metrics
    from tuneplane.kernel.runfolder import RunFolder
    from tuneplane.runs.state import RunState

SILENT_S = 3.0
"""How long following a run shows nothing before it says what the run waits for."""

run_argument = click.argument("run", shell_complete=complete_runs)
json_option = click.option("--json", "as_json", is_flag=True, help="For programs.")


@click.group("job")
def job_command() -> None:
    """Look at runs and end them.

    RUN is a run id, a unique prefix of one, an experiment (its latest run), a Slurm job id or a run folder.
    """


@job_command.command("ls")
@click.option("--experiment", help="Only runs of this experiment.")
@click.option("--root", type=click.Path(path_type=Path), help="Only this storage root.")
@click.option("--limit", default=30, show_default=True, help="How many at the most, newest first; 0: all.")
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
        (s.run_id, s.state, _code(s), s.job_id, s.profile, str(s.attempts), _since(s), _first_line(s.reason))
        for s in states
    ]
    show_table(("RUN", "STATE", "EXIT", "JOB", "PROFILE", "ATTEMPTS", "AGE", "REASON"), rows)
    if len(runs) > len(shown):
        click.echo(f"{len(runs) - len(shown)} older ones: tp job ls --limit 0")


@job_command.command("status")
@run_argument
@json_option
def status_command(run: str, as_json: bool) -> None:
    """Say how RUN is: state, exit code, attempts, nodes."""
    from tuneplane.runs.secrets import remove_secrets
    from tuneplane.runs.state import read_state

    folder = _find(run)
    state = read_state(folder)
    remove_secrets(folder, state)
    if as_json:
        show_json(state.as_dict())
        return
    attempt = "" if state.attempt is None else f"{state.attempt} (of {state.attempts})"
    show_fields(
        [
            ("run", state.run_id),
            ("state", state.state),
            ("exit code", _code(state)),
            ("reason", state.reason),
            ("job", state.job_id),
            ("profile", state.profile),
            ("attempt", attempt),
            ("submitted", clock(state.submitted_at)),
            ("started", clock(state.started_at)),
            ("ended", clock(state.ended_at)),
            ("folder", state.folder),
        ]
    )
    if state.nodes:
        click.echo()
        rows = [
            (
                str(n.rank),
                n.host,
                n.state,
                "" if n.code is None else str(n.code),
                "" if n.beat_age_s is None or n.state == "ended" else f"{age(n.beat_age_s)} ago",
                n.reason,
            )
            for n in state.nodes
        ]
        show_table(("NODE", "HOST", "STATE", "EXIT", "HEARTBEAT", "REASON"), rows)


@job_command.command("logs")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Until the run ends; exit 3 if it failed.")
@click.option("--node", help="One node, by number or host.")
@click.option("--attempt", type=int, help="An earlier attempt.")
@json_option
def logs_command(run: str, follow: bool, node: str | None, attempt: int | None, as_json: bool) -> int:
    """Show what RUN printed, its nodes told apart where there are several."""
    from tuneplane.runs.logs import RunLog, known_secrets
    from tuneplane.runs.state import read_state

    folder = _find(run)
    if follow and as_json:
        raise UsageError(Fault("--follow and --json exclude each other", "tp job logs", "leave one away"))
    if follow:
        return follow_run(folder, node=node, attempt=attempt)
    log = RunLog(folder, attempt=attempt, node=node, masks=known_secrets(folder))
    if attempt is not None and log.current() is None:
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
    if node is not None and not log.tails:
        known = ", ".join(f"{n.rank} ({n.host})" for n in read_state(folder).nodes) or "none yet"
        raise UsageError(Fault(f"{folder.run_id} has no node {node}", "--node", f"nodes: {known}"))
    if as_json:
        show_json({"run_id": folder.run_id, "lines": lines, "slurm": list(log.batch_lines())})
    elif not shown:
        for line in log.batch_lines():
            click.echo(line)
        state = read_state(folder)
        show_notices([f"no output of the command yet: {state.state} {state.reason}".rstrip()])
    return Exit.DONE


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
    told = f"{state.run_id}: {state.state}"
    told += f", exit code {state.code}" if state.code is not None else ""
    click.echo(f"{told}: {state.reason}" if state.reason else told, err=True)
    return Exit.DONE if state.state == "COMPLETED" else Exit.JOB_FAILED


@job_command.command("metrics")
@run_argument
@click.argument("names", nargs=-1)
@click.option("--ascii", "plain", is_flag=True, help="Draw with ASCII alone.")
@json_option
def metrics_command(run: str, names: tuple[str, ...], plain: bool, as_json: bool) -> None:
    """Show RUN's metrics: last values, and curves in the terminal. NAMES: only these."""
    from tuneplane.collect.chart import number_text, render_curve, step_text
    from tuneplane.collect.metrics import last_values, read_metrics

    folder = _find(run)
    metrics = read_metrics(folder.path, folder.run_id, _read_job(folder).spec.reporting.token_sha256)
    unknown = [name for name in names if name not in metrics.series]
    if unknown and metrics.series:
        have = ", ".join(sorted(metrics.series)[:12])
        raise UsageError(
            Fault(f"no metric {', '.join(unknown)} in {folder.run_id}", "NAMES", f"it has: {have}")
        )
    chosen = [name for name in sorted(metrics.series) if not names or name in names]
    values = last_values(metrics, chosen)
    if as_json:
        show_json(_metrics_json(metrics, chosen, values))
        return
    if not chosen:
        show_notices([_no_points(folder)])
    encoding = (sys.stdout.encoding or "").lower()
    for name in chosen:
        curve = render_curve(
            metrics.series[name],
            width=min(_terminal_width(), 100),
            height=14,
            unicode="utf" in encoding and not plain,
            title=name,
        )
        click.echo(curve + "\n")
    rows = [
        (v.name, number_text(v.last), _number(v.min), _number(v.max), step_text(v.last_step), str(v.points))
        for v in values
    ]
    show_table(("METRIC", "LAST", "MIN", "MAX", "STEP", "POINTS"), rows)
    if metrics.hparams:
        click.echo("hparams  " + ", ".join(f"{k}={v}" for k, v in sorted(metrics.hparams.items())))
    show_notices(_metrics_notices(metrics))


def _number(value: float | None) -> str:
    from tuneplane.collect.chart import number_text

    return "" if value is None else number_text(value)


def _metrics_json(metrics: Metrics, names: list[str], values: list[LastValue]) -> dict[str, object]:
    from dataclasses import asdict

    return {
        "metrics": [
            {**asdict(value), "steps": list(series.steps), "values": list(series.values)}
            for value, series in ((v, metrics.series[v.name]) for v in values)
        ],
        "hparams": dict(metrics.hparams),
        "dropped_points": metrics.dropped_points,
        "dropped_values": metrics.dropped_values,
        "gaps": metrics.gaps,
        "torn_lines": metrics.torn_lines,
        "refused": dict(metrics.refused),
        "skipped": dict(metrics.skipped),
        "unreadable": dict(metrics.unreadable),
        "age_s": metrics.age_s(),
    }


def _metrics_notices(metrics: Metrics) -> list[str]:
    """What the run could not keep, in words (C16, C21)."""
    told = []
    if metrics.dropped_points:
        told.append(f"{metrics.dropped_points} points were dropped by the job: its storage did not take them")
    if metrics.dropped_values:
        told.append(f"{metrics.dropped_values} values were no numbers and were dropped")
    if metrics.gaps:
        told.append(f"{metrics.gaps} points are missing: numbered, but not in the files")
    if metrics.torn_lines:
        told.append(f"{metrics.torn_lines} lines are torn and were passed over")
    for word, files in (
        ("refused", metrics.refused),
        ("passed over", metrics.skipped),
        ("not readable", metrics.unreadable),
    ):
        told += [f"{name} was {word}: {why}" for name, why in files.items()]
    return told


@job_command.command("artifacts")
@run_argument
@json_option
def artifacts_command(run: str, as_json: bool) -> None:
    """List what RUN left below its output folder."""
    from dataclasses import asdict

    from tuneplane.runs.artifacts import list_artifacts

    folder = _find(run)
    found, skipped = list_artifacts(folder, _read_job(folder))
    if as_json:
        show_json({"folder": folder.out, "artifacts": [asdict(a) for a in found], "skipped": skipped})
        return
    click.echo(f"output folder  {folder.out}")
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


@job_command.command("stop")
@run_argument
@json_option
def stop_command(run: str, as_json: bool) -> int:
    """End RUN, and wait until it is gone."""
    from tuneplane.runs.state import read_state
    from tuneplane.runs.stop import stop_run

    folder = _find(run)
    before = read_state(folder)
    state = stop_run(folder)
    if as_json:
        show_json(state.as_dict())
    elif before.is_final:
        click.echo(f"{state.run_id} had ended already: {state.state}")
    else:
        click.echo(f"{state.run_id}: {state.state}")
    if not state.is_final and state.state != "PREPARED":
        raise OperationError(
            Fault(f"{state.run_id} is still {state.state}", "Slurm", f"scancel --signal=KILL {state.job_id}")
        )
    return Exit.DONE


@job_command.command("retry")
@run_argument
@json_option
def retry_command(run: str, as_json: bool) -> None:
    """Start an ended RUN again as its next attempt: same script, secrets written anew from this shell."""
    from tuneplane.start import retry

    done = retry(_find(run), os.environ)
    if as_json:
        show_json({"run_id": done.run.run_id, "job_id": done.job_id})
    else:
        show_fields([("run", done.run.run_id), ("job", done.job_id), ("estimate", done.estimate)])


@job_command.command("verify")
@run_argument
@json_option
def verify_command(run: str, as_json: bool) -> int:
    """Derive every digest of RUN again and compare it with what was recorded at submit."""
    from tuneplane.verify import verify

    folder = _find(run)
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


job_command.add_command(why_command)


@job_command.command("shell", context_settings={"ignore_unknown_options": True})
@run_argument
@click.option("--node", default="0", show_default=True, help="Which node, by number or host.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def shell_command(run: str, node: str, command: tuple[str, ...]) -> int:
    """Open a shell in RUN's container on a node, with the job's environment; or run COMMAND there."""
    from tuneplane.runs.shell import shell_argv

    argv = shell_argv(_find(run), node, list(command), terminal=sys.stdin.isatty())
    sys.stdout.flush()
    os.execvp(argv[0], argv)


def _find(text: str) -> RunFolder:
    from tuneplane.runs.index import find_run

    return find_run(text)


def _read_job(folder: RunFolder):  # type: ignore[no-untyped-def]
    from tuneplane.spec import read

    return read(folder.job)


def _code(state: RunState) -> str:
    return "" if state.code is None else str(state.code)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _since(state: RunState) -> str:
    moment = state.ended_at or state.started_at or state.submitted_at
    return age(time.time() - moment) if moment else ""


def _no_points(folder: RunFolder) -> str:
    from tuneplane.runs.state import read_state

    state = read_state(folder)
    return f"no points of {folder.run_id} yet ({state.state}): log() of tuneplane.report writes them"


def _terminal_width() -> int:
    from shutil import get_terminal_size

    return get_terminal_size((80, 24)).columns


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"
