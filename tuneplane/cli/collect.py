"""`tp collect`: read what runs report, once or all the time. Imports neither Hydra nor submitit."""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING, Any

import click

from tuneplane.cli.completion import complete_runs
from tuneplane.cli.run import find, json_option
from tuneplane.cli.show import age, plain, show_json, show_notices, show_table
from tuneplane.kernel.errors import Exit

if TYPE_CHECKING:
    from tuneplane.collect.overview import Overview
    from tuneplane.collect.store import Store
    from tuneplane.kernel.errors import Fault, UsageError
    from tuneplane.runs.followed import FollowedRuns


_QUIET_TURNS = 15
"""How often a run without new points is looked at for trouble: at each fifteenth turn."""


@click.command("collect")
@click.argument("runs", nargs=-1, shell_complete=complete_runs)
@click.option("-f", "--follow", is_flag=True, help="Go on reading, until interrupted.")
@click.option(
    "--every",
    "pause_s",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds between two looks, with --follow.",
)
@json_option
def collect_command(runs: tuple[str, ...], follow: bool, pause_s: float, as_json: bool) -> int:
    """Read what RUNS report, or all of yours, into this machine's cache; say what was read and what was not."""
    from tuneplane.collect.store import Store
    from tuneplane.runs.followed import FollowedRuns

    if follow and as_json:
        raise UsageError(Fault("--follow and --json exclude each other", "", "give --json for one look"))
    followed = FollowedRuns([find(run) for run in runs] if runs else None)
    with Store() as store:
        if store.notice:
            show_notices([f"nothing is kept for the next time: {store.notice}"])
        if follow:
            _follow(store, followed, pause_s)
        return _once(store, followed, as_json)


def _once(store: Store, followed: FollowedRuns, as_json: bool) -> int:
    sources = followed.sources()
    store.refresh(sources)
    seen = {source.run_id: store.overview(source.run_id) for source in sources}
    faults = {**followed.faults, **{run_id: o.fault for run_id, o in seen.items() if o.fault}}
    if as_json:
        show_json([_as_json(run_id, o, store, followed) for run_id, o in seen.items()])
    else:
        rows = [
            (
                run_id,
                followed.states[run_id].state,
                str(len(overview.metrics)),
                str(store.new_points(run_id)),
                age(max(0.0, time.time() - overview.newest_s)) if overview.newest_s else "",
            )
            for run_id, overview in seen.items()
        ]
        show_table(("RUN", "STATE", "METRICS", "NEW VALUES", "AGE"), rows)
        if not rows and not faults:
            click.echo("no runs of yours")
    show_notices(f"{run_id}: {told}" for run_id, o in seen.items() for told in map(plain, o.losses()))
    show_notices(f"{run_id} could not be read: {why}" for run_id, why in faults.items())
    return Exit.FAILED if faults else Exit.DONE


def _follow(store: Store, followed: FollowedRuns, pause_s: float) -> None:
    """Read on for ever; each trouble is told once, and how a run ended."""
    told: set[str] = set()
    kept = not store.notice
    for turn in count():
        sources = followed.sources()
        store.refresh(sources)
        for source in sources:
            run_id = source.run_id
            if not (store.new_points(run_id) or source.ended or turn % _QUIET_TURNS == 0):
                continue
            overview = store.overview(run_id)
            lines = [f"{run_id}: {trouble}" for trouble in map(plain, overview.losses(counted=False))]
            if overview.fault:
                lines.append(f"{run_id} could not be read: {overview.fault}")
            if source.ended:
                click.echo(f"{run_id} {followed.states[run_id].state}: {len(overview.metrics)} metrics")
            show_notices(line for line in lines if line not in told)
            told.update(lines)
        lines = [f"{run_id} could not be read: {why}" for run_id, why in followed.faults.items()]
        show_notices(line for line in lines if line not in told)
        told.update(lines)
        if kept and store.notice:
            kept = False
            show_notices([f"nothing is kept for the next time: {store.notice}"])
        time.sleep(pause_s)


def _as_json(run_id: str, overview: Overview, store: Store, followed: FollowedRuns) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "run_id": run_id,
        "state": followed.states[run_id].state,
        "new_values": store.new_points(run_id),
        **asdict(overview),
    }
