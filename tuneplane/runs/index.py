"""Finding runs again: the storage roots this user ever submitted to, and a run by what a user types."""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Iterator
from pathlib import Path

from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.kernel.files import write_json
from tuneplane.kernel.runfolder import RUN_ID, RunFolder
from tuneplane.kernel.submission import read_submissions


def state_folder() -> Path:
    """`$XDG_STATE_HOME/tuneplane`, else `~/.local/state/tuneplane`; 0700, made when first needed."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local/state")
    folder = Path(base) / "tuneplane"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OperationError(Fault(f"cannot be made: {error.strerror}", str(folder))) from None
    return folder


def current_user() -> str:
    """The name of the user who runs this process."""
    return getpass.getuser()


def storage_roots() -> list[Path]:
    """Every storage root that this user submitted to, `~/tuneplane` always among them."""
    try:
        known = json.loads((state_folder() / "roots.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, OperationError):
        known = []
    found = [Path(root) for root in known if isinstance(root, str)]
    default = Path.home() / "tuneplane"
    return found if default in found else [*found, default]


def remember_root(root: Path) -> None:
    """Add a storage root to those that `tp job ls` looks into."""
    known = storage_roots()
    if root not in known or not (state_folder() / "roots.json").exists():
        write_json(state_folder() / "roots.json", sorted({str(r) for r in [*known, root]}), 0o600)


def iterate_runs(roots: list[Path] | None = None, user: str | None = None) -> Iterator[RunFolder]:
    """Every run folder of a user, in no order. An unreadable folder is passed over."""
    for root in roots if roots is not None else storage_roots():
        base = root / "runs" / (user or current_user())
        for experiment in _folders(base):
            for path in _folders(experiment):
                if RUN_ID.fullmatch(path.name):
                    yield RunFolder(path)


def started_order(run: RunFolder) -> str:
    """A key that sorts runs by the time in their ids."""
    return run.run_id[-20:]


def find_run(text: str, roots: list[Path] | None = None) -> RunFolder:
    """The run that a user means: run id, unique prefix, experiment (its latest), Slurm id, or a path.

    Raises UsageError where none or several fit.
    """
    if "/" in text and (Path(text) / "job.json").is_file():
        return RunFolder(Path(os.path.realpath(text)))
    runs = list(iterate_runs(roots))
    for run in runs:
        if run.run_id == text:
            return run
    of_experiment = [run for run in runs if run.path.parent.name == text]
    if of_experiment:
        return max(of_experiment, key=started_order)
    if text.isdigit() or text.startswith("local-") or _is_array_element(text):
        for run in runs:
            if (run.submissions / f"{text}.json").exists():
                return run
    starting = [run for run in runs if run.run_id.startswith(text)] if text else []
    if len(starting) == 1:
        return starting[0]
    if starting:
        names = ", ".join(sorted(run.run_id for run in starting)[:5])
        more = f" and {len(starting) - 5} more" if len(starting) > 5 else ""
        raise UsageError(Fault(f"{text!r} could be {names}{more}", "RUN", "give more letters"))
    raise UsageError(Fault(f"no run {text!r} of yours", "RUN", "tp job ls lists them"))


def job_ids(run: RunFolder) -> list[str]:
    """Ids of the jobs of a run, oldest first."""
    return [submission.job_id for submission in read_submissions(run)]


def _is_array_element(text: str) -> bool:
    job, _, task = text.partition("_")
    return job.isdigit() and task.isdigit()


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
