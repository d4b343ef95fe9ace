"""A run's log: each node's own file, told apart where there are several, secrets masked.

Called by `tp job logs` and `tp submit --follow`. Bounded memory: lines stream.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tuneplane.kernel import env
from tuneplane.kernel.errors import TunePlaneError
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.node.environment import read_secrets
from tuneplane.runs.records import read_hosts
from tuneplane.runs.token import known_token
from tuneplane.spec import read

POLL_S = 0.3
ASK_S = 10.0
"""How often a follower asks how the run is, which may ask Slurm. Our own end record is looked for at each poll."""

BLOCK_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20
"""A longer line is shown in pieces: a progress bar that never ends its line must still be seen."""

MASK = "•••"
SHORTEST_MASKED = 6
"""A shorter value would hide ordinary words."""


@dataclass
class Tail:
    """One growing file, read from where it was left; from its start where it was cut or put in place anew."""

    path: Path
    label: str
    masks: tuple[str, ...] = ()
    offset: int = 0
    rest: bytes = b""
    inode: int = 0

    def read_lines(self, *, final: bool = False) -> Iterator[str]:
        """Complete lines since the last call; with `final`, the unfinished last one too."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size < self.offset or self.inode not in (0, status.st_ino):
                    self.offset, self.rest = 0, b""
                self.inode = status.st_ino
                file.seek(self.offset)
                while block := file.read(BLOCK_BYTES):
                    self.offset += len(block)
                    *lines, self.rest = (self.rest + block).split(b"\n")
                    for line in lines:
                        yield self._shown(line)
                    if len(self.rest) > MAX_LINE_BYTES:
                        yield self._piece()
        except FileNotFoundError:  # what comes in its place is another file, whatever its inode
            self.offset, self.inode, self.rest = 0, 0, b""
        except OSError:  # the filesystem stalls: the next call looks again
            pass
        if final and self.rest:
            yield self._shown(self.rest)
            self.rest = b""

    def _piece(self) -> str:
        """Most of an unfinished line; what stays back could be the begin of a secret or of a character."""
        rest = self.rest
        for mask in self.masks:
            rest = rest.replace(os.fsencode(mask), MASK.encode())
        cut = len(rest) - max((len(os.fsencode(mask)) for mask in self.masks), default=0) - 1
        while cut > 1 and rest[cut] & 0xC0 == 0x80:  # within a character of UTF-8
            cut -= 1
        self.rest = rest[cut:]
        return self._shown(rest[:cut])

    def _shown(self, line: bytes) -> str:
        text = line.decode("utf-8", "replace")
        for mask in self.masks:
            text = text.replace(mask, MASK)
        return text


@dataclass
class RunLog:
    """The logs of one attempt's nodes, and the batch script's own words where no node has begun."""

    run: RunFolder
    attempt: int | None = None  # None: the last one, and whichever follows it
    node: int | str | None = None  # rank or host; None: all
    masks: tuple[str, ...] = ()
    tails: dict[str, Tail] = field(default_factory=dict)
    shown: AttemptFolder | None = None
    hosts: dict[str, str] = field(default_factory=dict)
    files: int = 0  # of the attempt's nodes, when the hosts were read

    def current(self) -> AttemptFolder | None:
        """The attempt whose log is shown."""
        attempts = self.run.attempts()
        if self.attempt is not None:
            return next((a for a in attempts if a.number == self.attempt), None)
        return attempts[-1] if attempts else None

    def is_over(self) -> bool:
        """Whether one attempt was asked for and has ended, however the run goes on."""
        folder = self.current() if self.attempt is not None else None
        return folder is not None and folder.end.exists()

    def read_lines(self, *, final: bool = False) -> Iterator[str]:
        """New lines of all nodes, `n1 | …` in front where there are several."""
        folder = self.current()
        if self.shown is not None and folder != self.shown:  # started anew: what is left of the former first
            yield from self._lines_of(self.shown, final=True)
            self.tails.clear()
            self.files = 0
        self.shown = folder
        if folder is not None:
            yield from self._lines_of(folder, final=final)

    def batch_lines(self) -> Iterator[str]:
        """What the batch script and Slurm themselves said."""
        for path in sorted(self.run.slurm.glob("*.out"), key=_changed_at)[-1:]:
            yield from Tail(path, "slurm", self.masks).read_lines(final=True)

    def _lines_of(self, folder: AttemptFolder, *, final: bool) -> Iterator[str]:
        paths = list(folder.path.glob("node-*"))
        if len(paths) != self.files:
            self.hosts, self.files = read_hosts(folder), len(paths)
        for path in paths:
            rank = path.stem.partition("-")[2]
            host = self.hosts.get(rank, rank)
            if path.suffix == ".log" and (self.node is None or str(self.node) in (rank, host)):
                self.tails.setdefault(str(path), Tail(path, host, self.masks)).label = host
        several = self.node is None and max(len(self.hosts), len(self.tails)) > 1
        for tail in sorted(self.tails.values(), key=lambda t: (len(t.path.name), t.path.name)):
            for line in tail.read_lines(final=final):
                yield f"{tail.label} | {line}" if several else line


def follow(log: RunLog, is_final: Callable[[], bool], check_every_s: float = ASK_S) -> Iterator[str]:
    """Lines as they come, until the run is final; what was written at its end is not missed.

    is_final may ask Slurm: it is called every `check_every_s`, and as soon as our own records tell of an end.
    """
    asked_at, final, told = time.monotonic(), log.is_over() or is_final(), _ends(log)
    while True:
        yield from log.read_lines(final=final)
        if final:
            return
        time.sleep(POLL_S)
        ends = _ends(log)
        if ends != told or time.monotonic() - asked_at >= check_every_s:
            told = ends
            asked_at, final = time.monotonic(), log.is_over() or is_final()


def known_secrets(run: RunFolder, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Values to mask in what is shown, longest first: those of the run's secrets file.

    That is gone once the run has ended for good: then the run's token by the user's key, and the site's secrets
    as this shell has them.
    """
    given = os.environ if environ is None else environ
    try:
        values = read_secrets(run.secrets)
    except TunePlaneError:
        values = {}
    try:
        spec = read(run.job).spec
    except (OSError, TunePlaneError):
        pass
    else:
        values = {**{name: given[name] for name in spec.node.secrets if name in given}, **values}
        if spec.reporting.enabled and env.TOKEN not in values:
            values[env.TOKEN] = known_token(run.run_id, spec.reporting.token_sha256) or ""
    parts = {part for value in values.values() for part in (value, *value.splitlines())}
    return tuple(
        sorted((p for p in parts if len(p) >= SHORTEST_MASKED and "\n" not in p), key=len, reverse=True)
    )


def _ends(log: RunLog) -> tuple[bool, int]:
    """What changes when our own records tell of an end, or of a new start."""
    try:
        attempts = log.run.attempts()
    except OSError:
        return False, 0
    return bool(attempts) and attempts[-1].end.exists(), len(attempts)


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
