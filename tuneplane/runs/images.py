"""Which prepared images are still needed: those of runs that have not ended.

`tp image rm`, `tp image gc` and `tp job gc` ask.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from tuneplane.images.folder import ImageFolder, Leftover, Prepared
from tuneplane.images.turn import owner_of
from tuneplane.kernel.errors import TunePlaneError
from tuneplane.runs.index import iterate_runs
from tuneplane.runs.state import read_states
from tuneplane.spec import read


def images_in_use() -> dict[Path, list[str]]:
    """Image file, links resolved → ids of this user's runs that have not ended and start it.

    A run that was prepared and not submitted counts: its script names the file. So does one that is paused, or
    whose restart is still to be carried out.
    """
    found: dict[Path, list[str]] = {}
    starting = {}
    for run in iterate_runs():
        try:
            image = read(run.job).spec.container.image
        except (OSError, TunePlaneError):
            continue
        if image is not None:
            starting[run.run_id] = (run, Path(os.path.realpath(image.path)))
    for state in read_states(run for run, _ in starting.values()):
        if not state.is_final or state.state == "PAUSED" or state.pending_restart:
            found.setdefault(starting[state.run_id][1], []).append(state.run_id)
    return found


LEFTOVER_S = 86_400.0
"""Layers of an interrupted pull are kept this long, for whoever takes it up again."""


def unused_images(
    folders: Sequence[ImageFolder], older_s: float
) -> tuple[list[tuple[ImageFolder, Prepared]], list[Leftover]]:
    """Images and leftovers of this user's that nobody used for `older_s` and no run in `images_in_use` starts."""
    now, held, me = time.time(), images_in_use(), os.geteuid()
    old = [
        (folder, image)
        for folder in folders
        for image in folder.images()
        if image.owner == me
        and Path(os.path.realpath(image.path)) not in held
        and now - image.used_at >= older_s
    ]
    left = [
        item
        for folder in folders
        for item in folder.leftovers()
        if item.owner == me
        and now - item.touched_at >= LEFTOVER_S
        and not (item.kind == "used" and folder.path.joinpath(item.of).exists())
        and owner_of(folder.path, item.of) is None
    ]
    return old, left
