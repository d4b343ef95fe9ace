"""The node-local folder of one attempt: where the capsule is unpacked, with the trainer's /tmp and home."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from tuneplane.containers import Launch
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.unpack import remove_tree
from tuneplane.recipes.adapters import Command
from tuneplane.spec import JobSpec


@dataclass(frozen=True)
class Scratch:
    """`<scratch>/tuneplane-<uid>/<run>.<attempt>.<rank>/`, of this node and attempt, discarded at its end."""

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
    def launch(self) -> Path:
        """How the command was started, 0600: what `tp job shell` starts its shell with."""
        return self.path / "launch.json"


def scratch_folder(job: JobSpec, attempt: int, rank: int) -> Scratch:
    """Where this node and attempt unpack."""
    base = Path(job.spec.node.scratch) / f"tuneplane-{os.getuid()}"
    return Scratch(base / f"{job.metadata.run_id}.{attempt}.{rank}")


def prepare_scratch(scratch: Scratch) -> None:
    """Make the attempt's folder, 0700, below one that is surely this user's. Raises OperationError."""
    base = scratch.path.parent
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        status = base.lstat()
        if status.st_uid != os.getuid() or not base.is_dir() or base.is_symlink():
            raise OperationError(
                Fault(
                    f"{base} belongs to somebody else", "scratch", "tell the administrators of this cluster"
                )
            )
        if scratch.path.exists():
            remove_tree(scratch.path)  # left by an agent of this very attempt that was killed
        for folder in (scratch.path, scratch.temporary, scratch.home):
            folder.mkdir(mode=0o700)
    except OSError as error:
        raise OperationError(
            Fault(f"no scratch folder: {error.strerror}", str(base), "set `scratch` of the cluster profile")
        ) from None


def write_launch(path: Path, started: Launch, command: Command) -> None:
    """Note how the command was started, 0600: it holds secrets, and the folder is this node's."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
        value = {"argv": started.argv, "environ": started.environ, "command": list(command.argv)}
        json.dump({**value, "cwd": command.cwd}, file)
