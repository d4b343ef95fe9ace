"""What a reader must know of a run to read its metrics. Made by `tuneplane.runs.sources`, read by `store`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Declared:
    """An output that the recipe or the experiment declares as metrics (C21).

    path: a glob below the output folder. kind: `tensorboard` (event files) or `jsonl`.
    step_key: of jsonl, the key that holds the step.
    """

    name: str
    path: str
    kind: str
    step_key: str = ""


@dataclass(frozen=True)
class RunSource:
    """A run as its metrics are read.

    token_sha256: what job.json says; a file whose header says otherwise is refused.
    attempts: number and start (unix seconds) of each, ascending: declared outputs name no attempt of their own.
    ended: nothing writes any more, so that what was read once stays true.
    metrics: canonical names, and for each the names that stand for it in the run's files, the first preferred.
    """

    folder: Path
    run_id: str
    token_sha256: str
    outputs: tuple[Declared, ...] = ()
    attempts: tuple[tuple[int, float], ...] = ()
    ended: bool = False
    metrics: tuple[tuple[str, tuple[str, ...]], ...] = ()
