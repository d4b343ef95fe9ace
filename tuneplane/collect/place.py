"""Where on this machine the metrics of runs are cached: a local disk, this user's alone. For `store`.

Never on a filesystem that machines share: SQLite's locks do not hold there (https://www.sqlite.org/useovernet.html).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tuneplane.kernel.filesystem import filesystem_at

FOLDER = "TUNEPLANE_STORE_DIR"
_BASES = ("/var/tmp", "/tmp")
"""Folders of every machine; the first outlives a reboot (FHS 3.0, 5.15)."""

_SHARED = (
    "nfs", "cifs", "smb", "9p", "afs", "ceph", "lustre", "gpfs", "wekafs", "beegfs", "panfs", "pvfs2", "orangefs",
    "ocfs2", "gfs2", "virtiofs", "fuse.",
)  # fmt: skip
"""Filesystems that other machines may write to; of FUSE's nobody knows."""


def find_folder(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """The folder of the cache, made where it is missing; or None, and why there is none."""
    given = environ.get(FOLDER, "")
    if given and not given.startswith("/"):
        return None, f"{FOLDER} is no absolute path"
    candidates = [Path(given)] if given else [Path(base, f"tuneplane-{os.getuid()}") for base in _BASES]
    why = ""
    for folder in candidates:
        fault = make_folder(folder)
        if not fault:
            return folder, ""
        why = why or fault
    return None, why


def make_folder(folder: Path) -> str:
    """Make a folder for this user alone, 0700; what is wrong with it, or "".

    Others may write above it, as in /var/tmp, so what stands there is looked at and not trusted.
    """
    try:
        kind = filesystem_at(str(folder.parent if not folder.exists() else folder))
        if kind.startswith(_SHARED):
            return f"{folder} lies on {kind}, which machines share"
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            folder.chmod(0o700)  # whatever a default ACL adds
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return f"{folder} is a link or no folder"
        if status.st_uid != os.getuid():
            return f"{folder} belongs to user id {status.st_uid}"
        if status.st_mode & 0o077:  # it may be there for others too: its mode is not ours to change
            return f"{folder} may be entered by others (mode {stat.S_IMODE(status.st_mode):o}, not 700)"
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""
