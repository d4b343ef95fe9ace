"""The job's processes on this node, and what they use. For Sampler, where the job has no cgroup that says it.

They are known by the run and node in the environment that they were started with, and by their parents.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Marked:
    """Processes whose environment has all of `marks` (`NAME=value`), the process `own`, and what they started.

    Each process is looked at once, when it is first seen.
    """

    def __init__(self, marks: Iterable[str], own: int) -> None:
        self._marks = tuple(b"\0" + os.fsencode(mark) + b"\0" for mark in marks)
        self._own = own
        self._ours: dict[int, bool] = {}

    def pids(self) -> list[int]:
        """Those that are there now."""
        listed = sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
        known = self._ours
        self._ours = {pid: known[pid] for pid in listed if pid in known}
        for pid in listed:
            if pid not in self._ours:
                self._ours[pid] = pid == self._own or self._is_marked(pid) or self._is_child(pid)
        return [pid for pid, ours in self._ours.items() if ours]

    def _is_marked(self, pid: int) -> bool:
        environment = b"\0" + _read(f"/proc/{pid}/environ")
        return all(mark in environment for mark in self._marks)

    def _is_child(self, pid: int) -> bool:
        fields = _stat(pid)
        return bool(fields) and self._ours.get(int(fields[1]), False)


def read_cpu_and_memory(pids: Iterable[int]) -> tuple[float, int] | None:
    """CPU seconds so far, with those of children that have ended, and bytes resident now; None without any.

    Pages that processes share count for each. Source: proc(5), /proc/pid/stat.
    """
    cpu, memory, seen = 0, 0, False
    for pid in pids:
        fields = _stat(pid)
        if fields:
            seen = True
            cpu += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
            memory += int(fields[21])
    return (cpu / _TICKS_PER_S, memory * _PAGE_BYTES) if seen else None


def read_disk(pids: Iterable[int]) -> tuple[int, int] | None:
    """Bytes read from and written to storage so far; None where no process's may be read.

    With those of children that have ended; without what the page cache served. Source: proc(5), /proc/pid/io.
    """
    read, written, seen = 0, 0, False
    for pid in pids:
        counts = dict(_pairs(_read(f"/proc/{pid}/io")))
        if b"read_bytes" in counts and b"write_bytes" in counts:
            seen = True
            read += counts[b"read_bytes"]
            written += counts[b"write_bytes"]
    return (read, written) if seen else None


def _pairs(text: bytes) -> Iterator[tuple[bytes, int]]:
    for line in text.splitlines():
        name, _, number = line.partition(b": ")
        if number.isdigit():
            yield name, int(number)


def _stat(pid: int) -> list[bytes]:
    """/proc/pid/stat from its third field on; a name may hold spaces and brackets. Empty: it is gone."""
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 (pathlib costs 10 ms of import)
            return file.read()
    except OSError:
        return b""
