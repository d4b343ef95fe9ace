"""A run's log: each node's own file, told apart where there are several, secrets masked.

Called by `tp job logs` and `tp submit --follow`. Bounded memory: lines stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.node.environment import read_secrets
from tuneplane.runs.state import read_nodes

POLL_S = 0.3
BLOCK_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20
"""A longer line is shown in pieces: a progress bar that never ends its line must still be seen."""


@dataclass
class Tail:
    """One growing file, read from where it was left."""

    path: Path
    label: str
    offset: int = 0
    rest: bytes = b""

    def read_lines(self, *, final: bool = False) -> Iterator[str]:
        """Complete lines since the last call; with `final`, the unfinished last one too."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                while block := file.read(BLOCK_BYTES):
                    self.offset += len(block)
                    *lines, self.rest = (self.rest + block).split(b"\n")
                    for line in lines:
                        yield line.decode("utf-8", "replace")
                    if len(self.rest) > MAX_LINE_BYTES:
                        yield self.rest.decode("utf-8", "replace")
                        self.rest = b""
        except FileNotFoundError:
            pass
        if final and self.rest:
            yield self.rest.decode("utf-8", "replace")
            self.rest = b""


@dataclass
class RunLog:
    """The logs of one attempt's nodes, and the batch script's own words where no node has begun."""

    run: RunFolder
    attempt: int | None = None  # None: the last one
    node: int | str | None = None  # rank or host; None: all
    masks: tuple[str, ...] = ()
    tails: dict[str, Tail] = field(default_factory=dict)

    def current(self) -> AttemptFolder | None:
        attempts = self.run.attempts()
        if self.attempt is not None:
            return next((a for a in attempts if a.number == self.attempt), None)
        return attempts[-1] if attempts else None

    def read_lines(self, *, final: bool = False) -> Iterator[str]:
        """New lines of all nodes, `n1 | …` in front where there are several."""
        folder = self.current()
        if folder is None:
            return
        for tail in self._nodes(folder):
            for line in tail.read_lines(final=final):
                yield self._masked(f"{tail.label} | {line}" if len(self.tails) > 1 else line)

    def batch_lines(self) -> Iterator[str]:
        """What the batch script and Slurm themselves said."""
        for path in sorted(self.run.slurm.glob("*.out"), key=lambda p: p.stat().st_mtime)[-1:]:
            for line in Tail(path, "slurm").read_lines(final=True):
                yield self._masked(line)

    def _nodes(self, folder: AttemptFolder) -> list[Tail]:
        hosts = _hosts(folder)
        for path in folder.path.glob("node-*.log"):
            rank = path.stem.partition("-")[2]
            host = hosts.get(rank, rank)
            if self.node is not None and str(self.node) not in (rank, host):
                continue
            self.tails.setdefault(str(path), Tail(path, host)).label = host
        return sorted(self.tails.values(), key=lambda t: (len(t.path.name), t.path.name))

    def _masked(self, line: str) -> str:
        for secret in self.masks:
            line = line.replace(secret, "•••")
        return line


def follow(log: RunLog, is_final: Callable[[], bool], check_every_s: float = 2.0) -> Iterator[str]:
    """Lines as they come, until the run is final; what was written at its end is not missed."""
    checked, final = time.monotonic(), is_final()
    while True:
        yield from log.read_lines(final=final)
        if final:
            return
        time.sleep(POLL_S)
        if time.monotonic() - checked >= check_every_s:
            checked, final = time.monotonic(), is_final()


def known_secrets(run: RunFolder) -> tuple[str, ...]:
    """Values to mask in what is shown: those of the run's secrets file, longest first."""
    values = read_secrets(run.secrets).values()
    return tuple(sorted((v for v in values if len(v) >= 6), key=len, reverse=True))


def _hosts(folder: AttemptFolder) -> dict[str, str]:
    return {str(node.rank): node.host for node in read_nodes(folder)}
