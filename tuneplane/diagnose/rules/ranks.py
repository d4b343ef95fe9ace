"""Programs that die, and ranks that wait for one another."""

from __future__ import annotations

import re

from tuneplane.diagnose.culprit import Culprit, culprit, is_launcher
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
    seconds,
    shortly,
)

SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}

_NCCL = re.compile(r"\[?Rank (?P<rank>\d+)\].*collective operation timeout")
_WAITED = re.compile(r"ran for (\d+) milliseconds")
_OPERATION = re.compile(r"OpType=(\w+)")
_TIMEOUT = re.compile(
    r"Timed out waiting (?P<ms>\d+)\s*ms for (?P<what>\w+)|collective operation timeout|"
    r"Application timeout caused pair closure|wait timeout after (?P<store>\d+)ms"
)


def nccl_timeout(evidence: Evidence) -> Finding | None:
    """The NCCL watchdog: a rank did not come to a collective in time."""
    if evidence.state not in ENDED_BADLY:
        return None
    marked = [(log, mark) for log in evidence.logs if (mark := log.mark("nccl-timeout"))]
    if not marked:
        return None
    found = culprit(evidence)
    if found.trace is not None and not found.is_victim and "collective operation timeout" not in found.text():
        return None  # a rank failed by itself; the others waited for it in vain
    log, mark = marked[0]
    told = _NCCL.search(mark.first)
    operation = _OPERATION.search(mark.first)
    ran = _WAITED.search(mark.first)
    waited = f" within {seconds(int(ran[1]) / 1000)}" if ran else ""
    rank = int(told["rank"]) if told else mark.rank
    return Finding(
        "nccl-timeout",
        f"NCCL timeout: {operation[1] if operation else 'a collective'} was not joined by every rank{waited}, and"
        f" {'a rank' if rank is None else f'rank {rank}'} gave up waiting",
        "the rank that timed out waits for one that is slow, stuck or gone: look at what the others"
        " did last (uneven"
        " data, a rank that saves or evaluates alone, a dead loader, a broken link);"
        " NCCL_DEBUG=INFO and TORCH_NCCL_TRACE_BUFFER_SIZE=2000 tell more at the next run",
        evidence=tuple(dict.fromkeys(m.first for _, m in marked))[:4],
        **{**at(evidence, log, mark), "rank": rank},
    )


def collective_timeout(evidence: Evidence) -> Finding | None:
    """The same of gloo, and of the store by which ranks find each other."""
    if evidence.state not in ENDED_BADLY:
        return None
    found = culprit(evidence)
    told = _TIMEOUT.search(found.text())
    if told is None:
        return None
    waited_ms = told["ms"] or told["store"]
    waited = f" for {int(waited_ms) / 1000:.0f} s" if waited_ms else ""
    return Finding(
        "collective-timeout",
        f"{_who(found)} waited{waited} for another rank that did not come",
        "look at what the other ranks did last: uneven data, a rank that saves or evaluates alone, a"
        " node that is slow"
        " or gone; a slow start needs a longer timeout= of init_process_group",
        evidence=lines_of(found),
        **place(found),
    )


def _who(found: Culprit) -> str:
    return f"rank {found.rank}" if found.rank is not None else "a rank"


def rendezvous_failed(evidence: Evidence) -> Finding | None:
    """torchrun's agents did not find each other."""
    if evidence.state not in ENDED_BADLY:
        return None
    marked = evidence.marked("rendezvous")
    traced = [t for log in evidence.logs for t in log.traces if "Rendezvous" in t.kind]
    if marked is None and not traced:
        return None
    found = culprit(evidence)
    if found.trace is not None and not found.is_victim and "Rendezvous" not in found.trace.kind:
        return None
    lines = (marked[1].last,) if marked else (f"{traced[0].kind}: {shortly(traced[0].message)}",)
    return Finding(
        "rendezvous-failed",
        "the nodes' launchers did not find each other",
        "every node must run the same launch line with --nnodes, --node_rank, --master_addr and"
        " --master_port of the"
        " job's variables; look whether node 0 started at all, and which network interface is used",
        evidence=lines,
        **(at(evidence, *marked) if marked else place(found)),
    )


def segmentation_fault(evidence: Evidence) -> Finding | None:
    """SIGSEGV, and its like: compiled code went wrong."""
    if evidence.state not in ENDED_BADLY:
        return None
    found = culprit(evidence)
    signal = -found.ending if found.ending is not None and found.ending < 0 else 0
    log = found.log
    if signal not in (4, 7, 8, 11):
        mark = log.mark("segfault", "illegal") if log else None
        if mark is None or found.trace is not None or mark.last not in (log.tail if log else ()):
            return None
        signal = 11 if mark.name == "segfault" else 4
    cause = {4: "illegal-instruction", 7: "bus-error"}.get(signal, "segmentation-fault")
    what = {
        4: "ran an instruction that this processor does not have (SIGILL)",
        7: "touched memory that is not there (SIGBUS): a full /dev/shm, or a mapped file that was cut",
        8: "divided by zero in compiled code (SIGFPE)",
        11: "crashed in compiled code (SIGSEGV, a segmentation fault)",
    }[signal]
    remedy = (
        "that is a fault of a library or extension, not of Python: python3 -X faulthandler shows the line; look"
        " for packages built for another CUDA, torch or Python than the image has"
    )
    if signal == 4:
        remedy = "install a build for the nodes' processor, or ask for nodes like the one it was built for"
    return Finding(
        cause,
        f"{_who(found) if found.rank is not None else 'the program'}{on_host(found.host)} {what}",
        remedy,
        evidence=lines_of(found) if found.trace is None else last_lines(log, 6),
        **place(found),
    )


def rank_killed(evidence: Evidence) -> Finding | None:
    """A signal from outside ended one rank; the memory rule looked before."""
    if evidence.state not in ENDED_BADLY:
        return None
    found = culprit(evidence)
    if found.ending is None or found.ending >= 0 or found.trace is not None:
        return None
    # TERM is a victim's end where another rank failed; here nobody else did.
    alone = found.ending == -15 and found.node is not None and not found.node.told_to_stop
    if found.is_victim and not (alone and not found.victims):
        return None
    name = SIGNALS.get(-found.ending, f"signal {-found.ending}")
    return Finding(
        "rank-killed",
        f"{_who(found) if found.rank is not None else 'the command'} was ended by {name}{on_host(found.host)}",
        "neither TunePlane nor Slurm did that: look at the last lines of its log, and at what else ran on"
        " that node",
        evidence=lines_of(found),
        certainty=LIKELY,
        **place(found),
    )


def address_in_use(evidence: Evidence) -> Finding | None:
    """A port that somebody else has."""
    if evidence.state not in ENDED_BADLY:
        return None
    found = culprit(evidence)
    launcher = [
        t for log in evidence.logs for t in log.traces if is_launcher(t) or "Address already" in t.message
    ]
    text = found.text() or "\n".join(t.message for t in launcher)
    if "Address already in use" not in text and "EADDRINUSE" not in text:
        return None
    return Finding(
        "address-in-use",
        f"a port was in use already{on(found)}",
        "take the job's own port, $TUNEPLANE_MAIN_PROCESS_PORT, or port 0; torchrun on one node: --standalone",
        evidence=lines_of(found),
        **place(found),
    )


def no_network(evidence: Evidence) -> Finding | None:
    """Compute nodes mostly have no way out."""
    if evidence.state not in ENDED_BADLY:
        return None
    found = culprit(evidence)
    marked = evidence.marked("offline")
    if marked is None or (found.trace is not None and found.log is not marked[0]):
        return None
    network = re.search(
        r"Name or service not known|Temporary failure in name resolution|Network is unreachable|Max"
        r" retries exceeded|"
        r"couldn't connect to 'https://|outgoing traffic has been disabled|ConnectionError|gaierror",
        found.text(),
    )
    if found.trace is not None and network is None:
        return None
    return Finding(
        "no-network",
        f"the program wanted something from the network, which this node does not reach{on(found)}",
        "download models and data on the login node beforehand into storage that nodes see (HF_HOME), and set"
        " HF_HUB_OFFLINE=1; for pip: install it in the image",
        evidence=tuple(dict.fromkeys([marked[1].first, *lines_of(found)[-3:]])),
        certainty=CERTAIN if network else LIKELY,
        **place(found),
    )


def cuda_error(evidence: Evidence) -> Finding | None:
    """The driver, or the device, said no."""
    if evidence.state not in ENDED_BADLY:
        return None
    found = culprit(evidence)
    said = re.search(
        r"CUDA error: [^\n]*|no CUDA-capable device[^\n]*|Found no NVIDIA driver[^\n]*|CUDA driver"
        r" version is insufficient"
        r"[^\n]*|No CUDA GPUs are available",
        found.text(),
    )
    if said is None or "out of memory" in said[0]:
        return None
    device = evidence.job.device if evidence.job else "gpu"
    if "driver" in said[0] or "No CUDA GPUs" in said[0] or "no CUDA-capable" in said[0]:
        remedy = (
            "this profile gives CPUs alone: take one with GPUs, or train on the CPU"
            if device == "cpu"
            else "nvidia-smi on the node must work, and the image's CUDA must not be newer than the node's driver"
        )
    else:
        remedy = (
            "CUDA_LAUNCH_BLOCKING=1 shows the line that failed; where it comes again on one node alone, leave that"
            " node out (--exclude) and tell the administrators"
        )
    return Finding(
        "cuda-error", f"{shortly(said[0])}{on(found)}", remedy, evidence=lines_of(found), **place(found)
    )


RULES = (
    segmentation_fault,
    nccl_timeout,
    collective_timeout,
    address_in_use,
    no_network,
    cuda_error,
    rendezvous_failed,
)
LAST = (rank_killed,)
