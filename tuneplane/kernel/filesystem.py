"""Which file system a folder lies on, and whether its writes reach other machines by themselves.

For report's writer, and for the store of metrics.
"""

from __future__ import annotations

import os

_WRITE_BACK = ("nfs", "cifs", "smb", "9p", "afs", "beegfs", "fuse.")
"""File systems whose clients keep small appends to themselves until they are synced or closed, up to half a minute
on NFS (nfs(5), "Data and metadata coherence"). Lustre, GPFS, Ceph and WekaFS keep their clients coherent."""


def keeps_writes_back(folder: str) -> bool:
    """Whether appends there must be synced to be seen elsewhere soon. False without a readable mount table."""
    return filesystem_at(folder).startswith(_WRITE_BACK)


def filesystem_at(folder: str) -> str:
    """The type of the file system that `folder` lies on, as `nfs4`; "" without a readable mount table."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:  # noqa: PTH123 (pathlib costs 10 ms of import)
            table = file.read()
        return filesystem_of(os.path.realpath(folder), table)
    except OSError:
        return ""


def filesystem_of(path: str, mountinfo: bytes) -> str:
    """The type of the file system that holds `path`, by the last mount on its longest mounted parent (proc(5))."""
    best, kind = -1, ""
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(b" - ")
        fields = left.split(b" ")
        if not separator or len(fields) < 5:
            continue
        point = os.fsdecode(_unescaped(fields[4]))
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, kind = len(point), os.fsdecode(right.split(b" ", 1)[0])
    return kind


def _unescaped(field: bytes) -> bytes:
    """Octal escapes of blanks and backslashes in the mount table; the backslash last."""
    for escape, plain in ((b"\\040", b" "), (b"\\011", b"\t"), (b"\\012", b"\n"), (b"\\134", b"\\")):
        field = field.replace(escape, plain)
    return field
