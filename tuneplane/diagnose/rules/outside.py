"""What ended or interrupted a run from outside: people, limits, other jobs, nodes."""

from __future__ import annotations

import re

from tuneplane.diagnose.culprit import culprit
from tuneplane.diagnose.evidence import Evidence, Node
from tuneplane.diagnose.finding import LIKELY, Finding
from tuneplane.diagnose.rules.interrupted import (
    NODE_FAILURE,
    PREEMPTION,
    WALLTIME,
    ended_by,
    waited_anew,
    waits_again,
    who,
)
from tuneplane.diagnose.rules.restarts import INSTEAD, Following, fenced_lines, following
from tuneplane.diagnose.rules.told import ENDED_BADLY, last_lines, seconds
from tuneplane.runs.records import SILENT_S


def stopped_by_user(evidence: Evidence) -> Finding | None:
    """`tp job stop` of this run."""
    if evidence.state != "CANCELLED" or evidence.job_id not in evidence.stopped:
        return None
    return Finding(
        "stopped-by-user",
        "it was stopped by tp job stop",
        f"tp job retry {evidence.run_id} starts it again as its next attempt",
        evidence=(*_slurm_lines(evidence)[:2], *evidence.earlier_ends[-2:]),
    )


def saved_and_ended(evidence: Evidence) -> Finding | None:
    """An exit 0 after a stop request: not the end of the run."""
    if (
        evidence.state not in ("CANCELLED", "TIMEOUT", "PREEMPTED")
        or evidence.code != 0
        or not evidence.stop_marker
        or evidence.job_id in (*evidence.stopped, *evidence.paused)
        or ended_by(evidence) == WALLTIME
        or evidence.end.not_restarted
    ):
        return None
    limit = evidence.slurm.fields.get("TimeLimit", "")
    before = evidence.job.signal_before_end_s if evidence.job else None
    why = f" {before} s before its time limit ({limit})" if before and limit not in ("", "UNLIMITED") else ""
    return Finding(
        "saved-and-ended",
        f"it was asked to save and end{why}, and did: it is to be continued",
        f"tp job retry {evidence.run_id} goes on with its next attempt; a longer --time needs fewer of them",
        evidence=last_lines(evidence.logs[0] if evidence.logs else None, 2),
    )


def walltime(evidence: Evidence) -> Finding | None:
    """Slurm's time limit, and what follows."""
    if not _interrupted(evidence, WALLTIME):
        return None
    limit = evidence.slurm.fields.get("TimeLimit") or next(
        (s.time_limit for s in evidence.slurm.steps if s.time_limit), ""
    )
    saved = evidence.end.code == 0
    then = following(evidence)
    remedy = then.remedy
    if not saved:
        remedy = (
            f"{then.remedy}\nask for more (--time), or save and resume: the program looks at should_stop() or"
            f" TUNEPLANE_STOP_FILE, which appears {_before(evidence)} before the limit"
            + (", as it did here" if evidence.stop_marker else "")
        )
    ended = "and saved before it" if saved else "and Slurm ended it"
    return Finding(
        "walltime",
        f"{who(evidence)} reached its time limit{f' of {limit}' if limit else ''} {ended}; {then.clause}",
        remedy,
        evidence=(*_slurm_lines(evidence)[:2], *_quiet_before_end(evidence), *evidence.earlier_ends[-2:]),
    )


def _interrupted(evidence: Evidence, cause: str) -> bool:
    """Whether the last attempt was ended by `cause`, and that is what is to be told: not while another runs."""
    if not (evidence.state in ENDED_BADLY or waits_again(evidence)) or _by_hand(evidence):
        return False
    if evidence.state == "CANCELLED" and waited_anew(evidence):
        return False
    return ended_by(evidence) == cause and not any(rule(evidence) for rule in INSTEAD)


def _by_hand(evidence: Evidence) -> bool:
    """Whether somebody stopped or paused it: that is told instead."""
    return evidence.job_id in (*evidence.stopped, *evidence.paused) or evidence.state == "PAUSED"


def _before(evidence: Evidence) -> str:
    before = evidence.job.signal_before_end_s if evidence.job else None
    return f"{before} s" if before else "some time (slurm.signal_before_end_s of the profile)"


def _quiet_before_end(evidence: Evidence) -> tuple[str, ...]:
    """Whether the run printed and reported nothing for long before it was ended: then it hung."""
    if evidence.ended_at is None:
        return ()
    since_end = max(0.0, evidence.now - evidence.ended_at)
    ages = [log.age_s for log in evidence.logs]
    ages += [evidence.points.newest_age_s] if evidence.points.newest_age_s is not None else []
    quiet = min(ages, default=0.0) - since_end
    return (
        (f"nothing was printed or reported in its last {seconds(quiet)}: it may have hung",)
        if quiet > 1800
        else ()
    )


def preempted(evidence: Evidence) -> Finding | None:
    """Another job had the higher right to the nodes."""
    if not _interrupted(evidence, PREEMPTION):
        return None
    then = following(evidence)
    remedy = f"{then.remedy}. A partition or QOS that is not preempted costs more or waits longer"
    return Finding(
        "preempted",
        f"{who(evidence)} was preempted by a job of higher priority; {then.clause}",
        remedy,
        evidence=(*_slurm_lines(evidence)[:3], *evidence.earlier_ends[-2:]),
    )


def node_failure(evidence: Evidence) -> Finding | None:
    """Slurm or our own agents lost a node."""
    fence = evidence.fence
    being_ended = fence is not None and evidence.state in ("RUNNING", "COMPLETING")
    if not being_ended and not _interrupted(evidence, NODE_FAILURE):
        return None
    silent = fence.nodes[0] if fence else None
    host = silent.host if silent else _failed_host(evidence)
    node = next((n for n in evidence.nodes if n.host == host), None)
    rank = silent.rank if silent and silent.rank is not None else node.rank if node else None
    name = f"node {rank} ({host})" if host and rank is not None else f"node {host}" if host else "a node"
    if fence and silent:
        more = f" and {len(fence.nodes) - 1} more" if len(fence.nodes) > 1 else ""
        age = f" for {seconds(silent.silent_s)}" if silent.silent_s is not None else ""
        what = f"{name}{more} gave no sign of life{age}, so the others ended {who(evidence)}"
    else:
        what = f"{name} failed under {who(evidence)}"
    if being_ended:
        then = Following("that is being done now", "ask again in a moment")
    else:
        then = following(evidence)
    avoided = evidence.restart.exclude if evidence.restart else ()
    remedy = then.remedy
    if avoided:
        remedy += f"\nthe next attempt avoids {', '.join(avoided)}"
    elif not being_ended and not waits_again(evidence):
        remedy += f"; where the node is bad, leave it out: --exclude {host or 'NODE'}"
    lines = [f"fence.json: written by node {fence.by}"] if fence and fence.by is not None else []
    return Finding(
        "node-failure",
        f"{what}; {then.clause}",
        remedy,
        node=rank,
        host=host,
        evidence=(
            *lines,
            *fenced_lines(evidence)[:2],
            *_slurm_lines(evidence)[:3],
            *(f"sinfo: {said}" for said in evidence.slurm.nodes_now[:4]),
            *evidence.earlier_ends[-2:],
        ),
    )


def _failed_host(evidence: Evidence) -> str:
    """The node that Slurm names, else the only one that is down or has left no exit record."""
    down = [
        said.split()[0]
        for said in evidence.slurm.nodes_now
        if re.search(r" (?:down|fail|drain|unknown)", said)
    ]
    silent = [node.host for node in evidence.nodes if node.code is None]
    named = evidence.slurm.fields.get("FailedNode", "")
    return named or next((h for names in (down, silent) if len(names) == 1 for h in names), "")


def suspended(evidence: Evidence) -> Finding | None:
    """Stopped by Slurm: its processes stand still and keep their nodes."""
    if evidence.state != "SUSPENDED":
        return None
    return Finding(
        "suspended",
        "Slurm has suspended it: its processes stand still, and keep their nodes and memory",
        "an administrator did it, or jobs take turns on these nodes (gang scheduling); it goes on by itself, or by"
        f" scontrol resume {evidence.job_id}",
        evidence=(f"squeue: {evidence.state} {evidence.slurm.reason}".rstrip(),),
    )


def node_silent(evidence: Evidence) -> Finding | None:
    """A node's agent gives no sign of life while Slurm still believes in it."""
    if evidence.state != "RUNNING":
        return None
    silent = [
        n for n in evidence.nodes if n.code is None and n.beat_age_s is not None and n.beat_age_s > SILENT_S
    ]
    if not silent:
        return None
    first = silent[0]
    others = f" and {len(silent) - 1} more" if len(silent) > 1 else ""
    return Finding(
        "node-silent",
        f"node {first.rank} ({first.host}){others} has given no sign of life for"
        f" {seconds(first.beat_age_s or 0)}, while"
        " Slurm still says RUNNING",
        "the node or its way to the storage is gone: Slurm notices after its SlurmdTimeout (300 s by"
        " default) and ends or"
        f" requeues the job; sooner: tp job stop {evidence.run_id}, then tp job retry {evidence.run_id}",
        node=first.rank,
        host=first.host,
        evidence=tuple(
            f"node {n.rank} ({n.host}): heartbeat {seconds(n.beat_age_s or 0)} ago" for n in silent[:4]
        ),
        certainty=LIKELY,
    )


def agent_gone(evidence: Evidence) -> Finding | None:
    """A node's agent was killed, and left no exit record."""
    if evidence.state not in ENDED_BADLY:
        return None
    gone = [n for n in evidence.nodes if n.code is None and n.state != "ended"]
    own = [n for n in evidence.nodes if n.code and not n.told_to_stop]
    if not gone or own:
        return None
    first = gone[0]
    local = evidence.job is not None and evidence.job.scheduler == "local"
    killed = _killed_line(evidence, first)
    return Finding(
        "agent-gone",
        f"TunePlane's agent on node {first.rank} ({first.host}) is gone and left no record: "
        + ("it was killed, or the machine was restarted" if local else "it was killed, or its node failed"),
        f"tp job retry {evidence.run_id} starts it again. Killed for want of memory is the usual"
        " cause: ask for more, or"
        " use less" + ("" if local else f"; where it comes again on {first.host} alone, --exclude it"),
        node=first.rank,
        host=first.host,
        evidence=(*killed, *last_lines(evidence.log(first.rank), 2)),
        certainty=LIKELY,
    )


def batch_script_gone(evidence: Evidence) -> Finding | None:
    """The batch script was killed: Slurm ends all steps, and nobody is left to write how the attempt ended."""
    job = evidence.job
    if evidence.state not in ("FAILED", "LOST") or job is None or job.scheduler != "slurm":
        return None
    if not evidence.attempts or evidence.ended_at is not None or evidence.restart is not None:
        return None
    number = _batch_signal(evidence)
    if number is None or any(n.code is None or (n.code and not n.told_to_stop) for n in evidence.nodes):
        return None
    host = evidence.slurm.fields.get("BatchHost") or (evidence.hosts[0] if evidence.hosts else "")
    where = f" on node 0 ({host})" if host else ""
    return Finding(
        "agent-gone",
        f"its batch script{where} was killed by signal {number}, so Slurm ended all nodes",
        f"tp job retry {evidence.run_id} starts it again. A person with kill, or the system for want of memory,"
        " did it: the node's log (dmesg, journalctl) tells administrators which",
        node=0,
        host=host,
        evidence=(*_slurm_lines(evidence)[:3], *last_lines(evidence.log(0), 2)),
        certainty=LIKELY,
    )


def _batch_signal(evidence: Evidence) -> int | None:
    """The signal that ended the batch script, by Slurm's `exit code:signal`; None where none did."""
    told = [step.exit_code for step in evidence.slurm.steps if step.job_id.endswith(".batch")][-1:]
    told += [evidence.slurm.fields.get("ExitCode", "")]
    signals = [text.partition(":")[2] for text in told]
    return next((int(text) for text in signals if text.isdecimal() and int(text)), None)


def _killed_line(evidence: Evidence, node: Node) -> tuple[str, ...]:
    lines = evidence.batch.tail if evidence.batch else ()
    return tuple(line for line in lines if node.host in line and re.search(r"Killed|exit code", line))[:2]


def cancelled(evidence: Evidence) -> Finding | None:
    """scancel, by whom."""
    if evidence.state != "CANCELLED" or _by_hand(evidence) or any(rule(evidence) for rule in INSTEAD):
        return None
    if ended_by(evidence) and not waited_anew(evidence):
        return None
    step = next((s for s in evidence.slurm.steps if s.state.startswith("CANCELLED by")), None)
    marked = evidence.batch.mark("slurm-ended") if evidence.batch else None
    if step is None and marked is None and not evidence.slurm.fields and not waited_anew(evidence):
        return None
    ours = evidence.slurm.fields.get("JobState", "CANCELLED")
    if step is None and ours != "CANCELLED":
        return None
    found = culprit(evidence)
    if found.trace is not None and not found.is_victim:
        return None
    who = _who(step.state.removeprefix("CANCELLED by ").strip()) if step else ""
    anew = waited_anew(evidence) and evidence.attempt is not None
    waited = f" while attempt {(evidence.attempt or 0) + 1} waited to start" if anew else ""
    return Finding(
        "cancelled",
        f"the Slurm job was cancelled{' by ' + who if who else ''}{waited}",
        f"tp job retry {evidence.run_id} starts it again"
        + ("; ask the administrators why" if who.startswith("root") else ""),
        evidence=_slurm_lines(evidence)[:3],
    )


def _who(uid: str) -> str:
    if uid == "0":
        return "root, an administrator"
    return f"user id {uid}" if uid.isdecimal() else uid


def _slurm_lines(evidence: Evidence) -> tuple[str, ...]:
    """What Slurm said of the end."""
    slurm = evidence.slurm
    lines = [
        f"sacct: {s.job_id} {s.state} {s.exit_code} {s.nodes}".rstrip()
        for s in slurm.steps
        if "." not in s.job_id
    ]
    marked = evidence.batch.mark("slurm-ended") if evidence.batch else None
    lines += [marked.last] if marked else []
    state = slurm.fields.get("JobState")
    if state and not lines:
        lines.append(f"scontrol: {state} {slurm.fields.get('Reason', '')}".rstrip())
    return tuple(dict.fromkeys(lines))


def other_end(evidence: Evidence) -> Finding | None:
    """Slurm's other words for an end."""
    told = {
        "DEADLINE": "its deadline passed before it could start or end",
        "BOOT_FAIL": "its nodes did not boot",
        "REVOKED": "a sibling in another cluster of the federation started instead",
    }.get(evidence.state)
    if told is None:
        return None
    return Finding(
        "slurm-ended",
        f"Slurm ended it: {told}",
        f"tp job retry {evidence.run_id}",
        evidence=_slurm_lines(evidence),
    )


FIRST = (stopped_by_user, saved_and_ended, walltime, preempted, node_failure)
"""Slurm knows: what the log says of it (a rank that lost its peer) is the consequence."""

RULES = (suspended, node_silent, cancelled, other_end)
LAST = (agent_gone, batch_script_gone)
