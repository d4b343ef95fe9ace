"""What ended the last attempt from outside, and whether another one waits: several rules ask that."""

from __future__ import annotations

from tuneplane.diagnose.evidence import Evidence
from tuneplane.runs.state import WAITING

WALLTIME, PREEMPTION, NODE_FAILURE, ASKED = "walltime", "preemption", "node_failure", "asked"

LAST_LINES = 12
"""Of the batch script's output: what Slurm and srun say of one end, of a few nodes."""

_SLURM_SAYS = {
    "DUE TO TIME LIMIT": WALLTIME,
    "DUE TO PREEMPTION": PREEMPTION,
    "DUE TO NODE FAILURE": NODE_FAILURE,
}
_STATES = {"TIMEOUT": WALLTIME, "PREEMPTED": PREEMPTION, "NODE_FAIL": NODE_FAILURE, "BOOT_FAIL": NODE_FAILURE}


def ended_by(evidence: Evidence) -> str:
    """What ended the last attempt from outside: by our records, else by Slurm's word; empty where neither says."""
    told = (evidence.restart.cause if evidence.restart else "") or evidence.end.cause
    if told:
        return told
    if evidence.fence is not None:
        return NODE_FAILURE
    if evidence.state in _STATES:
        return _STATES[evidence.state]
    if not waits_again(evidence) and _failed_by_itself(evidence):
        return ""
    words = _last_words(evidence)
    for said, cause in _SLURM_SAYS.items():
        if said in words:
            return cause
    booked = [step.state for step in evidence.slurm.steps if "." not in step.job_id]
    if waits_again(evidence):
        booked = [state for state in booked if state in _STATES]
    return _STATES.get(booked[-1], "") if booked else ""


def _failed_by_itself(evidence: Evidence) -> bool:
    return any(node.code and not node.told_to_stop for node in evidence.nodes)


def _last_words(evidence: Evidence) -> str:
    """Slurm's last words in the batch script's output, which holds those of former starts too."""
    lines = evidence.batch.tail if evidence.batch else ()
    recent = lines if waits_again(evidence) else lines[-LAST_LINES:]
    return next((line for line in reversed(recent) if " DUE TO " in line), "")


def waits_again(evidence: Evidence) -> bool:
    """Whether the run waits for another attempt than its first."""
    return evidence.state in WAITING and evidence.attempts > 0


def waited_anew(evidence: Evidence) -> bool:
    """Whether its next attempt had been handed to Slurm: what ended the job then came after the last attempt."""
    return evidence.restart is not None and evidence.restart.carried_out


def who(evidence: Evidence) -> str:
    """`it`, or of several attempts the one that is told of."""
    several = evidence.attempts > 1 or evidence.restart is not None or waits_again(evidence)
    return f"attempt {evidence.attempt}" if several and evidence.attempt is not None else "it"
