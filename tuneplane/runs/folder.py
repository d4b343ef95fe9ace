"""Making a run folder: complete before anything is submitted, and nobody else's to change."""

from __future__ import annotations

import os
import secrets
import shlex
import stat
import time
from contextlib import suppress
from pathlib import Path

from tuneplane.kernel.errors import Fault, OperationError, raise_faults
from tuneplane.kernel.files import room_or_right
from tuneplane.kernel.runfolder import RunFolder

MAX_EXPERIMENT_IN_ID = 64


def new_run_id(experiment: str, now_s: float | None = None) -> str:
    """`<experiment>-<UTC date>-<time>-<4 random>`: unique, sortable, typed with few letters."""
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now_s))
    alphabet = "0123456789abcdefghijklmnopqrstuvwxyz"
    tail = "".join(secrets.choice(alphabet) for _ in range(4))
    return f"{experiment[:MAX_EXPERIMENT_IN_ID]}-{moment}-{tail}"


def run_path(storage_root: Path, user: str, experiment: str, run_id: str) -> Path:
    """Where a run lives below a storage root."""
    return storage_root / "runs" / user / experiment / run_id


def check_parents(path: Path, trusted: tuple[int, ...]) -> list[Fault]:
    """Faults of the existing folders and links above `path`: what a stranger owns or may write could be swapped.

    trusted: user ids that may own them; root always may. A sticky folder such as /tmp is safe.
    """
    faults: list[Fault] = []
    seen: set[Path] = set()
    _check_chain(path.absolute(), (0, *trusted), faults, seen)
    return faults


def check_own(run: RunFolder) -> None:
    """Raise UsageError where a run is not surely this user's: acting on it would run what a stranger wrote."""
    faults = check_parents(run.path, (os.getuid(),))
    if run.path.stat().st_uid != os.getuid():
        what = f"belongs to user id {run.path.stat().st_uid}, so it can be looked at and no more"
        faults = [Fault(what, str(run.path), "submit an experiment of your own")]
    raise_faults(faults)


def make_run_folder(storage_root: Path, user: str, experiment: str, run_id: str, mode: int) -> RunFolder:
    """Make the run's folder and those above it, with exact modes; an existing run is never entered.

    Raises UsageError where a stranger could change them, OperationError where the machine refuses. What was
    begun is then gone.
    """
    path = run_path(storage_root, user, experiment, run_id)
    raise_faults(check_parents(path, (os.getuid(),)))
    run = RunFolder(path)
    made: list[Path] = []
    try:
        for folder in reversed(path.parents):
            # Others look for their own folders in runs/ of a root that a site shares.
            _make(folder, 0o755 if folder == storage_root / "runs" else mode, made)
        path.mkdir(mode=0o700)  # exclusive
        made.append(path)
        for folder in (run.ingest, run.out, run.slurm, run.submissions, run.attempts_folder):
            _make(folder, mode, made)
        # Once more, now that all are there: somebody may have made one of them a moment ago.
        raise_faults(check_parents(path, (os.getuid(),)))
        _set_mode(path, mode)
    except OSError as error:
        _unmake(made)
        raise OperationError(
            Fault(
                f"run folder not made: {error.strerror}",
                str(error.filename or path),
                f"{room_or_right(error)}, or set `storage_root` of the cluster profile",
            )
        ) from None
    except BaseException:
        _unmake(made)
        raise
    return run


def _make(folder: Path, mode: int, made: list[Path]) -> None:
    """Make a folder with this very mode, where there is none."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return
    made.append(folder)
    _set_mode(folder, mode)


def _set_mode(folder: Path, mode: int) -> None:
    """Exact, whatever the umask; a project folder's group is passed on as it does (setgid): quotas count by it."""
    folder.chmod(mode | folder.stat().st_mode & stat.S_ISGID)


def _unmake(made: list[Path]) -> None:
    for folder in reversed(made):
        with suppress(OSError):  # somebody else uses it by now
            folder.rmdir()


def _check_chain(path: Path, trusted: tuple[int, ...], faults: list[Fault], seen: set[Path]) -> None:
    """Look at every part of a path and, where one is a link, at the path that it leads to."""
    for part in [*reversed(path.parents), path]:
        if part in seen:
            continue
        seen.add(part)
        try:
            status = part.lstat()
        except FileNotFoundError:
            return
        except OSError as error:
            faults.append(Fault(f"cannot be looked at: {error.strerror}", str(part)))
            return
        fault = _fault_of(part, status, trusted)
        if fault:
            faults.append(fault)
        if stat.S_ISLNK(status.st_mode):
            _check_chain(part.parent / part.readlink() / path.relative_to(part), trusted, faults, seen)
            return


def _fault_of(path: Path, status: os.stat_result, trusted: tuple[int, ...]) -> Fault | None:
    if status.st_uid not in trusted:
        return Fault(
            f"belongs to user id {status.st_uid}, who could exchange your runs",
            str(path),
            "choose a storage root below folders of your own or root's",
        )
    if stat.S_ISLNK(status.st_mode):
        return None
    if not stat.S_ISDIR(status.st_mode):
        return Fault("is not a folder", str(path), "choose another storage root")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return Fault(
            "everybody may write there and it has no sticky bit",
            str(path),
            f"chmod o-w {shlex.quote(str(path))}, or choose another storage root",
        )
    return None
