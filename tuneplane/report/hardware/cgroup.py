"""The job's own cgroup, v1 or v2, as Slurm makes it: its memory, CPU time and processes. For Sampler.

Where Slurm made none there is none: the cgroup of a node, a login session or a container is not the job's.
"""

from __future__ import annotations

import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_JOB_V1 = re.compile(r"job_\d+")
_SCOPE_V2 = "slurmstepd.scope"
"""Below it stands the job, whose own name changed with Slurm 26.05; several slurmd of a host put theirs before it.
Source: Slurm's cgroup_v2 page."""

_UNLIMITED = 1 << 62
"""cgroup v1 says "no limit" as the largest number of whole pages."""

UNIFIED = ""
"""The key of cgroup v2's one hierarchy."""


def job_folders(cgroup: str, mountinfo: str) -> dict[str, str]:
    """The job's folder by controller (`UNIFIED` for v2), from /proc/self/cgroup and /proc/self/mountinfo. Pure."""
    mounts: list[tuple[set[str], str, str]] = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        if len(fields) > 4 and len(kind) > 2 and kind[0] in ("cgroup", "cgroup2"):
            controllers = {UNIFIED} if kind[0] == "cgroup2" else set(kind[2].split(","))
            mounts.append((controllers, fields[3], fields[4]))
    found = {}
    for line in cgroup.splitlines():
        _, _, rest = line.partition(":")
        controllers_of_line, _, path = rest.partition(":")
        job = job_path(path)
        if not job:
            continue
        for controller in controllers_of_line.split(","):
            for controllers, root, point in mounts:
                below = "" if root == "/" else root
                if controller in controllers and (job + "/").startswith(below + "/"):
                    found[controller] = point + job[len(below) :]
    return found


def job_path(path: str) -> str:
    """What of a process's cgroup path is its Slurm job's; empty where it is no job's."""
    parts = path.split("/")
    for index, part in enumerate(parts):
        if part.endswith(_SCOPE_V2) and len(parts) > index + 1:
            return "/".join(parts[: index + 2])
        if _JOB_V1.fullmatch(part):
            return "/".join(parts[: index + 1])
    return ""


def read_job_folders() -> dict[str, str]:
    """`job_folders` of this process; none where /proc does not say."""
    return job_folders(_read("/proc/self/cgroup"), _read("/proc/self/mountinfo"))


def read_memory(folders: Mapping[str, str]) -> tuple[int, int | None] | None:
    """Bytes in use and the job's limit (None: it has none), or None where the job has no memory cgroup.

    Without the pages of files that the kernel takes back first: to a job's limit they do no harm.
    """
    if "memory" in folders:
        folder, used, limit, cached = (
            folders["memory"],
            "memory.usage_in_bytes",
            "memory.limit_in_bytes",
            "total_inactive_file",
        )
    else:
        folder, used, limit, cached = (
            folders.get(UNIFIED, ""),
            "memory.current",
            "memory.max",
            "inactive_file",
        )
    in_use = _read_number(f"{folder}/{used}") if folder else None
    if in_use is None:
        return None
    in_use = max(0, in_use - (_read_entry(f"{folder}/memory.stat", cached) or 0))
    most = _read_number(f"{folder}/{limit}")
    return in_use, most if most is not None and most < _UNLIMITED else None


def read_cpu_s(folders: Mapping[str, str]) -> float | None:
    """CPU seconds that the job has used so far; None where its cgroup does not count them."""
    if "cpuacct" in folders:
        nanoseconds = _read_number(f"{folders['cpuacct']}/cpuacct.usage")
        return None if nanoseconds is None else nanoseconds / 1e9
    if UNIFIED in folders:
        microseconds = _read_entry(f"{folders[UNIFIED]}/cpu.stat", "usage_usec")
        return None if microseconds is None else microseconds / 1e6
    return None


def read_processes(folders: Mapping[str, str]) -> list[int] | None:
    """The job's processes; None where no cgroup of it can be listed."""
    for folder in folders.values():
        pids = [
            int(word)
            for place, _, names in os.walk(folder)
            if "cgroup.procs" in names
            for word in _read(f"{place}/cgroup.procs").split()
            if word != "0"  # a process that this container does not see
        ]
        if pids:
            return pids
    return None


def _read_entry(path: str, name: str) -> int | None:
    """A number of a file that has one `name number` a line."""
    for line in _read(path).splitlines():
        key, _, number = line.partition(" ")
        if key == name and number.isdecimal():
            return int(number)
    return None


def _read_number(path: str) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123 (pathlib: 10 ms)
            return file.read()
    except OSError:
        return ""
