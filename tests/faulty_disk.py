"""A file system that fails on demand: a folder seen through FUSE, with errors, torn writes and stalls.

`mount_faulty` starts it from inside a trainer of `ReportJob.run_with_mounts`, whose mount namespace it needs; run
as a program this file is its server. What arrives lies in the folder below, where any reader finds it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # prctl(2)


class FaultyDisk:
    """The mounted file system, as the program that mounted it sees it.

    `fail` and `stall` take effect with the next system call.
    """

    def __init__(self, control: str) -> None:
        self._control = control
        self._faults: dict[str, Any] = {}

    def fail(self, *names: str, chance: float = 1.0) -> None:
        """From now on calls that write, open or look fail with one of these errors, each with this chance.

        A write that fails may have stored some of its bytes. Without names: no call fails.
        """
        self._set(errors=list(names), chance=chance)

    def stall(self, seconds: float) -> float:
        """Answer nothing for so long; when that will be over, as `time.monotonic` counts."""
        until = time.monotonic() + seconds
        self._set(stalled_until=until)
        return until

    def _set(self, **faults: Any) -> None:
        self._faults.update(faults)
        Path(self._control + ".new").write_text(json.dumps(self._faults))
        Path(self._control + ".new").replace(self._control)


def mount_faulty(store: str, mountpoint: str, control: str, *options: str) -> FaultyDisk:
    """Mount the folder `store` at `mountpoint`. It ends with the thread that calls this."""
    disk = FaultyDisk(control)
    disk.fail()
    with Path(control + ".log").open("w") as said:
        subprocess.Popen([sys.executable, __file__, store, mountpoint, control, *options], stderr=said)
    deadline = time.monotonic() + 20
    while not os.path.ismount(mountpoint):
        assert time.monotonic() < deadline, Path(control + ".log").read_text()
        time.sleep(0.02)
    return disk


def serve(store: str, mountpoint: str, control: str, *options: str) -> None:
    """Answer the kernel until the program that mounted this ends."""
    from mfusepy import FUSE, FuseOSError, Operations

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    chance = random.Random(7)

    class Disk(Operations):
        use_ns = True

        def _below(self, path: str) -> str:
            return store + path

        def _answer(self, data: bytes = b"", fh: int = -1, offset: int = 0) -> None:
            """Let the faults of the moment happen."""
            faults = json.loads(Path(control).read_text())
            while time.monotonic() < faults.get("stalled_until", 0):
                time.sleep(0.01)
            if faults["errors"] and chance.random() < faults["chance"]:
                if data:
                    os.pwrite(fh, data[: chance.randrange(len(data))], offset)
                raise FuseOSError(getattr(errno, chance.choice(faults["errors"])))

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            self._answer()
            state = os.lstat(self._below(path))
            return {name: getattr(state, name) for name in ("st_mode", "st_size", "st_nlink", "st_uid")}

        def readdir(self, path: str, fh: int) -> list[str]:
            return [".", "..", *os.listdir(self._below(path))]

        def open(self, path: str, flags: int) -> int:
            self._answer()
            return os.open(self._below(path), flags & ~os.O_APPEND)  # the kernel says where to write

        def create(self, path: str, mode: int, fi: Any = None) -> int:
            self._answer()
            return os.open(self._below(path), os.O_WRONLY | os.O_CREAT, mode)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            return os.pread(fh, size, offset)

        def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
            self._answer(data, fh, offset)
            return os.pwrite(fh, data, offset)

        def fsync(self, path: str, datasync: int, fh: int) -> int:
            self._answer()
            return 0

        def flush(self, path: str, fh: int) -> int:
            return 0

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

    kind = dict(option.split("=", 1) for option in options)
    uncached = {"attr_timeout": 0, "entry_timeout": 0}  # what a failed write has stored is seen
    FUSE(Disk(), mountpoint, foreground=True, allow_other=True, default_permissions=True, **uncached, **kind)


if __name__ == "__main__":
    serve(*sys.argv[1:])
