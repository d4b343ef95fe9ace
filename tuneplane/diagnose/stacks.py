"""Stacks that Python's faulthandler wrote into a log, one for each rank. Pure; `logs.py` calls it."""

from __future__ import annotations

import re

from tuneplane.diagnose.evidence import Frame, Stack
from tuneplane.diagnose.traces import rank_of

DUMP = b"(most recent call first):"
"""Of every thread's head. Source: Python/traceback.c."""

MOST_FRAMES = 24
"""Frames kept of a stack, the innermost."""

_HEAD = re.compile(r"^(?P<current>Current thread|Thread|Stack) ?[^()]*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>\S+)')


def parse_stacks(lines: list[str]) -> tuple[Stack, ...]:
    """The last stack of each rank: of the thread that took the signal, which is the main one, else of its last.

    Lines of ranks may be mixed where each has its prefix.
    """
    current: dict[int | None, list[Frame]] = {}
    last: dict[int | None, list[Frame]] = {}
    open_: dict[int | None, list[Frame] | None] = {}
    for line in lines:
        rank, text = rank_of(line)
        head = _HEAD.match(text)
        if head:
            frames: list[Frame] = []
            last[rank] = open_[rank] = frames
            if head["current"] == "Current thread":
                current[rank] = frames
            continue
        found = _FRAME.match(text)
        stack = open_.get(rank)
        if stack is None:
            continue
        if found is None:
            open_[rank] = None
        elif len(stack) < MOST_FRAMES:
            stack.append(Frame(found["name"], found["file"], int(found["line"])))
    ranks = sorted(last, key=lambda rank: (rank is None, rank or 0))
    return tuple(Stack(rank, tuple(current.get(rank, last[rank]))) for rank in ranks if last[rank])
