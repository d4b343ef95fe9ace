"""The node-local folder of one attempt: where the capsule is unpacked, with the trainer's /tmp and home.

Its agent holds a lock in it for as long as it lives, so that what a killed agent left is known as left.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tuneplane.containers import Launch
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.files import room_or_right, write_atomic
from tuneplane.kernel.unpack import remove_tree
from tuneplane.spec import JobSpec


@dataclass(frozen=True)
class Scratch:
    """`<scratch>/tuneplane-<uid>/<time>-<digest>.<attempt>.<rank>/`, discarded when its attempt ends."""

    path: Path

    @property
    def work(self) -> Path:
        return self.path / "work"

    @property
    def temporary(self) -> Path:
        return self.path / "tmp"

    @property
    def home(self) -> Path:
        return self.path / "home"

    @property
    def runtime(self) -> Path:
        """What is the container runtime's own."""
        return self.path / "runtime"

    @property
    def files(self) -> Path:
        """What the recipe's adapter has for the trainer to read; seen in the container at the same place."""
        return self.path / "files"

    @property
    def ranks(self) -> Path:
        """Each rank's own log and error file, by torchrun; seen in the container at the same place."""
        return self.path / "ranks"

    @property
    def launch(self) -> Path:
        """How the command was started, 0600: what `tp job shell` starts its shell with."""
        return self.path / "launch.json"

    @property
    def lock(self) -> Path:
        """Locked by the agent of this folder while it lives; holds the name of its host."""
        return self.path / "agent.lock"


def user_folder(job: JobSpec) -> Path:
    """`<scratch>/tuneplane-<uid>`: this user's, on this node, below which every attempt has its own."""
    return Path(job.spec.node.scratch) / f"tuneplane-{os.getuid()}"


def scratch_folder(job: JobSpec, attempt: int, rank: int) -> Scratch:
    """Where this node and attempt unpack.

    The name is short, whatever the experiment is called: programs make sockets below TMPDIR, whose paths end at
    107 bytes (unix(7)), and multiprocessing alone adds 32. The digest tells runs of one second apart.
    """
    run_id = job.metadata.run_id
    digest = hashlib.sha256(run_id.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return Scratch(user_folder(job) / f"{run_id[-20:-5]}-{digest}.{attempt}.{rank}")


def make_user_folder(job: JobSpec) -> Path:
    """Make this user's folder, 0700. Raises OperationError where somebody else could stand behind it."""
    base = user_folder(job)
    try:
        with suppress(FileExistsError):
            base.mkdir(mode=0o700)
        status = base.lstat()
        if not stat.S_ISDIR(status.st_mode):
            found = "is a link" if stat.S_ISLNK(status.st_mode) else "is not a folder"
            raise OperationError(Fault(f"{base} {found}", "scratch", "remove it, it is to be a folder"))
        if status.st_uid != os.getuid():
            raise OperationError(
                Fault(
                    f"{base} belongs to user id {status.st_uid}",
                    "scratch",
                    "have the administrators of this cluster remove it, or set `scratch` of the cluster profile",
                )
            )
        base.chmod(0o700)
    except OSError as error:
        raise _no_folder(base, error) from None
    return base


@contextmanager
def held_scratch(scratch: Scratch) -> Iterator[None]:
    """Make the attempt's folder, 0700, hold it, and remove it with all below it. Raises OperationError."""
    if _is_held(scratch):
        raise OperationError(
            Fault(
                "another agent of this very node and attempt runs here",
                str(scratch.path),
                "one task a node: look for --ntasks in srun_options and in how the script was started",
            )
        )
    try:
        remove_tree(scratch.path)  # left by an agent of this very attempt that was killed
        below = (scratch.temporary, scratch.home, scratch.runtime, scratch.files, scratch.ranks)
        for folder in (scratch.path, *below):
            folder.mkdir(mode=0o700)
        descriptor = os.open(scratch.lock, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        with suppress(OSError):
            remove_tree(scratch.path)
        raise _no_folder(scratch.path, error) from None
    try:
        with suppress(OSError):  # a filesystem without locks: what is left there is never taken for left
            if _lock(descriptor):
                os.write(descriptor, os.uname().nodename.encode())
        yield
    finally:
        try:
            remove_tree(scratch.path)
        except OSError as error:  # how the command ended is not changed by what it left
            print(
                f"tuneplane: {error.filename or scratch.path} not removed: {error.strerror}", file=sys.stderr
            )
        os.close(descriptor)


def remove_abandoned(base: Path) -> list[str]:
    """Remove what agents of this host that were killed left below `base`; the names of what was removed."""
    removed = []
    for path in sorted(base.iterdir()):
        with suppress(OSError):
            if _is_abandoned(Scratch(path)):
                remove_tree(path)
                removed.append(path.name)
    return removed


def _is_abandoned(scratch: Scratch) -> bool:
    """Whether its agent lived on this host and lives no more: nobody holds the lock that it took.

    The host's name stands there only once the lock was held. A scratch folder that several hosts share would
    show another host's lock as free where the filesystem keeps locks to one host.
    """
    with _opened(scratch.lock) as descriptor:
        return os.read(descriptor, 4096) == os.uname().nodename.encode() and _lock(descriptor)


def _is_held(scratch: Scratch) -> bool:
    try:
        with _opened(scratch.lock) as descriptor:
            return not _lock(descriptor)
    except OSError:
        return False


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Take a lock that nobody holds. Raises OSError where the filesystem has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_launch(path: Path, started: Launch) -> None:
    """Note how the command is started, and what must be there first; 0600: it holds secrets.

    The folder is this node's.
    """
    for name, text in started.files.items():
        write_atomic(Path(name), text, 0o600)
    value = dataclasses.asdict(started)
    del value["files"]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        json.dump(value, file)


def read_launch(path: Path) -> Launch:
    """What `write_launch` noted. Raises OSError, or ValueError where it is not this user's own note."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, encoding="ascii") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ValueError(f"{path} is not this user's alone")
        return Launch(**json.load(file))


def _no_folder(path: Path, error: OSError) -> OperationError:
    what = f"no scratch folder on this node: {error.strerror or error}"
    return OperationError(
        Fault(what, str(path), f"{room_or_right(error)}, or set `scratch` of the cluster profile")
    )
