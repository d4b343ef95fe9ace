"""Slurm's own words on one job, as text: scontrol while it knows the job, sacct where there is accounting.

`gather.py` asks; parsing is pure. Every command may be missing, refuse or stay silent: then that is told.
"""

from __future__ import annotations

import os
import re

from tuneplane.diagnose.evidence import Slurm, Step, Waiting
from tuneplane.kernel.errors import OperationError
from tuneplane.launch.slurm_commands import run_slurm

JOB_FIELDS = frozenset(
    (
        *(
            "JobState",
            "Reason",
            "Priority",
            "TimeLimit",
            "RunTime",
            "Partition",
            "Account",
            "QOS",
            "NumNodes",
        ),
        *(
            "NumCPUs",
            "TRES",
            "ReqTRES",
            "Dependency",
            "StartTime",
            "EligibleTime",
            "ExcNodeList",
            "ReqNodeList",
        ),
        *(
            "Features",
            "Restarts",
            "Requeue",
            "ExitCode",
            "NodeList",
            "BatchHost",
            "Reservation",
            "FailedNode",
        ),
        *(
            "SchedNodeList",
            "MinMemoryNode",
            "MinMemoryCPU",
            "TresPerNode",
            "ArrayTaskThrottle",
            "PreemptTime",
        ),
    )
)
"""What is kept of `scontrol show job`; its comment, command and folders say nothing of a cause."""

PARTITION_FIELDS = frozenset(
    (
        *("State", "MaxTime", "MaxNodes", "MinNodes", "TotalNodes", "TotalCPUs", "AllowAccounts", "AllowQos"),
        *("AllowGroups", "DenyAccounts", "DenyQos", "MaxCPUsPerNode", "MaxMemPerNode", "MaxMemPerCPU", "QoS"),
        *("PriorityTier", "PreemptMode", "Default", "Nodes", "TRES"),
    )
)

ANSWER_S = 20.0
"""How long one of these commands may take: the run's state was asked for before, so Slurm does answer."""

STEP_FORMAT = "JobID,State,ExitCode,Reason,NodeList,MaxRSS,ReqMem,Elapsed,Timelimit,WorkDir"

NOTHING = ("", "(null)", "N/A", "None", "Unknown", "NONE")

_FIELD = re.compile(r"([A-Za-z][\w:/-]*)=")


def read_slurm(job_id: str, folder: str, state: str, reason: str, *, waits: bool, ended: bool) -> Slurm:
    """Slurm's words on a job. waits: it has not started yet; ended: it does not run any more.

    folder: where the job works. An id alone may be another job's, of a controller that counts anew.
    """
    refused = []
    fields: dict[str, str] = {}
    try:
        told = parse_fields(_run("scontrol", "show", "job", "--oneliner", job_id))
        if is_of(told.get("WorkDir", ""), folder):
            fields = {name: value for name, value in told.items() if name in JOB_FIELDS}
    except OperationError as error:
        if "Invalid job id" not in str(error):
            refused.append(error.faults[0].what)
    steps: tuple[Step, ...] = ()
    if ended or fields.get("Restarts", "0") != "0":
        argv = ["sacct", "--noheader", "--parsable2", "--duplicates", f"--jobs={job_id}"]
        try:
            steps = parse_steps(_run(*argv, f"--format={STEP_FORMAT}"), folder)
        except OperationError as error:
            if "accounting storage is disabled" not in str(error):
                refused.append(error.faults[0].what)
    return Slurm(
        job_id=job_id,
        state=state,
        reason=reason,
        refused="; ".join(refused),
        fields=fields,
        steps=steps,
        nodes_now=_nodes_now(fields, steps) if steps else (),
        waiting=_read_waiting(job_id, reason, fields) if waits else None,
    )


def _nodes_now(fields: dict[str, str], steps: tuple[Step, ...]) -> tuple[str, ...]:
    """How the nodes of the last start are now: one of them may have failed."""
    names = fields.get("NodeList") or next(
        (s.nodes for s in reversed(steps) if "." in s.job_id and s.nodes), ""
    )
    if not names:
        return ()
    said = _said("sinfo", "--noheader", f"--nodes={names}", "--Node", "--format=%N %T")
    return tuple(dict.fromkeys(line.strip() for line in said.splitlines() if line.strip()))[:64]


def _read_waiting(job_id: str, reason: str, fields: dict[str, str]) -> Waiting:
    partition = fields.get("Partition", "").split(",")[0]
    estimate = _said("squeue", "--noheader", "--start", f"--jobs={job_id}", "--format=%S").strip()
    nodes: dict[str, int] = {}
    largest: dict[str, str] = {}
    if partition:
        argv = ["sinfo", "--noheader", f"--partition={partition}", "--Node", "--format=%N|%T"]
        states = dict(line.split("|", 1) for line in _said(*argv).splitlines() if "|" in line)
        for state in states.values():
            nodes[state.strip()] = nodes.get(state.strip(), 0) + 1
        largest = parse_fields(
            _said("scontrol", "show", "partition", "--oneliner", partition), PARTITION_FIELDS
        )
    return Waiting(
        reason=fields.get("Reason") or reason,
        start_estimate="" if estimate in ("N/A", "") else estimate.splitlines()[0],
        fields={
            name: fields[name] for name in ("NumNodes", "ReqTRES", "TRES", "TimeLimit") if name in fields
        },
        nodes_by_state=nodes,
        largest=largest,
    )


def parse_fields(line: str, wanted: frozenset[str] | None = None) -> dict[str, str]:
    """`Name=value Name=value …` of scontrol's one-line form; values may hold blanks and `=`."""
    found: dict[str, str] = {}
    places = [m for m in _FIELD.finditer(line) if m.start() == 0 or line[m.start() - 1].isspace()]
    ends = [place.start() for place in places[1:]] + [len(line)]
    for place, end in zip(places, ends, strict=False):
        value = line[place.end() : end].strip()
        if wanted is None or place[1] in wanted:
            found.setdefault(place[1], value)
    return {name: value for name, value in found.items() if value not in NOTHING}


def parse_steps(said: str, folder: str = "") -> tuple[Step, ...]:
    """Rows of sacct in `STEP_FORMAT`, of jobs that work in `folder`; their steps follow each job."""
    found = []
    ours = True
    for line in said.splitlines():
        row = line.split("|", 9)
        if len(row) < 9:
            continue
        if "." not in row[0]:
            ours = is_of(row[9] if len(row) > 9 else "", folder)
        if ours:
            found.append(Step(*(_word(part) for part in row[:9])))
    return tuple(found)


def is_of(said: str, folder: str) -> bool:
    """Whether a job's working folder, as Slurm says it, is the run's; where Slurm says none, it may be."""
    return not said or not folder or os.path.realpath(said) == os.path.realpath(folder)


def _word(text: str) -> str:
    return "" if text in ("None", "None assigned", "Unknown") else text


def _said(*argv: str) -> str:
    try:
        return _run(*argv)
    except OperationError:
        return ""


def _run(*argv: str) -> str:
    return run_slurm(argv, timeout_s=ANSWER_S)
