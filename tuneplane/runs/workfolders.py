"""Work folders of this machine that agents left when they were killed: `tp job gc` lists and removes them.

An agent removes those of its own user before each start as well; this is for machines where no run starts.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tuneplane.kernel.errors import TunePlaneError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.node.scratch import Scratch, user_folder
from tuneplane.runs.clearing import Item, tree_size
from tuneplane.spec import read


def abandoned_folders(runs: Iterable[RunFolder]) -> list[Item]:
    """Folders below the scratch folders of these runs whose agents lived on this host and live no more."""
    found = []
    for base in sorted(_bases(runs)):
        with suppress(OSError):
            for path in sorted(base.iterdir()):
                with suppress(OSError):
                    status = path.lstat()
                    if status.st_uid == os.geteuid() and _is_abandoned(Scratch(path)):
                        age_s, size_bytes = time.time() - status.st_mtime, tree_size(path)[0]
                        found.append(Item("work folder", path, str(path), "", age_s, size_bytes))
    return found


def _bases(runs: Iterable[RunFolder]) -> set[Path]:
    bases = set()
    for run in runs:
        with suppress(OSError, TunePlaneError):
            base = user_folder(read(run.job))
            status = base.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                bases.add(base)
    return bases


def _is_abandoned(scratch: Scratch) -> bool:
    """Whether nobody holds the lock that its agent took on this host; the agent wrote the host's name into it."""
    descriptor = os.open(scratch.lock, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if os.read(descriptor, 4096) != os.uname().nodename.encode():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
