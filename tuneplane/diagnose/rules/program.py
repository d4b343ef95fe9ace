"""What is left where no other rule knows better: an exception with its rank, an exit code with the last words."""

from __future__ import annotations

from tuneplane.diagnose.culprit import culprit
from tuneplane.diagnose.evidence import Evidence
from tuneplane.diagnose.finding import CERTAIN, LIKELY, POSSIBLE, Finding
from tuneplane.diagnose.rules.told import image_lines, last_lines, lines_of, on, on_host, place, shortly

OURS = "tuneplane: "
"""Lines of the agent in a node's log."""

OWN = ("FAILED", "LOST", "CANCELLED")


def first_failing_rank(evidence: Evidence) -> Finding | None:
    """Of several ranks the one that failed by itself, with its traceback."""
    found = culprit(evidence)
    if evidence.state not in OWN or found.trace is None or found.rank is None:
        return None
    job = evidence.job
    if job is not None and job.nodes * job.gpus_per_node < 2 and not found.victims:
        return None
    name = found.trace.kind.rpartition(".")[2]
    said = shortly(found.trace.message)
    if found.is_victim:
        return Finding(
            "first-failing-rank",
            f"rank {found.rank} failed first that is known of{on_host(found.host)}, and it only lost another rank:"
            f" {name}: {said}",
            "look at the logs of the other nodes: tp job logs RUN --node N",
            evidence=lines_of(found),
            certainty=POSSIBLE,
            **place(found),
        )
    return Finding(
        "first-failing-rank",
        f"rank {found.rank} failed first{on_host(found.host)}: {name}" + (f": {said}" if said else ""),
        _where(found.trace.lines),
        evidence=lines_of(found),
        certainty=CERTAIN,
        **place(found),
    )


def python_exception(evidence: Evidence) -> Finding | None:
    """An exception that nothing caught."""
    found = culprit(evidence)
    if evidence.state not in OWN or found.trace is None or evidence.code == 0:
        return None
    name = found.trace.kind.rpartition(".")[2]
    said = shortly(found.trace.message)
    near = _is_near_the_end(found.trace.lines, found.log.tail if found.log else ())
    return Finding(
        "python-exception",
        f"the program raised {name}{on(found)}" + (f": {said}" if said else ""),
        _where(found.trace.lines),
        evidence=lines_of(found),
        # Where the agent itself was killed, what the program said last may be of that.
        certainty=CERTAIN if near and (found.ending or 0) > 0 and evidence.state != "LOST" else POSSIBLE,
        **place(found),
    )


def _is_near_the_end(lines: tuple[str, ...], tail: tuple[str, ...]) -> bool:
    """Whether a traceback is among a log's last lines: an exception that the program overcame is not."""
    return bool(lines) and any(lines[-1].strip() in line for line in tail)


def _where(lines: tuple[str, ...]) -> str:
    """The innermost place in the user's own code."""
    frames = [line.strip() for line in lines if line.lstrip().startswith('File "')]
    own = [
        f
        for f in frames
        if not any(part in f for part in ("site-packages", "dist-packages", "/lib/python3", "<frozen "))
    ]
    return f"look at {own[-1].removeprefix('File ')}" if own else ""


def command_failed(evidence: Evidence) -> Finding | None:
    """An exit code and no word of why."""
    found = culprit(evidence)
    if evidence.state not in OWN or evidence.code in (None, 0) or found.node is None or found.is_victim:
        return None
    code = found.node.code
    if code is None:
        return None
    several = len(evidence.nodes) > 1
    where = f" on node {found.node.rank} ({found.host})" if several else ""
    last = next(
        (line for line in reversed(found.log.tail if found.log else ()) if not line.startswith(OURS)), ""
    )
    said = f"; the last it printed: {shortly(last)}" if last else ", and it printed nothing"
    ended = f"the command ended with exit code {code}" if code < 128 else found.node.reason
    return Finding(
        "command-failed",
        f"{ended}{where}{said}",
        "`set -x` in train.sh shows the line that fails; the whole log: tp job logs RUN",
        evidence=(*last_lines(found.log, 6), *image_lines(found.log)),
        certainty=LIKELY,
        **place(found),
    )


def rank_exit(evidence: Evidence) -> Finding | None:
    """A rank that left by itself, with an exit code and no exception."""
    found = culprit(evidence)
    recorded = found.node.failure if found.node else None
    if evidence.state not in OWN or found.is_victim or recorded is None or recorded.exception:
        return None
    if recorded.exitcode is None or recorded.exitcode <= 0:
        return None
    own = f"[rank{found.rank}]: "
    lines = [line for line in (*found.log.head, *found.log.tail) if line.startswith(own)] if found.log else []
    last = lines[-1].removeprefix(own) if lines else ""
    said = f"; the last it printed: {shortly(last)}" if last else ""
    return Finding(
        "rank-exit",
        f"rank {found.rank}{on_host(found.host)} left by itself with exit code {recorded.exitcode}, and raised"
        f" nothing{said}",
        "look for sys.exit or os._exit in the program, and at what that rank printed: tp job logs RUN",
        evidence=(*lines[-4:], *found.victims[:2]),
        **place(found),
    )


RULES = (first_failing_rank, python_exception)
LAST = (rank_exit, command_failed)
