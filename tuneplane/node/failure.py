"""Which rank of this node failed first: torchrun's error files, and the summary that it prints of the ranks.

The agent reads it once the command has ended, for the exit record. What it reads is the program's, and so hostile.
"""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any

from tuneplane.bridge.preflight import FILE as PREFLIGHT_FILE

TRACEBACK_BYTES = 8 << 10
MESSAGE_CHARACTERS = 1000
SENTENCE_CHARACTERS = 200
CUT = "\n  …\n"

LARGEST_FILE_BYTES = 4 << 20
"""An error file larger than this is not read: its text stands in the log."""

TAIL_BYTES = 256 << 10
"""What is read of the node's log: torchrun's summary stands at its end."""

MOST_RUNS = 16
"""Folders that torchrun made below the log folder: one a start."""

TERM, TERM_CODE = -signal.SIGTERM, 128 + signal.SIGTERM

FATAL = tuple(-n for n in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))
"""Signals that come from outside or from compiled code; SIGABRT may be NCCL's, which waited for another rank."""

VICTIM = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|ncclRemoteError|remote process exited|"
    r"connectFullMesh failed|Application timeout caused pair closure|Socket closed|recvValue failed|"
    r"failed to recv, got 0 bytes|The client socket has (?:timed out|failed)|RendezvousConnectionError|"
    r"closing signal SIGTERM|Process \d+ got signal: 15|Gloo connect\w* failed|"
    r"is being torn down due to an exception|another rank|communicator was aborted|NCCL communicator was aborted"
)
"""What an exception says that only tells of another rank's end. Words of gloo, NCCL and torch's stores."""

VICTIM_KINDS = ("ConnectionResetError", "BrokenPipeError", "KeyboardInterrupt", "SystemExit")
CLOSED = "EOFError"
"""Of a victim where it says nothing more (multiprocessing's pipes); else a file was cut off, which is its own."""

_BLOCK = re.compile(
    rb"^  time      : (\S{1,40})\n  host      : .*\n  rank      : (\d{1,7}) \(local_rank: (\d{1,6})\)\n"
    rb"  exitcode  : (-?\d{1,5}) \(pid: (\d{1,9})\)",
    re.MULTILINE,
)
"""One rank in torchrun's summary. Source: torch.distributed.elastic.multiprocessing.errors, 2.4 to 2.15."""

_FORCED = re.compile(rb"Unable to shutdown process (\d{1,9}) via \w+, forcefully exiting")
"""Of torchrun, where a rank did not end by TERM after another had failed."""


@dataclass(frozen=True)
class RankEnd:
    """How one rank failed. at: seconds since the epoch by this node's clock, None where nobody noted it.

    exitcode: None where torchrun told nothing of it; negative: the signal. victim: it only lost another rank,
    or was ended because of one.
    """

    rank: int
    local_rank: int
    host: str = ""
    at: float | None = None
    exception: str = ""
    message: str = ""
    traceback: str = ""
    exitcode: int | None = None
    victim: bool = False
    noticed: str = ""  # when, by torchrun's own clock: alike for all ranks of its summary

    def as_dict(self) -> dict[str, Any]:
        """For the exit record."""
        return {name: value for name, value in asdict(self).items() if name != "noticed"}

    def was_before(self, told_at: float | None) -> bool:
        """Whether this failed by itself, before its node was told to end at `told_at`; None: it never was.

        torchrun prints a summary only where it saw a rank fail before it was told to end itself.
        """
        if self.victim:
            return False
        return told_at is None or bool(self.noticed) or (self.at is not None and self.at < told_at)

    def sentence(self) -> str:
        """`rank 3 raised ValueError: batch of 3`, in one line that a terminal may show."""
        if self.exception:
            verb = "lost another rank:" if self.victim else "raised"
            told = f"{self.exception}: {self.message}" if self.message else self.exception
            return f"rank {self.rank} {verb} {one_line(told, SENTENCE_CHARACTERS)}"
        if self.exitcode is not None and self.exitcode < 0:
            return f"rank {self.rank} was ended by {signal_name(-self.exitcode)}"
        return f"rank {self.rank} ended with exit code {self.exitcode}"


def is_victim_of(kind: str, message: str) -> bool:
    """Whether an exception only tells that another rank is gone."""
    name = kind.rpartition(".")[2]
    lost = name in VICTIM_KINDS or (name == CLOSED and not message.strip())
    return lost or VICTIM.search(f"{kind}: {message}") is not None


def signal_name(number: int) -> str:
    """`SIGKILL`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_failure(ranks_dir: Path, log: Path, host: str, node_rank: int, ranks: int) -> RankEnd | None:
    """The rank of this node that failed first; None where none is known to have failed. Raises nothing.

    ranks_dir: torchrun's log folder. log: of the node. ranks: how many this node has.
    """
    summary = read_summary(log)
    found: dict[int, RankEnd] = {}
    for local in sorted({*range(ranks), *summary}):  # a user's own torchrun may have started more
        known = summary.get(local)
        base = known or RankEnd(node_rank * ranks + local, local)
        raised = _newest_error(ranks_dir, replace(base, host=host))
        if raised is not None:
            found[local] = raised
        elif known is not None:
            found[local] = replace(known, host=host)
    return first_of(list(found.values()))


def first_of(ends: list[RankEnd]) -> RankEnd | None:
    """The one that failed by itself, of several the first; a victim where there is no other. Pure."""
    return min(ends, key=_order, default=None)


def _order(end: RankEnd) -> tuple[bool, str, int, float]:
    """torchrun's clock has whole seconds: within one, what came from outside is before what it may have caused."""
    weak = 0 if end.exitcode in FATAL else 1 if end.exception else 2
    return end.victim, end.noticed, weak, end.at or 0.0


def read_summary(log: Path) -> dict[int, RankEnd]:
    """Local rank → how it ended, by the last summary that torchrun printed into a node's log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
    except OSError:
        return {}
    forced = {int(pid) for pid in _FORCED.findall(data)}
    found: dict[int, RankEnd] = {}
    for noticed, rank, local, code, pid in _BLOCK.findall(data):
        exitcode = int(code)
        ended = exitcode in (TERM, TERM_CODE) or int(pid) in forced
        found[int(local)] = RankEnd(
            int(rank), int(local), exitcode=exitcode, victim=ended, noticed=noticed.decode("ascii", "replace")
        )
    return found


def read_preflight(ranks_dir: Path, ranks: int) -> dict[str, Any]:
    """How the check before training went, as any rank of this node noted it; empty where there was none."""
    with suppress(OSError):
        for run in sorted(ranks_dir.iterdir())[:MOST_RUNS]:
            for local in range(ranks):
                text, _ = read_bounded(run / "attempt_0" / str(local) / PREFLIGHT_FILE)
                try:
                    value = json.loads(text) if text else None
                except (ValueError, RecursionError):
                    continue
                if isinstance(value, dict) and isinstance(value.get("told"), str):
                    told = one_line(_printable(value["told"]), MESSAGE_CHARACTERS)
                    node = value.get("node") if type(value.get("node")) is int else None
                    return {"ok": value.get("ok") is True, "told": told, "node": node}
    return {}


def _newest_error(ranks_dir: Path, base: RankEnd) -> RankEnd | None:
    """What a rank's own error file says; None where it has none that can be read."""
    found: list[RankEnd] = []
    with suppress(OSError):
        for run in sorted(ranks_dir.iterdir())[:MOST_RUNS]:
            end = _read_error(run / "attempt_0" / str(base.local_rank) / "error.json", base)
            found += [end] if end else []
    return max(found, key=lambda end: end.at or 0.0, default=None)


def _read_error(path: Path, base: RankEnd) -> RankEnd | None:
    """One error file in torch's form. Source: torch.distributed.elastic.multiprocessing.errors.error_handler."""
    text, at = read_bounded(path)
    try:
        value = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    told = value.get("message") if isinstance(value, dict) else None
    extra = told.get("extraInfo") if isinstance(told, dict) else None
    said = told.get("message") if isinstance(told, dict) else told
    if not isinstance(said, str) or not said:
        return None
    stack = extra.get("py_callstack") if isinstance(extra, dict) else ""
    kind, _, message = said.partition(": ")
    if not re.fullmatch(r"[A-Za-z_][\w.]{0,200}", kind):
        kind, message = "Exception", said
    return replace(
        base,
        at=at,
        exception=kind,
        message=_printable(message.strip())[:MESSAGE_CHARACTERS],
        traceback=shorten(_printable(stack)) if isinstance(stack, str) else "",
        victim=is_victim_of(kind, message),
    )


def read_bounded(path: Path, most: int = LARGEST_FILE_BYTES) -> tuple[str, float]:
    """A small regular file's text and the time of its last change; an empty text where it is none, or no such."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return "", 0.0
    try:
        status = os.fstat(descriptor)
        if not S_ISREG(status.st_mode) or status.st_size > most:
            return "", 0.0
        return os.read(descriptor, most).decode("utf-8", "replace"), status.st_mtime
    except OSError:
        return "", 0.0
    finally:
        os.close(descriptor)


def shorten(text: str, most: int = TRACEBACK_BYTES) -> str:
    """A traceback of at most `most` bytes in UTF-8: its begin says whose it is, its end what happened."""
    data = text.encode("utf-8", "replace")
    if len(data) <= most:
        return text
    head, tail = most // 8, most - most // 8 - len(CUT.encode())
    return data[:head].decode("utf-8", "ignore") + CUT + data[-tail:].decode("utf-8", "ignore")


def _printable(text: str) -> str:
    """Without what a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def one_line(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 2]} …"
