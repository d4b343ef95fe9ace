"""Slurm's own ways to write a time and a memory size, as numbers.

Compose checks with them what a configuration says; placement and caps count with them.
"""

from __future__ import annotations

import re

TIME_FORMS = "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes[:seconds]"
MEMORY_FORMS = "a whole number and K, M, G or T (megabytes where no letter follows), like 1500G"

_UNLIMITED = frozenset({"unlimited", "infinite"})
_PLAIN_TIME = re.compile(r"([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?")
_DAYS_TIME = re.compile(r"([0-9]{1,9})-([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?")
_MEMORY = re.compile(r"([0-9]{1,12})([KMGT]?)", re.IGNORECASE)

_MIB_PER_UNIT = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}


def time_s(text: str) -> int | None:
    """Seconds of a time limit in one of sbatch(1)'s forms (`--time`); None where it is without limit.

    Zero means without limit, as for sbatch. Raises ValueError for any other text.
    """
    if text.lower() in _UNLIMITED:
        return None
    if match := _DAYS_TIME.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    elif match := _PLAIN_TIME.fullmatch(text):
        first, second, third = match.groups()
        days = 0
        if third is not None:
            hours, minutes, seconds = int(first), int(second), int(third)
        else:
            hours, minutes, seconds = 0, int(first), int(second or 0)
    else:
        raise ValueError(f"{text!r} is none of Slurm's forms of a time: {TIME_FORMS}")
    return (((days * 24 + hours) * 60) + minutes) * 60 + seconds or None


def memory_mib(text: str) -> int:
    """Megabytes (Slurm's, of 1024² bytes) of a size in sbatch(1)'s form (`--mem`). Raises ValueError."""
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size of memory: {MEMORY_FORMS}")
    return int(int(match[1]) * _MIB_PER_UNIT[match[2].upper()])
