"""How a run that runs or has ended well is: healthy, slow, stuck; and the word for a run that nothing explains."""

from __future__ import annotations

import re

from tuneplane.diagnose.evidence import Evidence, Process
from tuneplane.diagnose.finding import LIKELY, POSSIBLE, Finding
from tuneplane.diagnose.rules.told import has_begun, last_lines, seconds
from tuneplane.diagnose.silence import QUIET_S, silence_s
from tuneplane.runs.causes import words
from tuneplane.runs.state import CLEARED_WORDS

STUCK_S = 120.0
"""Slurm's KillWait, UnkillableStepTimeout and a usual epilog are over by then."""

BUSY_PERCENT = 20.0
"""Of one CPU: a process that computes, or polls a GPU, uses more; one that waits uses less."""

COLLECTIVES = re.compile(
    r"\b(?:all_reduce|all_gather\w*|reduce_scatter\w*|broadcast\w*|barrier|monitored_barrier|reduce|gather|scatter|"
    r"all_to_all\w*|recv|batch_isend_irecv|wait_for_everyone|_allgather_base|synchronize|init_process_group|rendezvous|"
    r"_store_based_barrier|next_rendezvous)\b"
)
LOADS = re.compile(
    r"from_pretrained|load_state_dict|load_dataset|load_checkpoint|snapshot_download|http_get|hf_hub_download|urlopen|"
    r"read_parquet|tokeniz|map\b|torch/serialization|safetensors|import_module|_find_and_load|compile"
)
_FRAME = re.compile(r"^\s+(\S+) \((.*?):(\d+)\)")


def _quiet_s(evidence: Evidence) -> float:
    return silence_s(evidence.now, evidence.nodes, evidence.logs, evidence.points)


def waits_for_rank(evidence: Evidence) -> Finding | None:
    """Most ranks wait in a collective, and one is somewhere else."""
    if evidence.state != "RUNNING" or _quiet_s(evidence) < QUIET_S:
        return None
    ranked = [p for p in evidence.processes if p.rank is not None and p.stack]
    waiting = [p for p in ranked if _in_collective(p)]
    absent = [p for p in ranked if not _in_collective(p)]
    if not waiting or not absent:
        return None
    first = absent[0]
    node = evidence.node(first.node)
    names = ", ".join(str(p.rank) for p in waiting[:8])
    others = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
    return Finding(
        "waits-for-rank",
        f"it hangs: rank{'s' if len(waiting) > 1 else ''} {names} wait{'' if len(waiting) > 1 else 's'} in"
        f" {_collective(waiting[0])} for rank {first.rank}{others}, which is in {_top(first)}",
        f"look at why rank {first.rank} is there; tp job shell {evidence.run_id} --node {first.node}"
        " opens a shell beside"
        f" it, tp job stop {evidence.run_id} ends it",
        node=first.node,
        host=node.host if node else "",
        rank=first.rank,
        evidence=(*_stack(first), f"rank {waiting[0].rank}: {_top(waiting[0])}", _silence(evidence)),
        certainty=LIKELY,
    )


def no_progress(evidence: Evidence) -> Finding | None:
    """Nothing printed or reported for long, and no process computes."""
    quiet = _quiet_s(evidence)
    if evidence.state != "RUNNING" or quiet < QUIET_S or not has_begun(evidence):
        return None
    busy = [p for p in evidence.processes if p.cpu_percent >= BUSY_PERCENT]
    if not evidence.processes or busy or waits_for_rank(evidence):
        return None
    first = evidence.processes[0]
    node = evidence.node(first.node)
    where = {"node": first.node, "host": node.host if node else "", "rank": first.rank}
    if first.state == "D":
        return Finding(
            "waits-for-storage",
            f"it waits for storage: its main process has hung in the kernel"
            f" ({first.wait_channel or 'D'}) and nothing was"
            f" printed or reported for {seconds(quiet)}",
            "look whether the file systems of the node answer; tell the administrators",
            evidence=(*_stack(first), _silence(evidence)),
            certainty=LIKELY,
            **where,  # type: ignore[arg-type]
        )
    together = [p for p in evidence.processes if p.stack and _in_collective(p)]
    what = (
        f"it waits in {_top(first)}"
        if first.stack
        else f"its main process sleeps ({first.wait_channel or first.state})"
    )
    if together and len(together) == len([p for p in evidence.processes if p.stack]):
        what = f"every rank that was looked at waits in {_collective(together[0])}"
    return Finding(
        "no-progress",
        f"it seems to hang: nothing was printed or reported for {seconds(quiet)}, no process computes, and {what}",
        f"tp job shell {evidence.run_id} opens a shell beside it; tp job stop {evidence.run_id} ends it"
        + (f". For its stack: {_no_stack(first)}" if "py-spy" in first.no_stack else ""),
        evidence=(*_stack(first), _silence(evidence)),
        certainty=LIKELY,
        **where,  # type: ignore[arg-type]
    )


def slow_start(evidence: Evidence) -> Finding | None:
    """It computes and says nothing: before its first step, or within a long one."""
    quiet = _quiet_s(evidence)
    if evidence.state != "RUNNING" or quiet < QUIET_S or not has_begun(evidence):
        return None
    if not evidence.processes:
        return Finding(
            "silent",
            f"it runs, and has printed and reported nothing for {seconds(quiet)}",
            f"its processes could not be looked at; tp job shell {evidence.run_id} opens a shell beside it",
            evidence=_tail(evidence),
            certainty=POSSIBLE,
        )
    busy = max(evidence.processes, key=lambda p: p.cpu_percent)
    if busy.cpu_percent < BUSY_PERCENT or waits_for_rank(evidence):
        return None
    node = evidence.node(busy.node)
    first = not evidence.points.points and not any(len(log.tail) > 1 for log in evidence.logs)
    loads = any(LOADS.search(line) for line in busy.stack)
    if _in_collective(busy):
        sentence = (
            f"it may hang: nothing was printed or reported for {seconds(quiet)}, and rank {busy.rank} polls in"
            f" {_collective(busy)} for the others"
        )
    else:
        what = "loads" if loads else "computes"
        before = "it has not made its first step" if first else "a step or a phase takes long"
        sentence = (
            f"it is slow and does not hang: it {what} ({busy.cpu_percent:.0f} % of a CPU"
            + (f", in {_top(busy)}" if busy.stack else "")
            + f"), and {before}; nothing was printed or reported for {seconds(quiet)}"
        )
    return Finding(
        "slow-start",
        sentence,
        "wait, and look again; print progress in long phases; keep prepared data and compiled code"
        " in the output folder or"
        " on shared storage",
        node=busy.node,
        host=node.host if node else "",
        rank=busy.rank,
        evidence=(*_stack(busy), _silence(evidence)),
        certainty=LIKELY,
    )


def _frames(process: Process) -> list[tuple[str, str, str]]:
    """Frames of the main thread, the innermost first. py-spy prints that thread as MainThread, or alone."""
    frames: list[tuple[str, str, str]] = []
    main = any('"MainThread"' in line for line in process.stack)
    inside = not main
    for line in process.stack:
        if line.startswith("Thread "):
            inside = not main or '"MainThread"' in line
        elif inside and (found := _FRAME.match(line)):
            frames.append((found[1], found[2], found[3]))
    return frames


def _in_collective(process: Process) -> bool:
    return any(COLLECTIVES.search(name) for name, _, _ in _frames(process)[:8])


def _collective(process: Process) -> str:
    return next((name for name, _, _ in _frames(process)[:8] if COLLECTIVES.search(name)), "a collective")


def _top(process: Process) -> str:
    """The innermost frame of the user's own code, else the innermost."""
    frames = _frames(process)
    if not frames:
        return f"{process.name} ({process.wait_channel or process.state})"
    own = next((f for f in frames if "/" not in f[1] or "experiments/" in f[1]), frames[0])
    return f"{own[0]} ({own[1]}:{own[2]})"


def _stack(process: Process) -> tuple[str, ...]:
    head = (
        f"process {process.pid} ({process.name}), state {process.state}, {process.cpu_percent:.0f} % of a CPU"
    )
    if not process.stack:
        return (head, f"no stack: {_no_stack(process)}")
    return (head, *(f"{name} ({file}:{line})" for name, file, line in _frames(process)[:8]))


def _no_stack(process: Process) -> str:
    return process.no_stack or "py-spy said nothing"


def _silence(evidence: Evidence) -> str:
    last = _tail(evidence)
    return f"last line, {seconds(_quiet_s(evidence))} ago: {last[-1]}" if last else "it printed nothing"


def _tail(evidence: Evidence) -> tuple[str, ...]:
    return last_lines(evidence.logs[0], 2) if evidence.logs else ()


def starting(evidence: Evidence) -> Finding | None:
    """Nodes were given, and the command is not up yet."""
    if evidence.state != "RUNNING" or has_begun(evidence):
        return None
    batch = last_lines(evidence.batch, 2) if evidence.batch else ()
    return Finding(
        "starting",
        "it has its nodes and its command is being started: the capsule is unpacked and the container prepared",
        "wait a moment; where it stays so, tp job logs shows what the batch script says",
        evidence=batch,
    )


def ending(evidence: Evidence) -> Finding | None:
    """Between the order to end and the end."""
    if evidence.state != "COMPLETING":
        return None
    over_s = evidence.now - evidence.ended_at if evidence.ended_at is not None else 0.0
    if over_s > STUCK_S:
        return Finding(
            "ending",
            f"the run itself ended {seconds(over_s)} ago, and Slurm still cleans up after it",
            "what it wrote is whole; where it stays so, tell the administrators: an epilog, or a process that"
            " cannot be killed, holds a node",
            evidence=evidence.slurm.nodes_now[:4],
        )
    left = [n for n in evidence.nodes if n.code is None]
    where = f" on {', '.join(n.host for n in left[:4])}" if left else ""
    grace = evidence.job.stop_grace_s if evidence.job else 0.0
    return Finding(
        "ending",
        f"Slurm is ending it: its processes{where} are being stopped, or its nodes cleaned up",
        f"ask again in a moment: programs have {grace:.0f} s to save after TERM, and KillWait ends the rest",
        evidence=last_lines(evidence.batch, 2),
    )


def healthy(evidence: Evidence) -> Finding | None:
    """It runs, and says so."""
    quiet = _quiet_s(evidence)
    if evidence.state != "RUNNING" or quiet >= QUIET_S or not has_begun(evidence):
        return None
    points = ""
    if evidence.points.points and evidence.points.newest_age_s is not None:
        points = f", points arrive (the last {seconds(evidence.points.newest_age_s)} ago)"
    ages = [log.age_s for log in evidence.logs]
    return Finding(
        "healthy",
        f"nothing is wrong that can be seen: it runs on {_nodes(evidence)}{_since(evidence)}"
        + (f", printed its last line {seconds(min(ages))} ago" if ages else "")
        + points,
        "",
        evidence=(*_tail(evidence)[-1:], *evidence.earlier_ends[-3:]),
    )


def _since(evidence: Evidence) -> str:
    """As which attempt, where it started again by itself."""
    if evidence.attempt is None or not evidence.follows:
        return ""
    happened = words(evidence.follows)
    return f" as attempt {evidence.attempt}, since attempt {evidence.attempt - 1} {happened}"


def _nodes(evidence: Evidence) -> str:
    count = len(evidence.nodes)
    return f"{count} nodes" if count != 1 else f"{evidence.nodes[0].host or 'one node'}"


def completed(evidence: Evidence) -> Finding | None:
    """It ended well."""
    if evidence.state != "COMPLETED":
        return None
    kept = f", {evidence.outputs.checkpoints} checkpoints" if evidence.outputs.checkpoints > 1 else ""
    kept = ", one checkpoint" if evidence.outputs.checkpoints == 1 else kept
    points = ", points reported" if evidence.points.points else ""
    return Finding("completed", f"nothing is wrong: it completed with exit code 0{points}{kept}")


def cannot_tell(evidence: Evidence) -> Finding:
    """The last word: what is known, and that it is not enough."""
    known = f"it is {evidence.state}"
    if evidence.reason:
        known += f" ({evidence.reason})"
    refused = evidence.slurm.refused
    lines = [f"exit code {evidence.code}"] if evidence.code is not None else []
    lines += [refused] if refused else []
    lines += list(_tail(evidence))
    lines += list(last_lines(evidence.batch, 2)) if evidence.batch else []
    sentence = f"the cause cannot be told from what is there: {known}"
    if evidence.reason.startswith(CLEARED_WORDS):
        sentence = f"why cannot be told any more, since its records were cleared by tp job gc: {known}"
    if evidence.state == "UNKNOWN":
        sentence = f"how it is cannot be told: Slurm does not answer ({evidence.reason})"
    return Finding(
        "cannot-tell",
        sentence,
        "Slurm does not answer: ask again later"
        if refused or evidence.state == "UNKNOWN"
        else "read tp job logs; tp job why --save-case DIR keeps what was found, to send on",
        evidence=tuple(lines),
        certainty=POSSIBLE,
    )


RULES = (waits_for_rank, no_progress, slow_start, starting, ending)
WELL = (healthy, completed)
