"""`tp job metrics`: last values and curves in the terminal. Imports neither Hydra nor submitit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from tuneplane.cli.run import find, json_option, read_job, run_argument
from tuneplane.cli.show import show_json, show_notices, show_table
from tuneplane.kernel.errors import Fault, UsageError

if TYPE_CHECKING:
    from tuneplane.collect.metrics import LastValue, Metrics
    from tuneplane.kernel.runfolder import RunFolder


@click.command("metrics")
@run_argument
@click.argument("names", nargs=-1)
@click.option("--ascii", "plain", is_flag=True, help="Draw with ASCII alone.")
@json_option
def metrics_command(run: str, names: tuple[str, ...], plain: bool, as_json: bool) -> None:
    """Show RUN's metrics: last values, and curves in the terminal. NAMES: only these."""
    from tuneplane.collect.chart import number_text, render_curve, step_text
    from tuneplane.collect.metrics import last_values, read_metrics

    folder = find(run)
    metrics = read_metrics(folder.path, folder.run_id, read_job(folder).spec.reporting.token_sha256)
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


def _no_points(folder: RunFolder) -> str:
    from tuneplane.runs.state import read_state

    state = read_state(folder)
    return f"no points of {folder.run_id} yet ({state.state}): log() of tuneplane.report writes them"


def _terminal_width() -> int:
    from shutil import get_terminal_size

    return get_terminal_size((80, 24)).columns
