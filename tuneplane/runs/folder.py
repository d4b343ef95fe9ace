"""Making a run folder: complete before anything is submitted, and nobody else's to change."""

from __future__ import annotations

import os
import secrets
import stat
import time
from pathlib import Path

from tuneplane.kernel.errors import Fault, OperationError, UsageError
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
    """Faults of the existing folders above `path`: one that a stranger owns or may write could be swapped.

    trusted: user ids that may own them; root always may. A sticky folder such as /tmp is safe.
    """
    faults = []
    resolved = Path(os.path.realpath(path))
    for folder in [resolved, *resolved.parents]:
        try:
            status = folder.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            faults.append(Fault(f"cannot be looked at: {error.strerror}", str(folder)))
            continue
        if not stat.S_ISDIR(status.st_mode):
            faults.append(Fault("is not a folder", str(folder), "choose another storage root"))
        elif status.st_uid not in (0, *trusted):
            faults.append(
                Fault(
                    f"belongs to user id {status.st_uid}, who could exchange your runs",
                    str(folder),
                    "choose a storage root below folders of your own or root's",
                )
            )
        elif status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            faults.append(
                Fault(
                    "everybody may write there and it has no sticky bit",
                    str(folder),
                    f"chmod o-w {folder}, or choose another storage root",
                )
            )
    return faults


def make_run_folder(storage_root: Path, user: str, experiment: str, run_id: str, mode: int) -> RunFolder:
    """Make the run's folder and those above it. Raises OperationError; an existing run is never entered."""
    path = run_path(storage_root, user, experiment, run_id)
    faults = check_parents(path, (os.getuid(),))
    if faults:
        raise UsageError(*faults)
    try:
        for folder in reversed(path.parents):
            if not folder.exists():
                folder.mkdir(mode=0o755 if folder == storage_root / "runs" else mode, exist_ok=True)
        path.mkdir(mode=0o700)
        run = RunFolder(path)
        for folder in (run.ingest, run.out, run.slurm, run.submissions, run.attempts_folder):
            folder.mkdir(mode=mode)
        for folder in (run.ingest, run.out, run.slurm, run.submissions, run.attempts_folder, path):
            folder.chmod(mode)  # exact, whatever the umask
    except OSError as error:
        raise OperationError(
            Fault(
                f"run folder not made: {error.strerror}",
                str(error.filename or path),
                "free space there, or set `storage_root` of the cluster profile",
            )
        ) from None
    return run
