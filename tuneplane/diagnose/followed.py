"""What an attempt left about what is to follow it: a node given up, the intent to restart, why none follows.

`gather.py` calls it. Node agents and the batch script write these files, each of them once.
"""

from __future__ import annotations

from tuneplane.diagnose.evidence import End, Fence, Restart, Silent
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder, noted_jobs
from tuneplane.node.record import read_record
from tuneplane.runs.records import number, whole

MOST_NAMES = 20


def read_fence(attempt: AttemptFolder) -> Fence | None:
    """The nodes that were given up; None where none was."""
    value = read_record(attempt.fence)
    nodes = value.get("nodes")
    if not isinstance(nodes, list):
        return None
    found = [
        Silent(str(node.get("host") or ""), whole(node.get("rank")), number(node.get("silent_s")))
        for node in nodes[:MOST_NAMES]
        if isinstance(node, dict)
    ]
    return Fence(tuple(found), whole(value.get("by"))) if found else None


def read_restart(attempt: AttemptFolder, now: float) -> Restart | None:
    """The intent to restart, and what came of it; None where there was none. now: seconds since the epoch."""
    value = read_record(attempt.restart)
    if not value:
        return None
    done = read_record(attempt.restarted)
    at, exclude = number(value.get("at")), value.get("exclude")
    try:
        error = attempt.restart_error.read_text(encoding="utf-8", errors="replace")
    except OSError:
        error = ""
    return Restart(
        cause=str(value.get("cause") or ""),
        way=str(value.get("way") or ""),
        exclude=tuple(map(str, exclude[:MOST_NAMES])) if isinstance(exclude, list) else (),
        age_s=None if at is None else max(0.0, now - at),
        carried_out=bool(done),
        job_id=str(done.get("job_id") or ""),
        error=" ".join(error.split())[:1000],
    )


def read_end(attempt: AttemptFolder) -> End:
    """What the end record says beside its code."""
    value = read_record(attempt.end)
    progress = value.get("progress")
    progress = progress if isinstance(progress, dict) else {}
    names = progress.get("checkpoints")
    return End(
        code=whole(value.get("code")),
        cause=str(value.get("cause") or ""),
        to_be_continued=value.get("to_be_continued") is True,
        not_restarted=" ".join(str(value.get("not_restarted") or "").split()),
        step=number(progress.get("step")),
        checkpoints=tuple(map(str, names[-MOST_NAMES:])) if isinstance(names, list) else (),
    )


def read_ending(attempt: AttemptFolder) -> str:
    """One line on how an earlier attempt ended."""
    end = read_record(attempt.end)
    if not end:
        return f"attempt {attempt.number}: it left no record of its end"
    where = f" on {end['first_failing_node']}" if end.get("first_failing_node") else ""
    why = str(end.get("cause") or "").replace("_", " ")
    if end.get("reason"):
        why = f"{why}: {end['reason']}{where}" if why else f"{end['reason']}{where}"
    return f"attempt {attempt.number}: exit code {end.get('code')}" + (f": {why}" if why else "")


def read_paused(run: RunFolder) -> tuple[str, ...]:
    """Ids of the jobs that `tp job pause` ended or held."""
    return tuple(sorted(noted_jobs(run.paused)))
