"""`tp job gc`: what may go, as a list; with --yes it goes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuneplane.cli.run import json_option
from tuneplane.cli.show import age, show_json, show_notices, show_table, size
from tuneplane.kernel.errors import Exit, Fault, OperationError, UsageError

if TYPE_CHECKING:
    from tuneplane.runs.clearing import Item

UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 7 * 86_400.0}


@click.command("gc")
@click.option(
    "--older-than", "older", default="30d", show_default=True, metavar="AGE", help="30m, 12h, 7d, 8w."
)
@click.option("--with-out", is_flag=True, help="Outputs too; else out/ of a run stays.")
@click.option("--experiment", help="Only runs of this experiment.")
@click.option("--yes", is_flag=True, help="Remove them; else they are only listed.")
@json_option
def gc_command(older: str, with_out: bool, experiment: str | None, yes: bool, as_json: bool) -> int:
    """List, or with --yes remove, what is not needed any more: your runs that ended long ago, half-made ones,
    work folders that killed agents left on this machine, and prepared images that no unended run starts.

    A run that is not surely over stays, and so does its out/ without --with-out.
    """
    from tuneplane.runs.clearing import clear, leftovers, old_runs
    from tuneplane.runs.index import iterate_runs
    from tuneplane.runs.workfolders import abandoned_folders

    older_s = parse_age(older)
    everything = list(iterate_runs())
    runs = [run for run in everything if experiment in (None, run.path.parent.name)]
    looked = old_runs(runs, older_s, with_out=with_out)
    items = [*looked.items, *leftovers(_experiments(experiment))]
    if experiment is None:
        items += [*abandoned_folders(everything), *_images(older_s)]
    faults: list[Fault] = []
    gone: list[Item] = []
    for item in items if yes else ():
        try:
            _remove_image(item) if item.kind == "image" else clear(item)
            gone.append(item)
        except OperationError as error:
            faults += error.faults
    if as_json:
        show_json(
            {
                "removed": yes,
                "items": [_as_dict(item) for item in (gone if yes else items)],
                "bytes": sum(item.size_bytes for item in (gone if yes else items)),
                "kept": looked.kept,
                "faults": [str(fault) for fault in faults],
            }
        )
    else:
        _show(gone if yes else items, looked.kept, yes)
    if faults and not as_json:
        raise OperationError(*faults)
    return Exit.FAILED if faults else Exit.DONE


def parse_age(text: str) -> float:
    """Seconds of `30m`, `12h`, `7d` or `8w`. Raises UsageError."""
    found = re.fullmatch(r"([0-9]{1,5})([mhdw])", text, re.ASCII)
    if found is None:
        remedy = "say it in minutes, hours, days or weeks: 30m, 12h, 7d, 8w"
        raise UsageError(Fault(f"{text!r} is no age", "--older-than", remedy))
    return int(found[1]) * UNITS_S[found[2]]


def _show(items: list[Item], kept: dict[str, str], yes: bool) -> None:
    rows = [
        (item.kind, item.name, item.state, age(max(0.0, item.age_s)), size(item.size_bytes), _what(item))
        for item in sorted(items, key=lambda item: (item.kind, -item.age_s))
    ]
    show_table(("KIND", "NAME", "STATE", "AGE", "SIZE", "WHAT"), rows)
    show_notices(f"{run_id} stays: {why}" for run_id, why in sorted(kept.items()))
    if not items:
        click.echo("nothing to remove")
        return
    total = size(sum(item.size_bytes for item in items))
    click.echo(f"{total} freed" if yes else f"{total} to be freed; nothing is removed yet: add --yes")


def _what(item: Item) -> str:
    return "all but out/" if item.keeps_out else "all of it"


def _as_dict(item: Item) -> dict[str, object]:
    return {
        "kind": item.kind,
        "name": item.name,
        "path": item.path,
        "state": item.state,
        "age_s": item.age_s,
        "bytes": item.size_bytes,
        "keeps_out": item.keeps_out,
    }


def _experiments(experiment: str | None) -> list[Path]:
    """Folders of this user's experiments, and of no link."""
    from tuneplane.runs.index import experiment_folders

    return [path for path in experiment_folders() if experiment in (None, path.name)]


def _images(older_s: float) -> list[Item]:
    """Images in this user's own folders; those of the site's shared folder are `tp image gc`'s."""
    import time

    from tuneplane.images.folder import ImageFolder
    from tuneplane.runs.clearing import Item
    from tuneplane.runs.images import unused_images
    from tuneplane.runs.index import storage_roots

    old, _ = unused_images([ImageFolder(root / "images") for root in storage_roots()], older_s)
    now = time.time()
    return [
        Item("image", image.path, image.path.name, "", now - image.used_at, image.record.size_bytes)
        for _, image in old
    ]


def _remove_image(item: Item) -> None:
    from tuneplane.images.folder import ImageFolder

    folder = ImageFolder(item.path.parent)
    for image in folder.images():
        if image.path == item.path:
            try:
                folder.remove(image)
            except OSError as error:
                raise OperationError(Fault(f"not removed: {error.strerror}", str(item.path))) from None
