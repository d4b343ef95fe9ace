"""Which checkpoints of a transformers trainer are complete, by the names of the files in them. Pure.

A trainer that was killed while it saved leaves a folder that looks like the others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

CHECKPOINT = re.compile(r"checkpoint-([0-9]+)", re.ASCII)

STATE = "trainer_state.json"
"""Written by rank 0 after all else of it; the bridge has it written in one piece (hook `saves`)."""

UNFINISHED = "checkpoint-is-incomplete.txt"
"""transformers' own sign, of a checkpoint that a signal made it write (trainer_jit_checkpoint.py)."""

TO_RESUME = (STATE, "optimizer.pt", "scheduler.pt")
"""Without the latter two transformers goes on from new ones, and says nothing."""

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")

_RANK = re.compile(r"rng_state_([0-9]+)\.pth", re.ASCII)


def last_complete(checkpoints: Mapping[str, Collection[str]], ranks: int) -> str | None:
    """The name of the last complete checkpoint; None where there is none.

    checkpoints: folder name → names of the files in it. ranks: of the training that is to go on. One in which
    all of them saved their random state goes before a later one in which some did not.
    """
    complete = [name for name, files in checkpoints.items() if is_complete(name, files)]
    exact = [name for name in complete if _ranks_saved(checkpoints[name], ranks)]
    return max(exact or complete, key=step_of, default=None)


def is_complete(name: str, files: Collection[str]) -> bool:
    """Whether rank 0 had written all of it."""
    if not CHECKPOINT.fullmatch(name) or UNFINISHED in files:
        return False
    return all(f in files for f in TO_RESUME) and any(f in files for f in WEIGHTS)


def step_of(name: str) -> int:
    """The optimiser step after which a checkpoint was written; -1 where it is none."""
    found = CHECKPOINT.fullmatch(name)
    return int(found[1]) if found else -1


def _ranks_saved(files: Collection[str], ranks: int) -> bool:
    if ranks == 1:
        return "rng_state.pth" in files
    saved = {int(found[1]) for found in map(_RANK.fullmatch, files) if found}
    return saved >= set(range(ranks))
