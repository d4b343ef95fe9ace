"""The attempts of a run, oldest first: which job each was, when, how it ended and why.

`tp job status` shows them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.runs.causes import on_node
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
    starts = [read_object(folder.start) for folder in found]
    # A job that was requeued ran several attempts; what was asked of it ended the last of them.
    last_of = {
        str(start.get("job_id") or ""): folder.number for folder, start in zip(found, starts, strict=True)
    }
    asked = {
        last_of[job_id]: how
        for how, ids in (("paused", paused), ("stopped", stopped))
        for job_id in ids
        if job_id in last_of
    }
    runs_now = state.attempt if state.started_at is not None and not state.is_final else None
    return [
        _attempt(folder, start, asked.get(folder.number, ""), folder.number == runs_now)
        for folder, start in zip(found, starts, strict=True)
    ]


def _attempt(folder: AttemptFolder, start: dict[str, Any], asked: str, going_on: bool) -> Attempt:
    """asked: paused or stopped, where the user ended it."""
    end = read_object(folder.end)
    job_id, code = str(start.get("job_id") or ""), whole(end.get("code"))
    node, reason = str(end.get("first_failing_node") or ""), str(end.get("reason") or "")
    progress = end.get("progress")
    if not end:
        how = "running" if going_on else "no record of its end"
    elif code == 0 and end.get("for_good") is not False:
        how = "completed"
    elif end.get("for_good"):
        how = "failed"
    else:
        how = asked or ("saved" if code == 0 else "ended")
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
        reason=on_node(reason, node),
        not_restarted=str(end.get("not_restarted") or ""),
        step=whole(progress.get("step")) if isinstance(progress, dict) else None,
    )
