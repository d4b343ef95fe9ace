"""Python tracebacks and torchrun's summary of failed ranks, as they stand in a piece of a log. Pure."""

from __future__ import annotations

import re

from tuneplane.diagnose.evidence import RankFailure, Trace

RANK_PREFIX = re.compile(r"^\[(?:rank|default|Rank )(\d+)\]:? ?")
"""What torch's excepthook (`[rank1]: `) and torchrun's --tee (`[default1]:`) put before a line of a rank."""

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

FIRST_LINE = "Traceback (most recent call last):"
ORIGINAL = f"Original {FIRST_LINE}"
"""Of a torch loader's worker, within the message of the exception that its parent raises."""
CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)

LINE_CUT = 400
MESSAGE_CUT = 1000
KEPT_FIRST, KEPT_LAST = 3, 12
"""Lines kept of a traceback: it begins with whose it is and ends with where it happened."""

MOST_LINES = 400
"""A traceback that does not end within so many lines of its rank is none."""

MOST_STRANGERS = 20
MESSAGE_LINES = 20

_KIND = re.compile(
    r"^((?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*|[a-z]\w*(?:error|exit|timeout|exception)))(?::\s?(.*))?$", re.DOTALL
)
"""An exception's line: its class, named as classes are (but for a few like socket.gaierror), and what it says."""


def rank_of(line: str) -> tuple[int | None, str]:
    """The rank that a line is prefixed with, and the line without it: torchrun's may stand before torch's own."""
    rank = None
    while found := RANK_PREFIX.match(line):
        rank, line = int(found[1]), line[found.end() :]
    return rank, line


def plain_line(line: bytes) -> str:
    """A line as text: without colours, and of a progress bar that rewrites itself the last state."""
    text = ANSI.sub("", line.decode("utf-8", "replace"))
    parts = [part for part in text.split("\r") if part.strip()]
    return cut(parts[-1] if parts else "")


def cut(text: str, most: int = LINE_CUT) -> str:
    """No more than `most` characters of a text, its begin and its end."""
    if len(text) <= most:
        return text
    return f"{text[: most * 2 // 3]} … {text[-most // 4 :]}"


def parse_traces(lines: list[tuple[int, str]]) -> list[Trace]:
    """Tracebacks in `(offset, line)`s, by offset. Lines of ranks may be mixed where each has its prefix."""
    streams: dict[int | None, list[tuple[int, str]]] = {}
    for offset, line in lines:
        rank, text = rank_of(line)
        streams.setdefault(rank, []).append((offset, text))
    found: list[Trace] = []
    for rank, stream in streams.items():
        index = 0
        while index < len(stream):
            if stream[index][1].strip() == FIRST_LINE:
                trace, index = _trace(stream, index, rank)
                found += [trace] if trace else []
            else:
                index += 1
    return sorted(found, key=lambda trace: trace.offset)


def _trace(stream: list[tuple[int, str]], start: int, rank: int | None) -> tuple[Trace | None, int]:
    """The traceback that begins at `start`, with all that it is chained to, and where its lines end."""
    kinds: list[str] = []
    kept: list[str] = []
    message = ""
    index = start
    while index < len(stream) and stream[index][1].strip() in (FIRST_LINE, ORIGINAL):
        end = _exception_line(stream, index)
        if end is None:
            break
        kept += [text for _, text in stream[index:end]]
        found = _KIND.match(stream[end][1].strip())
        assert found is not None
        kinds.append(found[1])
        after = end + 1
        while after < len(stream) and after - end < MESSAGE_LINES and not _ends_message(stream[after][1]):
            after += 1
        kept += [text for _, text in stream[end:after]]
        message = "\n".join([found[2] or "", *(text for _, text in stream[end + 1 : after])]).strip()
        index = after
        following = [text.strip() for _, text in stream[after : after + 4]]
        if following[:1] == [ORIGINAL]:
            continue
        chained = next((place for place, text in enumerate(following) if text in CHAINED), None)
        if chained is None or any(following[:chained]):
            break
        kept += following[: chained + 1]
        index = after + chained + 1
        while index < len(stream) and not stream[index][1].strip():
            index += 1
    if not kinds:
        return None, start + 1
    return Trace(
        kind=kinds[-1],
        message=cut(message, MESSAGE_CUT),
        offset=stream[start][0],
        rank=rank,
        before=tuple(kinds[:-1]),
        lines=tuple(cut(line) for line in _shortened(kept)),
    ), index


def _exception_line(stream: list[tuple[int, str]], start: int) -> int | None:
    """Where the exception of a traceback is named: the first line after its frames that is not indented further.

    A few lines of another process may stand between them.
    """
    indent = len(stream[start][1]) - len(stream[start][1].lstrip())
    strangers = 0
    for index in range(start + 1, min(len(stream), start + MOST_LINES)):
        text = stream[index][1]
        if not text.strip() or text[: indent + 1].isspace():
            continue
        if index > start + 1 and _KIND.match(text.strip()):
            return index
        strangers += 1
        if strangers > MOST_STRANGERS or text.strip() == FIRST_LINE:
            return None
    return None


def _ends_message(text: str) -> bool:
    """Whether a line after an exception's own is none of its message: blank, a logger's, torchrun's summary."""
    return not text.strip() or _OTHER.match(text) is not None


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= KEPT_FIRST + KEPT_LAST:
        return lines
    return [*lines[:KEPT_FIRST], "  …", *lines[-KEPT_LAST:]]


_OTHER = re.compile(
    r"^\s*(?:\[?\d{4}-\d\d-\d\d|[EWI]\d{4} |={4,}|-{4,}$|tuneplane: |srun: |slurmstepd: |(?:Original"
    r" )?Traceback |\[W|.*: line \d+: )"
)


_FIELD = re.compile(r"^\s+(time|host|rank|exitcode|error_file|traceback)\s*:\s*(.*)$")


def parse_failures(lines: list[str]) -> list[RankFailure]:
    """The ranks of torchrun's summary. Source: torch.distributed.elastic.multiprocessing.errors."""
    found: list[RankFailure] = []
    fields: dict[str, str] = {}
    root = within = False
    for line in [*lines, "=" * 20]:
        _, text = rank_of(line)
        if text.startswith("Failures:"):
            within, root = True, False
        elif text.startswith("Root Cause (first observed failure):"):
            _close(fields, root, found)
            within, root = True, True
        elif within and re.match(r"^\[\d+\]:", text):
            _close(fields, root, found)
        elif within and (field := _FIELD.match(text)):
            fields[field[1]] = field[2]
        elif text.startswith("====") and within and (fields or root):
            _close(fields, root, found)
            within = False
    return found


def _close(fields: dict[str, str], root: bool, found: list[RankFailure]) -> None:
    rank = re.match(r"\d+", fields.get("rank", ""))
    code = re.match(r"-?\d+", fields.get("exitcode", ""))
    if rank and code:
        error = fields.get("traceback", "")
        found.append(
            RankFailure(
                rank=int(rank[0]),
                exitcode=int(code[0]),
                host=fields.get("host", ""),
                time=fields.get("time", ""),
                root=root,
                error="" if error.startswith("To enable traceback") else cut(error),
            )
        )
    fields.clear()
