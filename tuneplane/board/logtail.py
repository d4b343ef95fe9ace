"""The end of a run's log, as plain text: of each node's file its last part, however long the file is.

Called by `app`, away from the server's loop.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from tuneplane.kernel.runfolder import AttemptFolder, RunFolder
from tuneplane.runs.logs import Tail, known_secrets
from tuneplane.runs.records import read_hosts

TAIL_BYTES = 256 << 10
"""Of all nodes together; what a browser shows at once without pains."""

MAX_LINE = 4_000

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]|\x9b[0-?]*[ -/]*[@-~]"
)
"""Control sequences, then strings such as window titles, then shorter escapes. Source: ECMA-48."""

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Controls but the tab, and those that turn the direction of writing around."""


@dataclass(frozen=True)
class NodeLog:
    """One node's part. cut: what stands before it was left out."""

    rank: str
    host: str
    size_bytes: int
    cut: bool
    lines: list[str]


@dataclass(frozen=True)
class LogTail:
    """What a run printed last. attempt: None where nothing was started; then `nodes` has Slurm's own words."""

    attempt: int | None
    attempts: list[int]
    nodes: list[NodeLog] = field(default_factory=list)


def plain_line(line: str) -> str:
    """A line as a terminal would have left it: without escapes, of an overwritten one the last state."""
    text = _ESCAPES.sub("", line.rstrip("\r\n"))
    text = text.rpartition("\r")[2]
    text = _CONTROLS.sub("", text)
    return text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}…"


def read_tail(run: RunFolder, attempt: int | None = None, tail_bytes: int = TAIL_BYTES) -> LogTail:
    """The end of an attempt's log; None: of the last one. Raises OSError where the run cannot be read."""
    folders = run.attempts()
    numbers = [folder.number for folder in folders]
    chosen = next((f for f in folders if f.number == attempt), None) if attempt is not None else None
    if chosen is None and attempt is None and folders:
        chosen = folders[-1]
    masks = known_secrets(run)
    files = _files(run, chosen) if chosen is not None or attempt is None else []
    if not files and attempt is None:
        files = _files(run, None)
    each = max(16 << 10, tail_bytes // max(1, len(files)))
    nodes = [_read(path, rank, host, masks, each) for path, rank, host in files]
    return LogTail(chosen.number if chosen else None, numbers, [node for node in nodes if node is not None])


def read_stamp(run: RunFolder) -> str:
    """What changes whenever a log of the run does."""
    marks = []
    for folder in run.attempts()[-1:]:
        marks += [_mark(path) for path, _, _ in _files(run, folder)]
    marks += [_mark(path) for path, _, _ in _files(run, None)]
    return " ".join([str(len(run.attempts())), *marks])


def _files(run: RunFolder, attempt: AttemptFolder | None) -> list[tuple[Path, str, str]]:
    """Log files with rank and host: an attempt's nodes, or the newest of Slurm's own."""
    if attempt is None:
        paths = sorted(run.slurm.glob("*.out"), key=_changed_ns)[-1:]
        return [(path, "", "Slurm") for path in paths]
    hosts = read_hosts(attempt)
    ranks = sorted(
        (int(rank), path)
        for path in attempt.path.glob("node-*.log")
        if (rank := path.stem.partition("-")[2]).isdecimal()
    )
    return [(path, str(rank), hosts.get(str(rank), "")) for rank, path in ranks]


def _read(path: Path, rank: str, host: str, masks: tuple[str, ...], tail_bytes: int) -> NodeLog | None:
    try:
        status = path.stat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    offset = max(0, status.st_size - tail_bytes)
    lines = list(Tail(path, host, masks, offset, b"", status.st_ino).read_lines(final=True))
    if (
        offset
    ):  # of the first line only the end was read; a bar that is drawn over and over never ends its line
        lines = lines[1:] or [line for line in lines if "\r" in line.rstrip("\r")]
    return NodeLog(rank, host, status.st_size, offset > 0, [plain_line(line) for line in lines])


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _mark(path: Path) -> str:
    try:
        status: os.stat_result = path.stat()
    except OSError:
        return "-"
    return f"{path.name}:{status.st_size}:{status.st_mtime_ns}"
