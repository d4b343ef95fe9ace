"""Identity of a process: a pid and its start, so that a reused pid is not taken for it."""

from __future__ import annotations

from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """A process's start in clock ticks since boot (proc(5), stat field 22); None where there is none."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_alive(pid: int, ticks: int | None = None) -> bool:
    """Whether that very process is there and no zombie. `ticks`: its `start_ticks`, where known."""
    fields = _stat(pid) if pid > 0 else []
    return bool(fields) and fields[0] not in "ZX" and (ticks is None or int(fields[19]) == ticks)


def members(session: int) -> list[int]:
    """The processes of a session, zombies too (proc(5), stat field 6)."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if (fields := _stat(pid)) and int(fields[3]) == session]


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
