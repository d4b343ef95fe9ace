"""Which prepared images are still needed: those of runs that have not ended. `tp image rm|gc` ask."""

from __future__ import annotations

import os
from pathlib import Path

from tuneplane.kernel.errors import TunePlaneError
from tuneplane.runs.index import iterate_runs
from tuneplane.runs.state import read_states
from tuneplane.spec import read


def images_in_use() -> dict[Path, list[str]]:
    """Image file, links resolved → ids of this user's runs that have not ended and start it.

    A run that was prepared and not submitted counts: its script names the file.
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
        if not state.is_final:
            found.setdefault(starting[state.run_id][1], []).append(state.run_id)
    return found
