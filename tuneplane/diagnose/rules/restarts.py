"""What follows an attempt that did not end its run: the next one, a pause, a restart that got lost, or nothing.

`outside.py` ends its sentences with `following`: a cause from outside is half of what users ask.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tuneplane.diagnose.evidence import Evidence
from tuneplane.diagnose.finding import CERTAIN, LIKELY, Finding
from tuneplane.diagnose.rules.interrupted import PREEMPTION, WALLTIME, ended_by, waits_again
from tuneplane.diagnose.rules.pending import queue_words
from tuneplane.diagnose.rules.told import ENDED_BADLY, last_lines, seconds
from tuneplane.runs.causes import words
from tuneplane.runs.state import WAITING

CARRIED_OUT_S = 60.0
"""How long an intent may wait to be carried out: Slurm and the batch script take seconds."""

RESUMES = "the next attempt goes on from the last checkpoint, where the program resumes from one"


@dataclass(frozen=True)
class Following:
    """The second half of a sentence, and what to do."""

    clause: str
    remedy: str


def following(evidence: Evidence) -> Following:
    """What comes after an attempt that something from outside ended."""
    run = evidence.run_id
    if waits_again(evidence):
        number = f"attempt {evidence.attempt + 1}" if evidence.attempt is not None else "the next attempt"
        words = queue_words(evidence)
        if words is None:
            return Following(f"{number} waits to start by itself", f"nothing is to be done: {RESUMES}")
        if words.never:
            return Following(f"{number} waits in the queue: {words.plain}", words.sooner)
        sooner = (
            f". Sooner: {words.sooner}" if words.sooner and not words.sooner.startswith("nothing ") else ""
        )
        clause = f"{number} starts by itself, and waits in the queue: {words.plain}"
        return Following(clause, f"nothing is to be done: {RESUMES}{sooner}")
    again = f"tp job retry {run} starts it again"
    if evidence.end.not_restarted:
        return Following(f"it is not started again: {evidence.end.not_restarted}", again)
    if evidence.restart is not None and evidence.restart.carried_out:
        job = f" (Slurm job {evidence.restart.job_id})" if evidence.restart.job_id else ""
        return Following(f"its next attempt was submitted{job}", f"nothing is to be done: {RESUMES}")
    if evidence.restart is not None or evidence.end.to_be_continued:
        return Following("its next attempt is being started", f"ask again in a moment: {RESUMES}")
    return Following("it is not started again by itself", again)


def paused(evidence: Evidence) -> Finding | None:
    """`tp job pause`: held while it waited, or saved and ended while it ran."""
    noted = bool(evidence.paused) and (not evidence.job_id or evidence.job_id in evidence.paused)
    if evidence.state == "RUNNING" or not (noted or evidence.state == "PAUSED"):
        return None
    code = evidence.end.code if evidence.end.code is not None else evidence.code
    what = "it was paused by tp job pause"
    if evidence.state in WAITING:
        what += " while it waited: Slurm holds its job"
    elif evidence.state == "COMPLETING":
        what = "it is being paused by tp job pause: it was asked to save and end"
    elif code == 0:
        what += ": it saved and ended"
    elif code is not None:
        what += f", and ended with exit code {code}: what it had not saved is lost"
    return Finding(
        "paused",
        what,
        f"tp job resume {evidence.run_id} goes on with its next attempt",
        evidence=last_lines(evidence.logs[0] if evidence.logs else None, 2),
    )


def saving(evidence: Evidence) -> Finding | None:
    """The stop marker is there, and the command still runs."""
    if (
        evidence.state != "RUNNING"
        or not evidence.stop_marker
        or all(n.code is not None for n in evidence.nodes)
    ):
        return None
    cause = evidence.restart.cause if evidence.restart else ""
    if evidence.job_id in evidence.paused:
        why, then = "by tp job pause", f"then: tp job resume {evidence.run_id}"
    elif evidence.job_id in evidence.stopped:
        why, then = "by tp job stop", "nothing is to be done"
    else:
        why = {WALLTIME: "since its time limit is near", PREEMPTION: "since another job takes its nodes"}.get(
            cause, ""
        )
        then = "it goes on by itself with its next attempt" if evidence.restart else "nothing is to be done"
    limit = evidence.job.stop_grace_s if evidence.job else 0.0
    return Finding(
        "saving",
        f"it was asked to save and end{' ' + why if why else ''}, and has not ended yet",
        f"{then}. The program looks at should_stop() or TUNEPLANE_STOP_FILE and saves; one that does not is ended"
        f" by TERM, and {limit:.0f} s later by KILL",
        evidence=last_lines(evidence.logs[0] if evidence.logs else None, 2),
    )


def restart_lost(evidence: Evidence) -> Finding | None:
    """The intent to restart is there, and nobody carried it out."""
    intent = evidence.restart
    if intent is None or intent.carried_out or evidence.state in WAITING or evidence.end.not_restarted:
        return None
    if evidence.state in ("RUNNING", "COMPLETING", "SUSPENDED", "PAUSED"):
        return None
    if evidence.job_id in (*evidence.stopped, *evidence.paused):
        return None
    if not intent.error and (intent.age_s is None or intent.age_s < CARRIED_OUT_S):
        return None
    happened = words(intent.cause)
    why = f"Slurm refused it: {intent.error}" if intent.error else "whoever was to start it is gone"
    age = f", {seconds(intent.age_s)} ago" if intent.age_s is not None else ""
    return Finding(
        "restart-lost",
        f"attempt {evidence.attempt} {happened}, and the next one was not started: {why}",
        f"tp job resume {evidence.run_id} carries the restart out",
        evidence=(f"restart.json: {intent.cause}, by {intent.way or 'requeue'}{age}; nothing came of it",),
        certainty=CERTAIN if intent.error else LIKELY,
    )


def without_progress(evidence: Evidence) -> Finding | None:
    """The chain of attempts ended: one of them brought neither a checkpoint nor a step."""
    told = evidence.end.not_restarted
    if "no progress" not in told or evidence.state in (*WAITING, "RUNNING"):
        return None
    happened = words(ended_by(evidence))
    return Finding(
        "restarts-without-progress",
        f"attempt {evidence.attempt} {happened}, and it is not started again: {told}",
        "an attempt must save or report something new before it ends: save more often, below"
        ' "$TUNEPLANE_OUT_DIR/checkpoints", resume from there, or ask for more time (--time);'
        f" then tp job retry {evidence.run_id}",
        evidence=(*evidence.earlier_ends[-3:], *_progress(evidence)),
    )


def restarts_used_up(evidence: Evidence) -> Finding | None:
    """The chain of attempts ended: `max_restarts`."""
    told = evidence.end.not_restarted
    if "max_restarts" not in told or "is reached" not in told or evidence.state in (*WAITING, "RUNNING"):
        return None
    happened = words(ended_by(evidence))
    return Finding(
        "restarts-used-up",
        f"attempt {evidence.attempt} {happened}, and it is not started again: {told}",
        f"tp job retry {evidence.run_id} goes on; next time a larger --max-restarts, or a longer --time, which"
        " needs fewer attempts",
        evidence=(*evidence.earlier_ends[-3:], *_progress(evidence)),
    )


def _progress(evidence: Evidence) -> tuple[str, ...]:
    step = f"step {evidence.end.step:g}" if evidence.end.step is not None else "no step reported"
    names = ", ".join(evidence.end.checkpoints[-3:]) or "none"
    lines = [f"attempt {evidence.attempt}: {step}, checkpoints: {names}"]
    if evidence.fence is not None:
        hosts = ", ".join(node.host for node in evidence.fence.nodes)
        lines.append(f"fence.json: {hosts} gave no sign of life")
    return tuple(lines)


def agent_fenced(evidence: Evidence) -> Finding | None:
    """A node ended its own ranks, since it lost the others or another attempt had begun, and nobody says more."""
    lines = fenced_lines(evidence)
    runs_on = evidence.state == "RUNNING" and any(node.code is None for node in evidence.nodes)
    if not lines or not (runs_on or evidence.state in ENDED_BADLY) or ended_by(evidence):
        return None
    again = f"tp job retry {evidence.run_id} starts it again"
    if runs_on:
        again = f"where that stays so: tp job stop {evidence.run_id}, then {again}"
    first = next(node for node in evidence.nodes if _FENCED.search(node.reason))
    return Finding(
        "agent-fenced",
        f"node {first.rank} ({first.host}) ended its own ranks: {first.reason}"
        + ("; other nodes still run" if runs_on else ""),
        f"look whether nodes reach each other and the storage; {again}",
        node=first.rank,
        host=first.host,
        evidence=lines,
    )


def fenced_lines(evidence: Evidence) -> tuple[str, ...]:
    """What nodes that ended their own ranks say of it."""
    return tuple(
        f"node {node.rank} ({node.host}) ended its ranks: {node.reason}"
        for node in evidence.nodes
        if node.told_to_stop and _FENCED.search(node.reason)
    )


_FENCED = re.compile(
    r"been silent for .* cut off|attempt \d+ of this run has begun|ends the attempt|nodes of this attempt are dead"
)
"""Reasons of the node agent that was cut off. Source: `node/fence.py`."""


INSTEAD = (restart_lost, without_progress, restarts_used_up)
"""These tell what ended the last attempt too."""

RULES = (paused, *INSTEAD, saving, agent_fenced)
