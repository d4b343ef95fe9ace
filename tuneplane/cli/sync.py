"""`tp job sync`: a run's points to a tracker elsewhere, at each call what is new."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuneplane.cli.run import find, run_argument
from tuneplane.cli.show import show_notices
from tuneplane.kernel.errors import Exit

if TYPE_CHECKING:
    from tuneplane.collect.series import Series
    from tuneplane.export.wandb import Target
    from tuneplane.kernel.runfolder import RunFolder

POLL_S = 10.0
SESSION_S = 600.0
"""Following, how long until wandb is asked to have everything, so that it is noted as sent."""


@click.group("sync")
def sync_command() -> None:
    """Send a run's points to a tracker elsewhere."""


@sync_command.command("wandb")
@run_argument
@click.option("--project", default="", help="wandb's project; its own default else.")
@click.option("--entity", default="", help="wandb's entity (user or team); its own default else.")
@click.option(
    "--offline-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write here for wandb sync instead of sending.",
)
@click.option("-f", "--follow", is_flag=True, help="Until the run ends.")
def wandb_command(run: str, project: str, entity: str, offline_dir: Path | None, follow: bool) -> int:
    """Send RUN's points to wandb by its own client: at each call what is new.

    Credentials are wandb's own (wandb login, or WANDB_API_KEY).
    """
    from tuneplane.export.sent import alone
    from tuneplane.export.wandb import Target, import_wandb, offline_folder
    from tuneplane.runs.index import state_folder

    folder = find(run)
    target = Target(project, entity, offline_folder(offline_dir, os.environ))
    import_wandb()
    notes = state_folder() / "sync" / "wandb"
    notes.mkdir(mode=0o700, parents=True, exist_ok=True)
    note = notes / f"{target.key(folder.run_id, os.environ)}.json"
    with alone(note):
        _send(folder, target, note, follow)
    return Exit.DONE


def _send(folder: RunFolder, target: Target, path: Path, follow: bool) -> None:
    """Send what is new, and with `follow` what comes until the run has ended."""
    from tuneplane.cli.watch import States
    from tuneplane.collect.store import Store
    from tuneplane.export.sent import read_note
    from tuneplane.export.wandb import Session, wandb_id
    from tuneplane.kernel.errors import Fault, OperationError
    from tuneplane.runs.sources import read_source

    note, states, sent = read_note(path), States([folder]), 0
    with Store() as store:

        def series() -> dict[str, Series]:
            store.refresh([read_source(folder)])
            return store.series(folder.run_id, store.overview(folder.run_id).metrics)

        while True:
            ended = not follow or states.ask()  # before the files are read: nothing comes after that
            lines, overview = series(), store.overview(folder.run_id)
            if overview.fault and not follow:
                raise OperationError(Fault(overview.fault))
            note.plan(lines)
            if note.pending:
                session = Session(
                    target, folder.run_id, folder.path.parent.name, note, overview.hparams, lines
                )
                try:
                    until = time.monotonic() + SESSION_S
                    while not ended and time.monotonic() < until:
                        time.sleep(POLL_S)
                        ended = states.ask()
                        session.send(series())
                except KeyboardInterrupt:
                    session.close()
                    show_notices(["what was sent is noted; the next call goes on from there"])
                    raise
                except BaseException:
                    session.abandon()
                    raise
                session.close()
                sent += session.sent
            if ended:
                break
            time.sleep(POLL_S)
    if sent == 0:
        click.echo(
            f"0 points of {folder.run_id} sent: nothing is new since what {path} notes; without that file all is"
            " sent anew"
        )
        return
    place = "" if target.offline is None else f", in {target.offline}: wandb sync sends them"
    click.echo(f"{sent} points of {folder.run_id} sent as {wandb_id(folder.run_id)}{place}")
