"""Memory that was not there: of the host, of a GPU, of /dev/shm."""

from __future__ import annotations

import re

from tuneplane.diagnose.culprit import Culprit, culprit
from tuneplane.diagnose.evidence import Evidence
from tuneplane.diagnose.finding import CERTAIN, LIKELY, Finding
from tuneplane.diagnose.rules.told import (
    ENDED_BADLY,
    at,
    last_lines,
    lines_of,
    on,
    on_host,
    place,
    trace_lines,
)

_GPU = re.compile(r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED")
_HOST = re.compile(
    r"(?:^|\n|\.)MemoryError|annot allocate memory|DefaultCPUAllocator: can't allocate|Unable to"
    r" allocate [\d.]+ \w+"
)
_SHM = re.compile(
    r"allocate shared memory|insufficient shared memory|unable to open shared memory|unable to mmap"
)
KILLED = (137, -9)


def gpu_out_of_memory(evidence: Evidence) -> Finding | None:
    """CUDA refused an allocation."""
    if evidence.state not in ENDED_BADLY:
        return None
    found = culprit(evidence)
    text = found.text()
    lines = lines_of(found)
    where = place(found)
    if not _GPU.search(text):
        marked = evidence.marked("cuda-memory")
        # A rank without a traceback, or one that only lost the rank whose GPU was full.
        if marked is None or (found.trace is not None and not found.is_victim):
            return None
        log, mark = marked
        text, lines, where = mark.last, (mark.last,), at(evidence, log, mark)
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
    total = re.search(r"total capac\w+ of ([\d.]+ \w+)", text) or re.search(
        r"([\d.]+ \w+) total capacity", text
    )
    gpu = re.search(r"GPU (\d+)", text)
    numbers = f" (asked for {asked[1]}" + (f" of {total[1]})" if total else ")") if asked else ""
    return Finding(
        "gpu-out-of-memory",
        f"GPU {gpu[1] if gpu else 'memory'} was full{numbers}: CUDA out of memory" + on_rank(where),
        "smaller batch or sequence length, gradient checkpointing, sharding over more GPUs; where much is reserved"
        " and unallocated, PYTORCH_ALLOC_CONF=expandable_segments:True",
        evidence=lines,
        **where,
    )


def on_rank(where: dict[str, object]) -> str:
    """` on rank 3`, where the rank is known."""
    return f" on rank {where['rank']}" if where.get("rank") is not None else ""


def host_out_of_memory(evidence: Evidence) -> Finding | None:
    """The node's memory, or the job's share of it: by Slurm's word, the kernel's, or the allocator's."""
    if evidence.state == "OUT_OF_MEMORY" or (evidence.state in ENDED_BADLY and _slurm_says(evidence)):
        return _by_slurm(evidence)
    if evidence.state not in ENDED_BADLY:
        return None
    found = culprit(evidence)
    if _HOST.search(found.text()) and not _GPU.search(found.text()):
        return Finding(
            "host-out-of-memory",
            f"the node had no memory for the program{on(found)}: {_allocator(found)}",
            _remedy(evidence),
            evidence=lines_of(found),
            **place(found),
        )
    if found.ending in KILLED and found.trace is None and not found.is_victim and not evidence.stopped:
        who = f"rank {found.rank}" if found.rank is not None else "the command"
        return Finding(
            "host-out-of-memory",
            f"{who} was killed (SIGKILL) by somebody else than this job{on_host(found.host)}: most often"
            " that is the kernel,"
            " for want of memory",
            f"{_remedy(evidence)}\n`dmesg -T | grep -i oom` on the node tells, for those who may read it",
            evidence=lines_of(found),
            certainty=LIKELY,
            **place(found),
        )
    return None


def _allocator(found: Culprit) -> str:
    asked = re.search(r"you tried to allocate (\d+) bytes", found.text())
    if asked:
        return f"it asked for {int(asked[1]) / 1e9:.1f} GB at once"
    name = found.trace.kind.rpartition(".")[2] if found.trace else ""
    return "MemoryError" if name == "MemoryError" else "cannot allocate memory"


def _slurm_says(evidence: Evidence) -> bool:
    if any(step.state == "OUT_OF_MEMORY" for step in evidence.slurm.steps):
        return True
    marked = evidence.marked("oom-kill")
    return marked is not None and marked[0].node is None


def _by_slurm(evidence: Evidence) -> Finding:
    marked = evidence.marked("oom-kill")
    asked = next((s.asked_memory for s in evidence.slurm.steps if s.asked_memory), "")
    used = max(
        (s.max_rss for s in evidence.slurm.steps if s.max_rss.endswith("K")), key=_kilobytes, default=""
    )
    numbers = ", ".join(
        told for told in (f"it had {asked}" if asked else "", f"a task used {used}" if used else "") if told
    )
    lines = [marked[1].last] if marked else []
    lines += [f"sacct: {s.job_id} {s.state}" for s in evidence.slurm.steps if s.state == "OUT_OF_MEMORY"][:2]
    found = culprit(evidence)
    return Finding(
        "host-out-of-memory",
        "Slurm ended the job because it used more memory than it was given"
        + (f" ({numbers})" if numbers else ""),
        _remedy(evidence),
        evidence=(*lines, *last_lines(found.log, 2)),
        certainty=CERTAIN,
        **place(found),
    )


def _kilobytes(text: str) -> int:
    return int(text[:-1]) if text[:-1].isdecimal() else 0


def _remedy(evidence: Evidence) -> str:
    if evidence.job is not None and evidence.job.scheduler == "slurm":
        return (
            "ask for more: a larger share of the node (more of its GPUs, or exclusive), or"
            " request_memory with more"
            " memory_per_node in the profile; or use less: fewer loader workers, streaming instead"
            " of loading whole"
        )
    return "use less: fewer loader workers, streaming instead of loading whole; or a machine with more memory"


def shared_memory_full(evidence: Evidence) -> Finding | None:
    """/dev/shm, by which torch's loader workers hand over batches."""
    if evidence.state not in ENDED_BADLY:
        return None
    found = culprit(evidence)
    text = found.text()
    bus = re.search(r"killed by signal: Bus error|Bus error", text)
    if not _SHM.search(text) and not bus:
        return None
    lines = trace_lines(found.trace) if found.trace else lines_of(found)
    said = next((line for line in text.splitlines() if _SHM.search(line) or "Bus error" in line), "")
    return Finding(
        "shared-memory-full",
        f"/dev/shm was full{on(found)}: loader workers hand their batches over in it",
        "num_workers=0 or fewer workers, smaller batches,"
        " torch.multiprocessing.set_sharing_strategy('file_system');"
        " or the site gives jobs a larger /dev/shm",
        evidence=tuple(dict.fromkeys([said.strip(), *lines])) if said else lines,
        **place(found),
    )


RULES = (gpu_out_of_memory, shared_memory_full, host_out_of_memory)
