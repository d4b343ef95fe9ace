"""Finding runs again: the storage roots this user ever submitted to, and a run by what a user types."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.kernel.files import read_json, write_json
from tuneplane.kernel.runfolder import RUN_ID, RunFolder
from tuneplane.runs.records import CLEARED

SHOWN = 5
"""How many of the runs that a text could mean are named."""


def state_folder() -> Path:
    """`$XDG_STATE_HOME/tuneplane`, else `~/.local/state/tuneplane`; 0700, made when first needed."""
    base = os.environ.get("XDG_STATE_HOME", "")
    if not base.startswith("/"):  # a relative one is invalid: XDG Base Directory Specification
        base = str(Path.home() / ".local/state")
    folder = Path(base) / "tuneplane"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OperationError(Fault(f"cannot be made: {error.strerror}", str(folder))) from None
    return folder


def current_user() -> str:
    """The name of the user who runs this process, by its user id: $USER may say another."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def storage_roots() -> list[Path]:
    """Every storage root that this user submitted to, `~/tuneplane` always among them."""
    found = {Path.home() / "tuneplane"}
    with suppress(OperationError):
        known = [_read_root(path) for path in (state_folder() / "roots").glob("*.json")]
        found.update(root for root in known if root is not None)
    return sorted(found)


def remember_root(root: Path) -> None:
    """Add a storage root to those that `tp job ls` looks into. Raises OSError.

    A file for each, so that two submits at once on two login nodes keep both.
    """
    import hashlib  # late: `tp job ls` needs none

    folder = state_folder() / "roots"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{hashlib.sha256(os.fsencode(root)).hexdigest()[:16]}.json"
    if _read_root(path) != root:
        write_json(path, str(root), 0o600)


def iterate_runs(roots: list[Path] | None = None, user: str | None = None) -> Iterator[RunFolder]:
    """Every run folder of a user once, in no order. An unreadable folder is passed over."""
    for experiment in experiment_folders(roots, user):
        for path in _folders(experiment):
            if RUN_ID.fullmatch(path.name):
                yield RunFolder(path)


def experiment_folders(roots: list[Path] | None = None, user: str | None = None) -> Iterator[Path]:
    """The folder of every experiment of a user once, in no order; none that is a link."""
    bases = [
        root / "runs" / (user or current_user()) for root in (storage_roots() if roots is None else roots)
    ]
    seen: set[str] = set()
    for base in bases:
        real = os.path.realpath(base)
        if real in seen:  # two names of one root
            continue
        seen.add(real)
        yield from _folders(base)


def started_order(run: RunFolder) -> str:
    """A key that sorts runs by the time in their ids; it looks at no file."""
    return run.run_id[-20:]


def latest(runs: list[RunFolder]) -> RunFolder:
    """The newest of runs: by the second in its id, then by when its JobSpec was written.

    One whose folder is not whole, being made or left by a `tp` that was killed, is nobody's latest.
    """
    runs = [run for run in runs if _is_whole(run)] or runs
    newest = max(started_order(run)[:-5] for run in runs)
    return max((run for run in runs if started_order(run).startswith(newest)), key=_written_ns)


def latest_training(runs: list[RunFolder]) -> RunFolder:
    """The newest run that trains, which an experiment's name means; else the newest operation."""
    runs = [run for run in runs if _is_whole(run)] or runs
    for run in sorted(runs, key=started_order, reverse=True):
        if not is_operation(run):
            second = started_order(run)[:-5]
            return latest([r for r in runs if started_order(r).startswith(second) and not is_operation(r)])
    return latest(runs)


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
        return latest_training(of_experiment)
    of_job = _runs_of_job(runs, text)
    if len(of_job) == 1:
        return of_job[0]
    if of_job:
        raise _ambiguous(text, of_job)
    starting = [run for run in runs if run.run_id.startswith(text)] if text else []
    if len(starting) == 1:
        return starting[0]
    if starting:
        raise _ambiguous(text, starting)
    raise UsageError(Fault(f"no run {text!r} of yours", "RUN", "tp job ls lists them"))


def _is_whole(run: RunFolder) -> bool:
    return run.script.exists() or (run.path / CLEARED).exists()


def is_operation(run: RunFolder) -> bool:
    """Whether a run works on another one (export, eval): an experiment's name means the run that trained."""
    try:
        spec = read_json(run.job)["spec"]
        return bool(spec.get("subject"))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return False


def _runs_of_job(runs: list[RunFolder], text: str) -> list[RunFolder]:
    """Runs of a job id: `1234`, `1234_5`, `local-1234`; `1234` is also the array of its elements.

    Slurm gives a number again after its highest, and this machine a pid: then the latest run is meant.
    """
    job, _, task = text.removeprefix("local-").partition("_")
    if not job.isdecimal() or (task and not task.isdecimal()):
        return []
    exact = [run for run in runs if (run.submissions / f"{text}.json").exists()]
    if exact:
        return [latest(exact)]
    if task or text.startswith("local-"):
        return []
    return [run for run in runs if any(run.submissions.glob(f"{text}_*.json"))]


def _ambiguous(text: str, runs: list[RunFolder]) -> UsageError:
    names = ", ".join(sorted(run.run_id for run in runs)[:SHOWN])
    more = f" and {len(runs) - SHOWN} more" if len(runs) > SHOWN else ""
    return UsageError(Fault(f"{text!r} could be {names}{more}", "RUN", "give more letters, or the whole id"))


def _written_ns(run: RunFolder) -> int:
    try:
        return run.job.stat().st_mtime_ns
    except OSError:
        return 0


def _read_root(path: Path) -> Path | None:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return None
    return Path(value) if isinstance(value, str) and value.startswith("/") else None


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
