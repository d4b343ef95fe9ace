"""`tp job export-metrics`: a run's points as a file for other programs. Imports neither Hydra nor submitit."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import click

from tuneplane.cli.run import run_argument
from tuneplane.cli.show import show_notices
from tuneplane.kernel.errors import Exit, Fault, OperationError, UsageError

ENDINGS = {"csv": ".csv", "jsonl": ".jsonl", "tensorboard": "-tensorboard"}


@click.command("export-metrics")
@run_argument
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "--format",
    "form",
    type=click.Choice(list(ENDINGS)),
    required=True,
    help="tensorboard: a folder of event files.",
)
@click.option("--out", help="Where to; RUN with an ending here else, - for standard output.")
@click.option(
    "--attempts",
    type=click.Choice(["merged", "all"]),
    default="merged",
    show_default=True,
    help="all: what later attempts did anew, too.",
)
@click.option("--force", is_flag=True, help="Replace an earlier export.")
def export_command(
    run: str, names: tuple[str, ...], form: str, out: str | None, attempts: str, force: bool
) -> int:
    """Write RUN's points to a file: CSV, JSON lines, or TensorBoard event files.

    NAME: as of tp job metrics; all metrics else. The file is there when it is whole.
    """
    from tuneplane.cli.curves import CurveReader, find_runs, loss_words
    from tuneplane.collect.printable import printable
    from tuneplane.export.events import write_events
    from tuneplane.export.place import new_file, new_folder
    from tuneplane.export.rows import rows, write_csv, write_jsonl

    with CurveReader(find_runs(run, ())) as reader:
        (folder,) = reader.folders
        if out is not None and not out.strip():
            raise UsageError(Fault("names no file", "--out", "leave it away, or give a name"))
        if out == "-" and form == "tensorboard":
            raise UsageError(Fault("event files are a folder", "--out", "give the name of one"))
        reader.refresh()
        reader.refuse_unread()
        chosen = reader.choose(names)
        series = reader.store.series(folder.run_id, chosen)
        if not any(len(line) for line in series.values()):
            show_notices(printable(words) for words in loss_words(reader.metrics(folder, ()).overview))
            what = "; ".join(reader.missing()) or f"no points of {folder.run_id}"
            raise OperationError(Fault(what, folder.run_id, "nothing was written"))
        place = Path(out) if out else Path(folder.run_id + ENDINGS[form])
        if form == "tensorboard":
            with new_folder(place, force) as target:
                count = write_events(target, folder.run_id, series, by_attempt=attempts == "all")
        else:
            write = write_csv if form == "csv" else write_jsonl
            points = rows(folder.run_id, series, hidden=attempts == "all")
            if out == "-":
                if isinstance(sys.stdout, io.TextIOWrapper):
                    sys.stdout.reconfigure(errors="backslashreplace")  # names where it is not of UTF-8
                count = write(points, sys.stdout)
            else:
                with new_file(place, force) as file:
                    count = write(points, file)
        show_notices(printable(words) for words in loss_words(reader.metrics(folder, ()).overview))
    if out != "-":
        click.echo(f"{count} points of {len(series)} metrics: {place}")
    return Exit.DONE
