"""One builder at a time: whose turn it is to prepare an image, on one machine and across machines.

On one machine a lock that the kernel lets go (filelock), in a folder of the user's own that is no network
filesystem. Across machines and users an exclusive folder beside the image, with its owner's mark: who, where,
which process, and a heartbeat. A dead owner's turn is taken over.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tuneplane.images.notes import read_note
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.files import write_json
from tuneplane.kernel.process import is_alive, start_ticks

BEAT_S = 5.0
SILENT_S = 60.0
"""An owner on another machine that has not touched its mark for so long is dead. Twelve beats: network
filesystems show a change to others up to half a minute late."""
LOOK_S = 1.0


@dataclass(frozen=True)
class Owner:
    """Whose turn it is."""

    user: str
    host: str
    pid: int
    pid_start: int | None
    here: str  # the machine's boot and PID namespace: where `pid` means that process
    since: float  # seconds since the epoch
    claim: str

    def __str__(self) -> str:
        return f"{self.user} on {self.host} (process {self.pid})"


Waiting = Callable[[Owner | None], None]
"""Told again and again while another has the turn."""


def this_process(user: str) -> Owner:
    """The mark of this process."""
    pid = os.getpid()
    return Owner(
        user, socket.gethostname(), pid, start_ticks(pid), _here(), time.time(), secrets.token_hex(8)
    )


@contextlib.contextmanager
def turn(folder: Path, name: str, user: str, done: Callable[[], bool], waiting: Waiting) -> Iterator[bool]:
    """The turn for `name` in `folder`: True inside; False where `done()` became true while others had it.

    Raises OperationError where the folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        if not stack.enter_context(_this_machine(folder / name, done, waiting)):
            yield False
            return
        mark = _claim(folder, name, this_process(user), done, waiting)
        if mark is None:
            yield False
            return
        stop = threading.Event()
        beat = threading.Thread(target=_beat, args=(mark / "owner.json", stop), daemon=True)
        beat.start()
        try:
            yield True
        finally:
            stop.set()
            beat.join()
            _release(folder, name, mark)


def owner_of(folder: Path, name: str) -> Owner | None:
    """The living owner of the turn for `name`, if there is one."""
    number = _latest(folder, name)
    owner = _read(folder / _mark_name(name, number)) if number else None
    return owner if owner is not None and _lives(folder, name, number, owner) else None


@contextlib.contextmanager
def _this_machine(path: Path, done: Callable[[], bool], waiting: Waiting) -> Iterator[bool]:
    """Among this user's processes here. Where no local folder can be had, the mark alone must do."""
    from filelock import FileLock, Timeout

    place = _local_folder()
    if place is None:
        yield True
        return
    key = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    lock = FileLock(place / f"{key}.lock")
    while True:
        try:
            lock.acquire(timeout=LOOK_S)
            break
        except Timeout:
            if done():
                yield False
                return
            waiting(owner_of(path.parent, path.name))
    try:
        yield True
    finally:
        lock.release()


def _local_folder() -> Path | None:
    """A folder of this user's own on this machine, 0700, that nobody else made."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = (
        Path(base) / "tuneplane" if base else Path(tempfile.gettempdir()) / f"tuneplane-{os.getuid()}-locks"
    )
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    own = found.st_uid == os.getuid() and found.st_mode & 0o170077 == 0o040000
    return folder if own else None


def _claim(folder: Path, name: str, owner: Owner, done: Callable[[], bool], waiting: Waiting) -> Path | None:
    prepared = folder / f".{name}.turn.{owner.claim}"
    try:
        prepared.mkdir()
        prepared.chmod(0o755)  # whatever the umask: other users look whether its owner lives
        write_json(prepared / "owner.json", asdict(owner), 0o644)
        while not done():
            number = _latest(folder, name)
            holder = _read(folder / _mark_name(name, number)) if number else None
            if number and _lives(folder, name, number, holder):
                waiting(holder)
                time.sleep(LOOK_S)
                continue
            mark = folder / _mark_name(name, number + 1)
            try:
                os.utime(prepared / "owner.json")
                prepared.rename(mark)  # fails where the folder is there: it is never empty
            except OSError:
                if mark.exists():
                    continue
                raise
            if number and _read(folder / _mark_name(name, number)) not in (holder, None):
                mark.rename(prepared)  # another began anew under the number that we took for dead
                continue
            return mark
    except OSError as error:
        raise OperationError(
            Fault(
                f"images cannot be prepared there: {error.strerror or error}",
                str(folder),
                "make it writable for you, or set storage_root of the cluster profile",
            )
        ) from None
    finally:
        shutil.rmtree(prepared, ignore_errors=True)
    return None


def _release(folder: Path, name: str, mark: Path) -> None:
    """Take this turn's mark away, and the dead ones before it that are ours to remove."""
    number = int(mark.name.rpartition(".")[2])
    for old in range(1, number + 1):
        path = folder / _mark_name(name, old)
        if path.exists():
            shutil.rmtree(path, ignore_errors=True)


def _mark_name(name: str, number: int) -> str:
    return f".{name}.turn.{number}"


def _latest(folder: Path, name: str) -> int:
    pattern = re.compile(re.escape(f".{name}.turn.") + r"([0-9]{1,6})")
    try:
        found = [pattern.fullmatch(entry) for entry in os.listdir(folder)]
    except OSError:
        return 0
    return max((int(match[1]) for match in found if match), default=0)


def _read(mark: Path) -> Owner | None:
    try:
        value = read_note(mark / "owner.json")
        started = value["pid_start"]
        return Owner(
            str(value["user"]),
            str(value["host"]),
            int(value["pid"]),
            None if started is None else int(started),
            str(value["here"]),
            float(value["since"]),
            str(value["claim"]),
        )
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None


def _lives(folder: Path, name: str, number: int, owner: Owner | None) -> bool:
    """Whether the owner of a mark still builds: by its process where that can be seen, else by its heartbeat."""
    if owner is not None and owner.here == _here():
        if is_alive(owner.pid, owner.pid_start):
            return True
        if not _is_hidden(owner.pid):
            return False
    try:
        seen = (folder / _mark_name(name, number) / "owner.json").stat().st_mtime
    except FileNotFoundError:
        return False  # gone meanwhile
    except OSError:
        return True
    return _now(folder) - seen < SILENT_S


def _is_hidden(pid: int) -> bool:
    """Whether another user's process has this number and /proc does not show it (proc(5), `hidepid`)."""
    if pid <= 0 or os.access(f"/proc/{pid}/stat", os.R_OK):
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _now(folder: Path) -> float:
    """The folder's own clock: machines may disagree on the time."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def _beat(mark: Path, stop: threading.Event) -> None:
    while not stop.wait(BEAT_S):
        with contextlib.suppress(OSError):
            os.utime(mark)


def _here() -> str:
    """This boot of this machine, and this PID namespace in it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"
