"""Why a run waits, in plain words, and what would start it sooner. Source: squeue(1), JOB REASON CODES."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tuneplane.diagnose.evidence import Evidence, Waiting
from tuneplane.diagnose.finding import LIKELY, Finding
from tuneplane.diagnose.rules.interrupted import NODE_FAILURE, PREEMPTION, WALLTIME, ended_by, waits_again
from tuneplane.diagnose.rules.told import seconds
from tuneplane.runs.state import WAITING

SMALLER = "ask for less (GPUs, nodes), or for less time (--time): a short job fits into gaps"
LIMITS = (
    "wait for one of your jobs to end, or ask for less; `sacctmgr show qos` and `sacctmgr show assoc user=$USER`"
    " list the limits"
)


@dataclass(frozen=True)
class Reason:
    """words: Slurm's reason, a pattern. plain: why it waits. sooner: what would start it. never: nothing does."""

    words: str
    plain: str
    sooner: str
    never: bool = False


REASONS: tuple[Reason, ...] = (
    Reason("Resources", "it is next, and not enough nodes are free yet", SMALLER),
    Reason("Priority", "jobs of higher priority are before it", SMALLER),
    Reason(
        "Dependency",
        "another job must end first ({dependency})",
        "let that job end, or submit without --dependency",
    ),
    Reason(
        "DependencyNeverSatisfied",
        "the job before it ended otherwise than asked for ({dependency}), so it never starts",
        "stop it and submit it again without --dependency, or with afterany",
        never=True,
    ),
    Reason(
        "BeginTime",
        "it is not to begin before {eligible}",
        "nothing is to be done; a requeued job waits so too",
    ),
    Reason("JobHeldUser", "it is held, by you", "scontrol release {job}", never=True),
    Reason("JobHeldAdmin", "it is held by an administrator", "ask the administrators", never=True),
    Reason(
        "job requeued in held state",
        "it was requeued by somebody, and is held",
        "scontrol release {job}; ask the administrators where it was not you",
        never=True,
    ),
    Reason(
        "launch failed requeued held",
        "it was started, failed to launch and was held",
        "look at tp job logs; scontrol release {job} starts it again",
        never=True,
    ),
    Reason(
        r"ReqNodeNotAvail.*Reserved for maintenance|ReqNodeNotAvail, (?:Res|May be res).*",
        "its nodes are reserved, for maintenance or for others, before it could end",
        "ask for less time (--time), so that it ends before the reservation begins: scontrol show reservation",
    ),
    Reason(
        r"ReqNodeNotAvail.*|UnavailableNodes.*",
        "nodes that it needs are down, drained or reserved{unavailable}",
        "leave --nodelist or --constraint away, or wait: sinfo -R tells why they are out",
    ),
    Reason("Reservation", "its reservation has not begun", "submit without --reservation, or wait"),
    Reason(
        "ReservationDeleted", "its reservation is gone", "submit it again without --reservation", never=True
    ),
    Reason(
        "PartitionDown",
        "its partition {partition} is down: jobs are taken and none is started",
        "choose another partition (sinfo), or wait for the administrators",
        never=True,
    ),
    Reason(
        "PartitionInactive",
        "its partition {partition} is inactive: no job is started",
        "choose another partition (sinfo), or wait for the administrators",
        never=True,
    ),
    Reason(
        "PartitionTimeLimit",
        "it asks for more time ({limit}) than its partition gives ({max_time}), so it never starts",
        "stop it and submit it again with a shorter --time, or to another partition",
        never=True,
    ),
    Reason(
        "PartitionNodeLimit",
        "it asks for more nodes ({nodes}) than its partition gives a job ({max_nodes}), so it never starts",
        "stop it and submit it again with fewer nodes, or to another partition",
        never=True,
    ),
    Reason(
        "BadConstraints|NodesDown|InvalidQOS|InvalidAccount",
        "no node of its partition can ever give what it asks for ({reason})",
        "look at --constraint, --nodelist, GPUs and memory per node: sinfo -o '%P %f %G %m' shows what there is",
        never=True,
    ),
    Reason(
        r"QOSMax.*PerUser(?:Limit)?|QOSMaxJobsPerUserLimit|QOSMaxGRESPerUser|QOSMax.*PerUser",
        "your jobs have reached a limit of the QOS {qos} for one user ({reason})",
        LIMITS,
    ),
    Reason(
        r"QOSMax(?:Wall|Node|CPU|GRES|Cpu|Mem|Memory).*|QOSMaxTRESPerJob.*|QOSMin.*",
        "it asks for more than the QOS {qos} gives a job ({reason}), so it never starts",
        "stop it and submit it again with less, or with another --qos",
        never=True,
    ),
    Reason(
        r"QOSGrp.*|QOSJobLimit|QOSResourceLimit|QOSUsageThreshold|QOSTimeLimit|QOSNotAllowed",
        "all jobs of the QOS {qos} together have reached its limit ({reason})",
        "wait for others to end, or submit with another --qos",
    ),
    Reason(
        r"AssocMaxWall.*|AssocMax.*PerJob.*|AssocMaxNode.*|AssocMaxCpuPerJob.*",
        "it asks for more than your account {account} gives a job ({reason}), so it never starts",
        "stop it and submit it again with less, or with another --account",
        never=True,
    ),
    Reason(
        r"Assoc(?:Max|Grp).*|AssociationJobLimit|AssociationResourceLimit|AssociationTimeLimit",
        "your account {account} has reached a limit ({reason})",
        "wait for jobs of the account to end, ask for less, or submit with another --account; "
        "`sacctmgr show assoc user=$USER format=account,grptres,maxtres,maxjobs` lists the limits",
    ),
    Reason(
        "AccountNotAllowed",
        "its partition does not take the account {account}",
        "another --account or --partition",
        True,
    ),
    Reason("Licenses", "a license that it needs is in use", "wait, or submit without it"),
    Reason("JobArrayTaskLimit", "as many elements of its array run as it allows at once", "wait"),
    Reason("Cleaning", "its former start is being cleaned up", "wait a moment"),
    Reason("Prolog", "the site's prolog runs on its nodes", "wait a moment"),
    Reason(
        "FrontEndDown|SchedDefer|DeadLine|BurstBuffer.*|SystemFailure|RaisedSignal.*",
        "Slurm says {reason}",
        "",
    ),
    Reason("None|", "Slurm's scheduler has not looked at it yet", "wait a moment, and look again"),
)


def queue_words(evidence: Evidence) -> Reason | None:
    """Slurm's reason for a run that waits, with all that it names; None where it does not wait for Slurm."""
    waiting = evidence.slurm.waiting
    if evidence.state not in WAITING or waiting is None:
        return None
    said = (waiting.reason.strip("()") or evidence.reason).replace("_", " ")
    known = next((r for r in REASONS if re.fullmatch(r.words, said)), None)
    known = known or Reason("", "Slurm says {reason}", "squeue(1) explains its reason codes")
    words = _Words(evidence, waiting, said)
    estimate = waiting.start_estimate if not known.never else ""
    estimate = "" if estimate in words.fill(known.plain) else estimate
    expects = f"; Slurm expects it to start at {estimate}" if estimate else ""
    return Reason(said, words.fill(known.plain) + expects, words.fill(known.sooner), known.never)


def pending(evidence: Evidence) -> Finding | None:
    """A run in the queue."""
    words = queue_words(evidence)
    if words is None or evidence.job_id in evidence.paused:
        return None
    if waits_again(evidence) and ended_by(evidence) in (WALLTIME, PREEMPTION, NODE_FAILURE):
        return None  # told with what ended its last attempt
    return Finding(
        "pending",
        f"it waits in the queue: {words.plain}",
        words.sooner,
        evidence=queue_lines(evidence, words),
    )


def queue_lines(evidence: Evidence, words: Reason) -> tuple[str, ...]:
    """What speaks for it: Slurm's own word, how long it waits, what it asks for, how the nodes are."""
    lines = [f"squeue: {evidence.state} ({words.words})"]
    if evidence.submitted_at is not None:
        lines.append(f"submitted {seconds(max(0.0, evidence.now - evidence.submitted_at))} ago")
    return (*lines, *(_nodes(evidence.slurm.waiting) if evidence.slurm.waiting else ()))


class _Words:
    """What a reason's sentences may name."""

    def __init__(self, evidence: Evidence, waiting: Waiting, reason: str) -> None:
        fields = evidence.slurm.fields
        unavailable = re.search(r"UnavailableNodes:(\S+)", reason)
        self.values = {
            "reason": reason,
            "job": evidence.job_id,
            "dependency": fields.get("Dependency", "--dependency"),
            "eligible": fields.get("EligibleTime") or fields.get("StartTime", "a time that was asked for"),
            "partition": fields.get("Partition", ""),
            "qos": fields.get("QOS", ""),
            "account": fields.get("Account", ""),
            "limit": fields.get("TimeLimit", "?"),
            "nodes": fields.get("NumNodes", "?").partition("-")[0],
            "max_time": waiting.largest.get("MaxTime", "?"),
            "max_nodes": waiting.largest.get("MaxNodes", "?"),
            "unavailable": f": {unavailable[1]}" if unavailable else "",
        }

    def fill(self, text: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda m: self.values.get(m[1], m[0]), text)


def _nodes(waiting: Waiting) -> tuple[str, ...]:
    """What it asks for, and how the partition's nodes are."""
    asked = waiting.fields.get("TRES") or waiting.fields.get("ReqTRES", "")
    lines = [f"it asks for {asked}"] if asked else []
    if waiting.nodes_by_state:
        total = sum(waiting.nodes_by_state.values())
        states = ", ".join(f"{count} {state}" for state, count in sorted(waiting.nodes_by_state.items()))
        lines.append(f"nodes of its partition: {total} ({states})")
    return tuple(lines)


def waits_here(evidence: Evidence) -> Finding | None:
    """A local run that waits for its share of the machine."""
    if evidence.state != "PENDING" or not evidence.job_id.startswith("local-"):
        return None
    return Finding(
        "waits-for-machine",
        f"it waits for its share of this machine's GPUs or CPUs: {evidence.reason}".rstrip(": "),
        "tp job ls shows what runs; ask for fewer (--profile local:N), or stop another run",
    )


def not_started(evidence: Evidence) -> Finding | None:
    """Rendered for review, or never made whole."""
    if evidence.state == "INCOMPLETE":
        return Finding(
            "not-started",
            "it was never submitted: it is being made, or was left half-made by a tp that was killed",
            "submit the experiment again",
            certainty=LIKELY,
        )
    if evidence.state != "PREPARED":
        return None
    return Finding(
        "not-started",
        "it was prepared for review and never submitted",
        f"tp submit --run {evidence.run_id}",
        evidence=(evidence.reason,) if evidence.reason else (),
    )


def not_run(evidence: Evidence) -> Finding | None:
    """An operation whose run did not complete."""
    if evidence.state != "NOT_RUN":
        return None
    said = evidence.reason.removeprefix("not run: ") or "the run before it did not complete"
    return Finding(
        "not-run",
        f"it was not run, because {said}",
        f"tp job why tells of that run; once that is COMPLETED, tp job retry {evidence.run_id}",
    )


REFUSALS: tuple[tuple[str, str, str], ...] = (
    (
        r"Invalid account or account/partition combination",
        "you may not use the account {account} (or not in the partition {partition})",
        "`sacctmgr show assoc user=$USER format=account,partition,qos` lists yours: set"
        " `slurm.account` of the profile, or"
        " --account",
    ),
    (
        r"invalid partition specified|Invalid partition name",
        "there is no partition {partition}",
        "`sinfo -s` lists them: set `slurm.partition` of the profile, or --partition",
    ),
    (
        r"Invalid qos",
        "you may not use the QOS {qos}",
        "`sacctmgr show assoc user=$USER format=account,qos` lists yours: set `slurm.qos` of the"
        " profile, or --qos",
    ),
    (
        r"Requested time limit is invalid|time limit",
        "it asks for more time ({time}) than the partition gives",
        "`sinfo -o '%P %l'` shows the limits: a shorter --time, or another partition",
    ),
    (
        r"Invalid feature specification",
        "no node has the feature that --constraint asks for",
        "`sinfo -o '%N %f'` shows the features of nodes",
    ),
    (
        r"Requested node configuration is not available|Node count specification invalid|More"
        r" processors requested",
        "no node, or not so many nodes, can give what it asks for",
        "`sinfo -o '%P %D %c %m %G'` shows what nodes have: fewer GPUs, CPUs or nodes, or less memory",
    ),
    (
        r"Job violates accounting/QOS policy",
        "it is more than your account or QOS allows",
        "`sacctmgr show assoc user=$USER` and `sacctmgr show qos` list the limits",
    ),
    (
        r"Access/permission denied|not permitted to use this partition|User's group not permitted",
        "you may not use this partition or reservation",
        "ask the administrators, or choose another partition",
    ),
    (
        r"Unable to contact slurm controller|Socket timed out|Connection refused|did not answer",
        "Slurm's controller did not answer",
        "submit it again: tp submit --run {run}",
    ),
    (
        r"Invalid generic resource|Invalid Trackable RESource|gres",
        "this Slurm does not know the kind of GPU that it asks for",
        "`sinfo -o '%P %G'` shows their names: set `slurm.gpu_type` and `slurm.gpu_request` of the profile",
    ),
)


def slurm_refused(evidence: Evidence) -> Finding | None:
    """sbatch took the script not."""
    if evidence.state != "NOT_SUBMITTED":
        return None
    said = evidence.submit_error or evidence.reason
    job = evidence.job
    values = {
        "account": (job.account if job else "") or "that is your default",
        "partition": (job.partition if job else "") or "that is the default",
        "qos": (job.qos if job else "") or "that is the default",
        "time": (job.time if job else "") or "?",
        "run": evidence.run_id,
    }
    unknown = ("", "see its words below", "")
    _, plain, remedy = next((row for row in REFUSALS if re.search(row[0], said)), unknown)

    def fill(text: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda m: values.get(m[1], m[0]), text)

    return Finding(
        "slurm-refused",
        f"Slurm refused it, so it was never submitted: {fill(plain)}",
        fill(remedy),
        evidence=(said,),
    )


RULES = (not_started, not_run, slurm_refused, waits_here)
WAITS = (pending,)
