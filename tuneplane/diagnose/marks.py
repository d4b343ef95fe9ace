"""The lines of a log that rules may want to see: a name, words to look for, and what the line must be like.

`logs.py` looks for the words, which is quick, and only then at the line. What a mark means is a rule's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Pattern:
    """words: one of them stands in every such line. line: what else the line must be like; None: nothing."""

    name: str
    words: tuple[bytes, ...]
    line: re.Pattern[bytes] | None = None

    def fits(self, line: bytes) -> bool:
        """Whether a line that holds one of the words is such a line."""
        return self.line is None or self.line.search(line) is not None


def _pattern(name: str, *words: str, line: str = "") -> Pattern:
    return Pattern(name, tuple(w.encode() for w in words), re.compile(line.encode()) if line else None)


PATTERNS: tuple[Pattern, ...] = (
    # bash
    _pattern("bash", ": line ", line=r"^\S.*: line \d+: "),
    # Python
    _pattern("no-module", "No module named"),
    # memory
    _pattern("cuda-memory", "CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"),
    _pattern(
        "oom-kill", "oom_kill", "oom-kill", "OOM Killed", "exceeded memory limit", "out-of-memory handler"
    ),
    # storage
    _pattern("no-space", "No space left on device"),
    _pattern("quota", "Disk quota exceeded"),
    _pattern("read-only", "Read-only file system"),
    # ranks that talk to each other
    _pattern("nccl-timeout", "collective operation timeout", "Timeout(ms)=", line=r"collective|WorkNCCL"),
    _pattern("rendezvous", "RendezvousTimeoutError", "RendezvousConnectionError", "RendezvousClosedError"),
    # programs that die
    _pattern("segfault", "Segmentation fault", "SIGSEGV"),
    _pattern("illegal", "Illegal instruction", "SIGILL"),
    # network
    _pattern(
        "offline",
        *("Network is unreachable", "Temporary failure in name resolution", "Max retries exceeded"),
        *("Name or service not known", "couldn't connect to 'https://", "outgoing traffic has been disabled"),
    ),
    # the container runtime
    _pattern("runtime-fatal", "FATAL:", line=r"^(\S+ \| )?(\x1b\[[0-9;]*m)?FATAL: "),
    # checkpoints and weights
    _pattern(
        "saves",
        "aving ",
        "aved ",
        line=r"[Ss]av(?:ing|ed)\b.*[\s'\"=:(](?:\.{1,2}/|~?/)?[\w.@+-]+/[\w./@+-]*",
    ),
    _pattern(
        "loads",
        "oading ",
        "Fetching ",
        line=r"(?:[Dd]ownloading|[Ll]oading (?:checkpoint|weights|model|shards))|Fetching \d+",
    ),
    # what TunePlane itself says in a log
    _pattern("reporting-stopped", "tuneplane: reporting has stopped"),
    _pattern("points-dropped", "tuneplane: points are being dropped", "could not be written to"),
    # Slurm's programs
    _pattern("slurm-ended", " CANCELLED AT ", " FAILED (non-zero", line=r"^slurmstepd(?:-\S+)?: .*\*\*\* "),
)

EVERYWHERE = b"Traceback (most recent call last)"
"""What is looked for in the whole of a log that is too large for all patterns: it costs 0.3 s a gigabyte."""
