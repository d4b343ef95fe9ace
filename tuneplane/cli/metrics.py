"""`tp job metrics`: curves and last values of runs in the terminal. Imports neither Hydra nor submitit."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from tuneplane.cli.completion import complete_runs
from tuneplane.cli.run import json_option, run_argument
from tuneplane.cli.show import show_json, show_notices
from tuneplane.kernel.errors import Exit, Fault, UsageError

if TYPE_CHECKING:
    from tuneplane.cli.curves import RunMetrics
    from tuneplane.collect.chart import Look
    from tuneplane.collect.figure import X

MOST_CURVES = 6
"""How many curves are drawn where no metric was named."""

_COMPARE = "--compare"


class CompareRuns(click.Command):
    """A command whose `--compare` takes every word up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        taken, comparing = [], 0
        for index, word in enumerate(args):
            if word == "--":
                taken += args[index:]
                break
            if word == _COMPARE:
                comparing = 1
            elif word.startswith("-"):
                comparing = 0
            elif comparing:
                if comparing > 1:
                    taken.append(_COMPARE)
                comparing += 1
            taken.append(word)
        return super().parse_args(ctx, taken)


@click.command("metrics", cls=CompareRuns)
@run_argument
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("-f", "--follow", is_flag=True, help="Until the run ends; exit 3 if it failed.")
@click.option(
    _COMPARE, metavar="RUN...", multiple=True, shell_complete=complete_runs, help="Draw these runs beside it."
)
@click.option(
    "--x", "x", type=click.Choice(["step", "relative", "time"]), default="step", show_default=True,
    help="What lies below: steps, time since the run began, time of day.",
)  # fmt: skip
@click.option("--log", is_flag=True, help="Values by powers of ten.")
@click.option(
    "--smooth", type=click.FloatRange(0, 1, max_open=True), default=0.0, metavar="WEIGHT",
    help="Smooth: weight of earlier values, 0 to below 1, such as 0.9.",
)  # fmt: skip
@click.option("--ascii", "plain", is_flag=True, help="Draw with ASCII alone.")
@click.option("--csv", "as_csv", is_flag=True, help="Every point as a line of CSV.")
@json_option
def metrics_command(
    run: str, names: tuple[str, ...], follow: bool, compare: tuple[str, ...], x: X, log: bool, smooth: float,
    plain: bool, as_csv: bool, as_json: bool,
) -> int:  # fmt: skip
    """Show RUN's metrics: curves, and last values.

    NAME: a metric, the first or last part of some (train, loss), a glob ('val/*') or re:EXPRESSION.
    """
    from tuneplane.cli.curves import CurveReader, find_runs
    from tuneplane.collect.figure import View

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names in a terminal that is not of UTF-8
    _refuse_together({"--follow": follow, "--json": as_json, "--csv": as_csv})
    folders = find_runs(run, compare)
    view = View(x, log, smooth)
    look = terminal_look(plain)
    with CurveReader(folders) as reader:
        if follow:
            from tuneplane.cli.watch import watch

            return watch(reader, names, view, look)
        reader.refresh()
        reader.refuse_unread()
        chosen = reader.choose(names)
        if as_csv:
            from tuneplane.export.rows import rows, write_csv

            points = (
                row
                for folder in folders
                for row in rows(folder.run_id, reader.store.series(folder.run_id, chosen), hidden=True)
            )
            write_csv(points, sys.stdout)
        elif as_json:
            runs = [_as_json(reader.metrics(folder, chosen), chosen) for folder in folders]
            show_json({"runs": runs} if compare else runs[0])
        else:
            for notice in reader.missing():
                show_notices([notice])
            for text in reader.charts(reader.to_draw(chosen, names, MOST_CURVES), view, look):
                click.echo(text + "\n")
            for line in reader.summary(chosen, table_width()):
                click.echo(line)
            show_notices(reader.notices(chosen, names, MOST_CURVES))
    return Exit.DONE


def _refuse_together(given: dict[str, bool]) -> None:
    said = [flag for flag, is_given in given.items() if is_given]
    if len(said) > 1:
        raise UsageError(
            Fault(f"{' and '.join(said)} exclude each other", "tp job metrics", "leave one away")
        )


def terminal_look(plain: bool) -> Look:
    """What standard output can show: characters, colours (https://no-color.org), and how wide it is."""
    from shutil import get_terminal_size

    from tuneplane.collect.chart import Look

    encoding = (sys.stdout.encoding or "").lower()
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Look(
        width=min(get_terminal_size((80, 24)).columns, 100),
        height=14,
        unicode="utf" in encoding and not plain,
        colours=coloured,
    )


def table_width() -> int | None:
    """Columns of the terminal, None where tables go to a file or a program and are not cut."""
    from tuneplane.cli.show import terminal_width

    return terminal_width()


def _as_json(run: RunMetrics, chosen: Sequence[str]) -> dict[str, Any]:
    """One run for programs. Numbers that JSON has not are the words NaN, Infinity, -Infinity."""
    from dataclasses import asdict

    from tuneplane.export.rows import json_number

    def numbers(values: Sequence[float]) -> list[Any]:
        return [json_number(value) for value in values]

    overview = run.overview
    metrics = []
    for name in chosen:
        if name not in run.series:
            continue
        series, last = run.series[name], asdict(overview.metrics[name])
        metrics.append(
            {
                **{
                    key: json_number(value) if isinstance(value, float) else value
                    for key, value in last.items()
                },
                "steps": numbers(series.steps),
                "values": numbers(series.values),
                "times": list(series.times_s),
                "attempt_of": list(series.attempts),
                "hidden_points": {
                    str(attempt): {
                        "steps": numbers(points.steps),
                        "values": numbers(points.values),
                        "times": list(points.times_s),
                    }
                    for attempt, points in sorted(series.hidden.items())
                },
            }
        )
    return {
        "run_id": run.run_id,
        "metrics": metrics,
        "hparams": dict(overview.hparams),
        "attempts": list(overview.attempts),
        "dropped_points": overview.dropped_points,
        "dropped_values": overview.dropped_values,
        "gaps": overview.gaps,
        "torn_lines": overview.torn_lines,
        "refused": dict(overview.refused),
        "skipped": dict(overview.skipped),
        "unreadable": dict(overview.unreadable),
        "fault": overview.fault,
        "age_s": run.age_s(),
    }
