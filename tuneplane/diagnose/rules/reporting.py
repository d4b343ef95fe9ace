"""Logs and no points: why nothing arrived where the run itself is well."""

from __future__ import annotations

from tuneplane.diagnose.evidence import Evidence
from tuneplane.diagnose.finding import LIKELY, POSSIBLE, Finding
from tuneplane.diagnose.rules.told import at, last_lines, shortly, trace_lines
from tuneplane.diagnose.silence import QUIET_S, silence_s
from tuneplane.runs.records import SILENT_S

WELL = ("RUNNING", "COMPLETED")


def reporting_stopped(evidence: Evidence) -> Finding | None:
    """The reporting module itself said that it could not write."""
    for log in evidence.logs:
        mark = log.mark("reporting-stopped", "points-dropped")
        if mark is not None:
            return Finding(
                "reporting-stopped",
                "reporting could not write its points"
                + (", and some were dropped" if mark.name == "points-dropped" else ""),
                "look at the folder in the message: space, quota, permission, a mount that is gone;"
                " training itself is not"
                " touched by it",
                evidence=(mark.first,) if mark.first == mark.last else (mark.first, mark.last),
                **at(evidence, log, mark),
            )
    return None


def points_refused(evidence: Evidence) -> Finding | None:
    """There are points, of another run or token."""
    if evidence.points.points or not evidence.points.refused or evidence.state not in WELL:
        return None
    return Finding(
        "points-refused",
        f"points are there and cannot be this run's: {evidence.points.refused}",
        "the program must take TUNEPLANE_JOB_ENDPOINT, _RUN_ID and _TOKEN as the job has them",
        certainty=LIKELY,
    )


def _without_points(evidence: Evidence) -> bool:
    job = evidence.job
    return (
        evidence.state in WELL
        and not _is_ending(evidence)
        and not any(node.code for node in evidence.nodes)
        and not evidence.points.points
        and not evidence.points.refused
        and job is not None
        and job.reporting
        and any(log.size_bytes for log in evidence.logs)
    )


def _is_ending(evidence: Evidence) -> bool:
    """Whether it was asked to end, or nodes of it are dead: that is what is to be told of it."""
    silent = any(n.code is None and (n.beat_age_s or 0.0) > SILENT_S for n in evidence.nodes)
    return evidence.state == "RUNNING" and (evidence.stop_marker or evidence.fence is not None or silent)


def still_loading(evidence: Evidence) -> Finding | None:
    """Weights or data are on their way: there is nothing to report yet."""
    if not _without_points(evidence) or evidence.state != "RUNNING":
        return None
    for log in evidence.logs:
        mark = log.mark("loads")
        if mark is not None and mark.last in log.tail[-3:]:
            return Finding(
                "still-loading",
                "it runs, and there are no points yet because weights or data are still downloading or loading",
                "wait; where compute nodes download slowly or not at all, fetch them on the login"
                " node beforehand into"
                " HF_HOME",
                evidence=last_lines(log, 1),
                certainty=LIKELY,
                **at(evidence, log, mark),
            )
    return None


def no_log_call(evidence: Evidence) -> Finding | None:
    """The experiment's code never names the reporting module."""
    if not _without_points(evidence) or evidence.state != "RUNNING":
        return None
    if silence_s(evidence.now, evidence.nodes, evidence.logs, evidence.points) >= QUIET_S or still_loading(
        evidence
    ):
        return None  # it is silent altogether, or not there yet: that is told
    if evidence.written.reports or evidence.written.imports:
        return _imports_without_points(evidence)
    return Finding(
        "no-log-call",
        "it runs well as far as can be seen, and reports no points: no file of the experiment names"
        " tuneplane.report or its callback",
        "call log({...}, step=…) of tuneplane.report in the training loop, or give the trainer"
        " TunePlaneCallback();"
        " nothing is read out of what is printed",
        evidence=(f"{evidence.written.files} files of the experiment and of the lab were searched",),
        certainty=LIKELY,
    )


def _imports_without_points(evidence: Evidence) -> Finding:
    names = ", ".join((evidence.written.reports or evidence.written.imports)[:3])
    return Finding(
        "no-points-yet",
        f"it runs well as far as can be seen, and has reported no points yet, though {names} names tuneplane",
        "the first log() may still be to come; only rank 0 reports; an import within `try` fails"
        " silently where the image"
        " has no tuneplane",
        evidence=(),
        certainty=POSSIBLE,
    )


def completed_with_exception(evidence: Evidence) -> Finding | None:
    """Exit code 0, and a traceback among the last words: somebody caught the one or the other."""
    if evidence.state != "COMPLETED":
        return None
    for log in evidence.logs:
        trace = log.traces[-1] if log.traces else None
        if trace is None or not any(trace.lines[-1].strip() in line for line in log.tail[-3:]):
            continue
        name = trace.kind.rpartition(".")[2]
        return Finding(
            "completed-with-exception",
            f"it completed with exit code 0, though {name} stands at the end of its log"
            + (f": {shortly(trace.message)}" if trace.message else ""),
            "where that was a failure, something hides the exit code: `|| true`, a command after it, a pipe"
            " without `set -o pipefail`, an `except` that goes on",
            evidence=trace_lines(trace)[-4:],
            certainty=POSSIBLE,
            **at(evidence, log),
        )
    return None


def completed_without_points(evidence: Evidence) -> Finding | None:
    """It ended well, and `tp job metrics` is empty."""
    if not _without_points(evidence) or evidence.state != "COMPLETED":
        return None
    named = evidence.written.reports or evidence.written.imports
    if named:
        why = f"though {', '.join(named[:3])} names tuneplane"
        remedy = (
            "an import within `try` fails silently where the image has no tuneplane, another project's package"
            " of that name reports elsewhere (tp image check), and only rank 0 reports: print"
            " tuneplane.__file__ there"
        )
    else:
        why = "since no file of the experiment names tuneplane.report or its callback"
        remedy = (
            "call log({...}, step=…) of tuneplane.report in the training loop, or give the trainer"
            " TunePlaneCallback()"
        )
    return Finding(
        "completed-without-points",
        f"it completed with exit code 0, and reported no points, {why}",
        remedy,
        evidence=_last(evidence),
        certainty=LIKELY,
    )


def _last(evidence: Evidence) -> tuple[str, ...]:
    return last_lines(evidence.logs[0], 2) if evidence.logs else ()


RULES = (
    reporting_stopped,
    points_refused,
    still_loading,
    no_log_call,
    completed_with_exception,
    completed_without_points,
)
