"""Runs that were ended because nothing was printed or reported for longer than the limit."""

from __future__ import annotations

from collections import Counter

from tuneplane.diagnose.evidence import Evidence, Frame, Node, Stack
from tuneplane.diagnose.finding import CERTAIN, LIKELY, Finding
from tuneplane.diagnose.rules.running import COLLECTIVES
from tuneplane.diagnose.rules.told import EVIDENCE_LINES, last_lines
from tuneplane.node.hang import HUNG_WORDS

DEEP = 12
"""So many of the innermost frames say whether a rank waits in a collective; further out is the program's loop."""

MOST_NAMED = 8

LAUNCH = ("/tuneplane/bridge/", "<frozen runpy>")
"""Files of frames that only started the program."""

Placed = tuple[Node, Stack]


def hang_limit(evidence: Evidence) -> Finding | None:
    """The hang limit ended it: which rank was not where the others waited."""
    ended = [node for node in evidence.nodes if node.reason.startswith(HUNG_WORDS)]
    if not ended or evidence.state != "FAILED":
        return None
    told = ended[0].reason.partition(":")[0]
    stacks = [
        (node, stack) for log in evidence.logs for stack in log.stacks if (node := evidence.node(log.node))
    ]
    if not stacks:
        return Finding(
            "hang-limit",
            f"it was ended since it hung: {told}; no process said where it was",
            "where it is only slow, give it more time (--hang-limit). Ranks that TunePlane starts write their"
            " stacks on SIGQUIT; in a program of your own: faulthandler.register(signal.SIGQUIT)",
            evidence=last_lines(evidence.log(ended[0].rank)),
            certainty=LIKELY,
        )
    absent, waiting = _apart(stacks)
    node, stack = absent[0]
    named = ", ".join(_who(n, s, len(evidence.nodes)) for n, s in absent[:MOST_NAMED])
    more = f" and {len(absent) - MOST_NAMED} more" if len(absent) > MOST_NAMED else ""
    where = f"{named}{more} {'was' if len(absent) == 1 else 'were'} in {_place(stack)}"
    if not waiting and all(in_collective(s) for _, s in absent) and len(absent) > 1:
        each = ", ".join(f"rank {s.rank} in {_wait(s)}" for _, s in absent[:MOST_NAMED])
        where = f"every rank waited for others: {each}{more}"
    if waiting:
        ranks = ", ".join(str(s.rank) for _, s in waiting[:MOST_NAMED])
        where += f", and rank{'s' if len(waiting) > 1 else ''} {ranks} waited in {_wait(waiting[0][1])}"
    return Finding(
        "hang-limit",
        f"it was ended since it hung: {told}; {where}",
        "look at why it was there; where the program is only slow, give it more time (--hang-limit)",
        node=node.rank,
        host=node.host,
        rank=stack.rank,
        evidence=_lines(absent, waiting),
        certainty=CERTAIN if waiting else LIKELY,
    )


def _apart(stacks: list[Placed]) -> tuple[list[Placed], list[Placed]]:
    """Those that are not where the others wait, and those that wait.

    In no collective while others are in one; else, since waiting for a GPU shows no collective, those whose place
    few others share. All in one place: all, and nobody waits for them.
    """
    absent = [p for p in stacks if not in_collective(p[1])]
    waiting = [p for p in stacks if in_collective(p[1])]
    if absent and waiting:
        return absent, waiting
    places = Counter(_place(stack) for _, stack in stacks)
    common, count = places.most_common(1)[0]
    if 2 * count > len(stacks) > count:
        return (
            [p for p in stacks if _place(p[1]) != common],
            [p for p in stacks if _place(p[1]) == common],
        )
    return stacks, []


def in_collective(stack: Stack) -> bool:
    """Whether a rank waits for others: in torch.distributed, or in a function named like a collective."""
    return any(
        "/torch/distributed/" in frame.file or COLLECTIVES.fullmatch(frame.name)
        for frame in stack.frames[:DEEP]
    )


def _own(frames: tuple[Frame, ...]) -> Frame:
    """The innermost frame of the user's own code, else the innermost."""
    packages = ("site-packages", "dist-packages", "/lib/python3", *LAUNCH)
    return next((f for f in frames if not any(part in f.file for part in packages)), frames[0])


def _place(stack: Stack) -> str:
    frame = _own(stack.frames)
    return f"{frame.name} ({_short(frame.file)}:{frame.line})"


def _wait(stack: Stack) -> str:
    found = next((f.name for f in stack.frames[:DEEP] if COLLECTIVES.fullmatch(f.name)), "")
    return found or _place(stack)


def _short(file: str) -> str:
    return "/".join(file.rsplit("/", 2)[-2:]) if "site-packages" in file else file.rpartition("/")[2]


def _who(node: Node, stack: Stack, nodes: int) -> str:
    rank = f"rank {stack.rank}" if stack.rank is not None else "a process"
    return f"{rank} on {node.host}" if nodes > 1 and node.host else rank


def _lines(absent: list[Placed], waiting: list[Placed]) -> tuple[str, ...]:
    _, stack = absent[0]
    own = [f for f in stack.frames if not any(part in f.file for part in LAUNCH)]
    lines = [f"{f.name} ({f.file}:{f.line})" for f in own[:EVIDENCE_LINES]]
    lines += [f"rank {s.rank}: {_place(s)}" for _, s in absent[1:3]]
    lines += [f"rank {s.rank}: {_wait(s)}, from {_place(s)}" for _, s in waiting[:3]]
    return tuple(lines)


RULES = (hang_limit,)
