"""What `tp job gc` may remove: old runs that are surely over, half-made ones, work folders of dead agents here.

Looking and removing are apart, so that the dry run is the rule. Nothing that a link points at is touched, and no
run of another user's.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tuneplane.kernel.errors import Fault, OperationError, TunePlaneError
from tuneplane.kernel.files import write_json
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.unpack import remove_tree
from tuneplane.launch.slurm_commands import FINAL, Answer, query_own
from tuneplane.runs.adopt import jobs_by_folder
from tuneplane.runs.folder import check_own
from tuneplane.runs.records import CLEARED, known_jobs
from tuneplane.runs.starting import Another, is_being_started, starting
from tuneplane.runs.state import RunState, read_states

OVER = FINAL - {"REVOKED"} | {"NOT_SUBMITTED", "NOT_RUN"}
"""States of a run that is surely over. Not LOST, which may be wrong, nor PAUSED, which is to go on."""

HALF_MADE_S = 86_400.0
"""A half-made folder that nothing changed for so long is no submit under way: packing a lab takes minutes."""

GOING = ".gc-"
"""Begin of the name that a run's folder gets before it is removed, so that it is never seen half."""

STILL_THERE = "Slurm still has a job of it"

KEPT = ("out", "job.json", CLEARED)


@dataclass(frozen=True)
class Item:
    """Something that may go. `age_s`: since its end, or its last change."""

    kind: str  # run | half-made | leftover | work folder
    path: Path
    name: str
    state: str
    age_s: float
    size_bytes: int
    keeps_out: bool = False
    told: RunState | None = None
    mark: tuple[int, tuple[str, ...]] = (0, ())  # of a run: attempts and jobs, to see a start in between


@dataclass
class Looked:
    """What may go, and run → why it may not, of those that are old enough or cannot be judged."""

    items: list[Item] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)


def old_runs(runs: Iterable[RunFolder], older_s: float, *, with_out: bool) -> Looked:
    """Runs that ended at least `older_s` ago. Asks Slurm once more than `tp job ls` does, for all together."""
    folders = [run for run in runs if _is_own(run)]
    states = read_states(folders)
    found = Looked()
    worked_on = {state.subject: state for state in states if state.subject and state.state not in OVER}
    queue: Answer | None = None
    working: set[str] = set()  # real paths of folders in which a job works
    for run, state in zip(folders, states, strict=True):
        age_s = time.time() - _moved_at(run, state)
        least_s = min(older_s, HALF_MADE_S) if state.state == "INCOMPLETE" else older_s
        if state.state == "INCOMPLETE":
            least_s = max(least_s, HALF_MADE_S)
        if age_s < least_s:
            continue
        if queue is None:
            queue = query_own()
            working = set(jobs_by_folder(queue))
        why = _why_not(run, state, queue)
        if not why and os.path.realpath(run.path) in working:
            why = STILL_THERE
        if not why and run.run_id in worked_on:
            operation = worked_on[run.run_id]
            why = f"{operation.run_id}, which works on it, is {operation.state}"
        if why:
            found.kept[run.run_id] = why
            continue
        with suppress(FileNotFoundError):  # another gc was quicker
            item = _item(run, state, age_s, with_out)
            if isinstance(item, str):
                found.kept[run.run_id] = item
            elif item is not None:
                found.items.append(item)
    return found


def _is_own(run: RunFolder) -> bool:
    try:
        return run.path.lstat().st_uid == os.geteuid()
    except OSError:  # another gc was quicker
        return False


def _why_not(run: RunFolder, state: RunState, queue: Answer) -> str:
    """Why a run is not surely over; empty where it is."""
    try:
        check_own(run)
        jobs = known_jobs(run)
    except TunePlaneError as error:
        return str(error.faults[0])
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    if state.pending_restart:
        return f"its restart was not carried out: tp job stop {run.run_id} ends it"
    if state.state not in OVER | {"INCOMPLETE"}:
        return f"it is {state.state}"
    slurms = {job.job_id for job in jobs if not job.is_local}
    if slurms and queue.refused and not state.cleared:
        return f"Slurm does not say that its jobs are over: {queue.refused}"
    there = [queue.job_of(run.path, job_id) for job_id in slurms]
    if any(job is not None and job.state not in FINAL for job in there):
        return STILL_THERE
    if any(job.is_alive_here() for job in jobs) or is_being_started(run):
        return "a process of it is there"
    return ""


def _item(run: RunFolder, state: RunState, age_s: float, with_out: bool) -> Item | str | None:
    """The run as something to remove; why it cannot be; None where nothing of it is left to remove."""
    everything, own = tree_size(run.path)
    of_out, _ = tree_size(run.out)
    if not own:
        return "another file system is mounted in it"
    keeps_out = not with_out and state.state != "INCOMPLETE" and _has_content(run.out)
    size_bytes = everything - (of_out if keeps_out else 0)
    if keeps_out and not _others(run):
        return None
    kind = "half-made" if state.state == "INCOMPLETE" else "run"
    return Item(kind, run.path, run.run_id, state.state, age_s, size_bytes, keeps_out, state, _mark(run))


def leftovers(experiments: Iterable[Path]) -> list[Item]:
    """Folders of runs whose removal was interrupted."""
    found = []
    for experiment in experiments:
        with suppress(OSError):
            for path in experiment.glob(f"{GOING}*"):
                status = path.lstat()
                if status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode):
                    age_s, size_bytes = time.time() - status.st_mtime, tree_size(path)[0]
                    found.append(Item("leftover", path, path.name.removeprefix(GOING), "", age_s, size_bytes))
    return found


def clear(item: Item) -> None:
    """Remove one item. Raises OperationError where the machine refuses, or the run was started meanwhile."""
    run = RunFolder(item.path)
    try:
        if item.kind in ("run", "half-made"):
            with _alone(run):
                if _mark(run) != item.mark:
                    run.path.lstat()
                    raise OperationError(Fault("it was started meanwhile, and is left as it is", item.name))
                _clear_run(run, item)
        else:
            remove_tree(item.path)
    except FileNotFoundError:  # another gc was quicker
        return
    except OSError as error:
        where = str(error.filename or item.path)
        raise OperationError(Fault(f"not removed: {error.strerror or error}", where)) from None


@contextmanager
def _alone(run: RunFolder) -> Iterator[None]:
    """No start of the run meanwhile; on a full disk, where that cannot be noted, nobody can start it either."""
    run.path.lstat()
    with ExitStack() as held:
        try:
            held.enter_context(starting(run))
        except Another:
            raise
        except OperationError:
            pass
        yield


def _clear_run(run: RunFolder, item: Item) -> None:
    if item.keeps_out:
        assert item.told is not None
        if not item.told.cleared:
            _note_cleared(run, item.told)
        for path in _others(run):
            remove_tree(path)
        return
    going = run.path.with_name(f"{GOING}{run.run_id}-{secrets.token_hex(3)}")
    run.path.rename(going)
    remove_tree(going)
    with suppress(OSError):  # other runs of the experiment are there
        run.path.parent.rmdir()


def _note_cleared(run: RunFolder, state: RunState) -> None:
    told = {name: value for name, value in asdict(state).items() if name != "nodes"}
    try:
        write_json(run.path / CLEARED, {**told, "cleared_at": time.time()}, 0o600)
    except OSError:  # a full disk: its largest file of those that go makes room
        run.capsule.unlink(missing_ok=True)
        write_json(run.path / CLEARED, {**told, "cleared_at": time.time()}, 0o600)


def _others(run: RunFolder) -> list[Path]:
    """What of a run's folder goes where its outputs are kept. The mark of whoever is at it stays until the end."""
    return [
        p for p in sorted(run.path.iterdir()) if p.name not in KEPT and not p.name.startswith(".start.turn")
    ]


def _mark(run: RunFolder) -> tuple[int, tuple[str, ...]]:
    names = tuple(sorted(path.name for path in run.submissions.glob("*.json")))
    return len(run.attempts()), names


def _moved_at(run: RunFolder, state: RunState) -> float:
    """When a run ended, as far as is known; else the last change of its own files."""
    if state.ended_at:
        return state.ended_at
    newest = state.submitted_at or 0.0
    for path in (run.path, *run.path.glob("*"), *run.path.glob("attempts/*/*"), *run.path.glob("slurm/*")):
        with suppress(OSError):
            newest = max(newest, path.lstat().st_mtime)
    return newest


def _has_content(path: Path) -> bool:
    """Whether there is anything at `path`: a link in place of a folder counts, wherever it leads."""
    try:
        return not stat.S_ISDIR(path.lstat().st_mode) or any(path.iterdir())
    except FileNotFoundError:
        return False


def tree_size(path: Path) -> tuple[int, bool]:
    """Bytes that `path` and all below it take on disk, and whether all of it is on one file system.

    No link is followed; a file with several names counts once.
    """
    seen: set[int] = set()
    total, own = 0, True
    try:
        top = path.lstat()
    except OSError:
        return 0, True
    pending = [os.fspath(path)] if stat.S_ISDIR(top.st_mode) else []
    total += top.st_blocks * 512
    while pending:
        with suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_dev != top.st_dev:
                        own = False
                        continue
                    if status.st_ino not in seen:
                        seen.add(status.st_ino)
                        total += status.st_blocks * 512  # stat(2): blocks of 512 bytes
                    if stat.S_ISDIR(status.st_mode):
                        pending.append(entry.path)
    return total, own
