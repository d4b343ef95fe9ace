"""Markdown pages as tests read them: code blocks with the comments before them, headings, links."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]

_FENCE = re.compile(r"^```(\S*)\s*$")
_COMMENT = re.compile(r"^<!--\s*(\w+):\s*(.+?)\s*-->$")
_HEADING = re.compile(r"^(#{1,6}) (.+?)\s*$")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
ANY = "…"
"""In what a page shows: any text; a line of it alone: any lines."""


@dataclass(frozen=True)
class Command:
    """A command of a `console` block and what the page shows of its output."""

    text: str
    shown: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """One fenced block. notes: the comments right before it, `<!-- exit: 2 -->`."""

    page: str
    line: int
    language: str
    text: str
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[Command]:
        """What a `console` block asks for; the whole text of a `bash` block as one command."""
        if self.language == "bash":
            return [Command(self.text, (ANY,))]
        found: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                assert found, f"{self.where}: output before the first command"
                found[-1][1].append(line)
        return [Command(text, tuple(shown)) for text, shown in found]


def pages() -> list[Path]:
    """Every page of the project's documentation."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def read_blocks(path: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    blocks: list[Block] = []
    notes: dict[str, str] = {}
    opened: tuple[int, str] | None = None
    inner: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is not None:
            if fence and not fence[1]:
                text = "\n".join(inner) + "\n"
                blocks.append(Block(path.relative_to(ROOT).as_posix(), *opened, text, notes))
                opened, notes, inner = None, {}, []
            else:
                inner.append(line)
        elif fence:
            opened = (number, fence[1])
        elif comment := _COMMENT.match(line):
            notes = {**notes, comment[1]: comment[2]}
        elif line.strip():
            notes = {}
    assert opened is None, f"{path}: a block is not closed"
    return blocks


def prose(path: Path) -> str:
    """A page without its fenced blocks."""
    kept, inside = [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            kept.append(line)
    return "\n".join(kept)


def headings(path: Path) -> list[tuple[int, str]]:
    """Depth and text of every heading."""
    found = [_HEADING.match(line) for line in prose(path).splitlines()]
    return [(len(match[1]), match[2]) for match in found if match]


def anchors(path: Path) -> set[str]:
    """What `#…` may follow a link to this page, as the usual forges make it from headings."""
    made: set[str] = set()
    for _, text in headings(path):
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = 1
        unique = slug
        while unique in made:
            unique, count = f"{slug}-{count}", count + 1
        made.add(unique)
    return made


def links(path: Path) -> list[str]:
    """Targets of the links in a page's prose."""
    return [match[1] for match in _LINK.finditer(prose(path))]


def agrees(shown: tuple[str, ...], printed: str) -> bool:
    """Whether a command printed what the page shows: `…` stands for any text or lines, columns are as wide as
    they happen to be.
    """
    pattern = ""
    for line in shown:
        if line.strip() == ANY:
            pattern += r"(?:[^\n]*\n)*"
        else:
            parts = (re.sub(r"(?:\\ )+", " +", re.escape(part)) for part in line.rstrip().split(ANY))
            pattern += r"[^\n]*".join(parts) + r"[ \t]*\n"
    return (
        re.fullmatch(pattern, printed if printed.endswith("\n") or not printed else printed + "\n")
        is not None
    )
