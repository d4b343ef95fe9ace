"""The attempts of a run, oldest first: which job each was, when, how it ended and why.

`tp job status` shows them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.runs.records import number, paused_jobs, read_object, stopped_jobs, whole
from tuneplane.runs.state import RunState


@dataclass(frozen=True)
class Attempt:
    """One attempt. `how`: running, completed, failed, saved, stopped, paused, ended, or no record of its end.

    follows: the cause of the restart that began it; automatic: no `tp` and no hand did. cause: what ended it from
    outside. not_restarted: why the run did not go on after it. step: the last one that it reported.
    """

    number: int
    job_id: str
    automatic: bool
    follows: str
    started_at: float | None
    ended_at: float | None
    how: str
    code: int | None
    cause: str
    reason: str
    not_restarted: str
    step: int | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_attempts(run: RunFolder, state: RunState) -> list[Attempt]:
    """Every attempt of a run. Raises OSError where its folder cannot be read."""
    stopped, paused = stopped_jobs(run), paused_jobs(run)
    found = run.attempts()
    return [
        _attempt(folder, stopped, paused, going_on=folder == found[-1] and not state.is_final)
        for folder in found
    ]


def _attempt(
    folder: AttemptFolder, stopped: frozenset[str], paused: frozenset[str], *, going_on: bool
) -> Attempt:
    start, end = read_object(folder.start), read_object(folder.end)
    job_id, code = str(start.get("job_id") or ""), whole(end.get("code"))
    node, reason = str(end.get("first_failing_node") or ""), str(end.get("reason") or "")
    progress = end.get("progress")
    if not end:
        how = "running" if going_on else "no record of its end"
    elif code == 0 and end.get("for_good") is not False:
        how = "completed"
    elif end.get("for_good"):
        how = "failed"
    elif job_id in stopped:
        how = "stopped"
    elif job_id in paused:
        how = "paused"
    else:
        how = "saved" if code == 0 else "ended"
    return Attempt(
        number=folder.number,
        job_id=job_id,
        automatic=start.get("automatic") is True,
        follows=str(start.get("follows") or ""),
        started_at=number(start.get("started_at")),
        ended_at=number(end.get("ended_at")),
        how=how,
        code=code,
        cause=str(end.get("cause") or ""),
        reason=f"{reason} on {node}" if reason and node else reason,
        not_restarted=str(end.get("not_restarted") or ""),
        step=whole(progress.get("step")) if isinstance(progress, dict) else None,
    )
