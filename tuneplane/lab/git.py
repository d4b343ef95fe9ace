"""The lab as git sees it: where its repository is, what is committed, what is not, and the blobs themselves.

The capsule reads labs through this, and `tp validate` its verdict. Nothing here writes, not even git's index.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tuneplane.kernel.digests import printable
from tuneplane.kernel.errors import Fault, OperationError

COMMIT_REMEDY = "git add -A && git commit"  # C26, to the letter
LISTED = 20  # files named in one message; the rest is a count

# GIT_DIR, GIT_INDEX_FILE, GIT_TRACE… of the user's shell would have us read another repository, or noise.
# These alone say where git and its configuration (safe.directory too) live, or how far it may look.
_KEPT_VARIABLES = frozenset(
    (
        "GIT_EXEC_PATH",
        "GIT_CONFIG_GLOBAL",
        "GIT_CONFIG_SYSTEM",
        "GIT_CONFIG_NOSYSTEM",
        "GIT_CEILING_DIRECTORIES",
        "GIT_DISCOVERY_ACROSS_FILESYSTEM",
    )
)
_SET_VARIABLES = {
    "LC_ALL": "C",  # git's words are searched below
    "GIT_OPTIONAL_LOCKS": "0",  # status then refreshes no index: reading a lab leaves it as it was
    "GIT_NO_REPLACE_OBJECTS": "1",  # a commit is its own content, not a local replacement of it
    "GIT_LITERAL_PATHSPECS": "1",
    "GIT_TERMINAL_PROMPT": "0",
}
_SETTINGS = (
    ("core.quotePath", "false"),
    ("core.fsmonitor", "false"),  # else status may start a daemon or a program of the repository's choice
    ("status.renames", "false"),
    ("color.ui", "false"),
)
_STREAM_BYTES = "1m"  # git holds smaller blobs in memory and streams larger ones; its own default is 512m
_REQUESTS = 32  # at 65 bytes an id they fit the smallest pipe (4 KiB), so neither side waits for the other
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class DirtyFile:
    """One file that differs from HEAD. `path` is relative to the lab."""

    path: str
    state: str  # modified, staged, deleted, untracked, unmerged or submodule

    def __str__(self) -> str:
        return f"{self.state:<9}  {printable(self.path)}"


@dataclass(frozen=True)
class LabState:
    """What git says of a lab. Without a repository all but `root` and the first two are empty."""

    root: Path  # the lab, resolved
    git_missing: bool = False
    refusal: str = ""  # git's own words, where it refuses to read what is there
    repository: Path | None = None
    commit: str | None = None  # None: no commit yet
    committed_s: int = 0  # the commit's date, seconds since 1970
    branch: str | None = None  # None: detached
    dirty: tuple[DirtyFile, ...] = ()

    @property
    def detached(self) -> bool:
        """Whether HEAD is a bare commit, on no branch."""
        return self.repository is not None and self.branch is None


@dataclass(frozen=True)
class TreeEntry:
    """One entry of the commit's tree, below the lab."""

    path: str
    mode: int  # git's: 0o100644, 0o100755, 0o120000 a link, 0o160000 a submodule
    oid: str
    size_bytes: int  # 0 for a submodule


class Blob:
    """One blob while git sends it; whoever reads takes `chunks` once."""

    def __init__(self, oid: str, size_bytes: int, stream: IO[bytes]) -> None:
        self.oid = oid
        self.size_bytes = size_bytes
        self._stream = stream
        self._left = size_bytes

    def chunks(self) -> Iterator[bytes]:
        """What has not been read of the content, at most 1 MiB at a time."""
        while self._left:
            chunk = self._stream.read(min(self._left, _CHUNK_BYTES))
            if not chunk:
                raise _failure("cat-file", f"the content of {self.oid} is cut short")
            self._left -= len(chunk)
            yield chunk


def read_state(lab_root: Path) -> LabState:
    """Ask git about the lab; what is wrong with the answer, `commit_faults` says.

    Raises OperationError where the folder cannot be entered or git breaks down half-way.
    """
    root = lab_root.resolve()
    if shutil.which("git") is None:
        return LabState(root, git_missing=True)
    try:
        place = run_git(root, "rev-parse", "--is-inside-work-tree", "--show-cdup")
    except OSError as error:
        raise OperationError(Fault(f"git cannot be run here ({error.strerror})", str(lab_root))) from error
    words = _words(place.stderr)
    if place.returncode:
        missing = "not a git repository" in words
        return LabState(root, refusal="" if missing else words)
    inside, _, climb = place.stdout.decode().partition("\n")
    if inside != "true":
        return LabState(root, refusal="the lab lies in a bare repository or inside .git")
    # `../` for each folder between: unlike --show-toplevel, no name stands in it that could break a line.
    repository = root
    for _ in range(climb.count("../")):
        repository = repository.parent
    status = run_git(
        root,
        *("status", "--porcelain=v2", "-z", "--branch", "--untracked-files=all", "--ignore-submodules=none"),
        *("--", "."),
    )
    if status.returncode:
        return LabState(root, refusal=_words(status.stderr))
    prefix = "" if repository == root else f"{root.relative_to(repository).as_posix()}/"
    commit, branch, dirty = parse_status(status.stdout, prefix)
    return LabState(
        root,
        repository=repository,
        commit=commit,
        committed_s=_read_commit_time(root, commit) if commit else 0,
        branch=branch,
        dirty=dirty,
    )


def commit_faults(state: LabState, allow_dirty: bool = False, keep_out: Sequence[str] = ()) -> list[Fault]:
    """Why this lab cannot be submitted as it is (C26); empty where it can.

    keep_out: paths of secrets that git does not track yet and that the remedy's `git add -A` would add.
    """
    where = str(state.root)
    if state.git_missing:
        return [Fault("git is not on the PATH", where, "install git, or load the site's module for it")]
    if state.refusal:
        return [
            Fault(f"git cannot read the lab: {state.refusal}", where, "what git says above is what to do")
        ]
    if state.repository is None:
        return [Fault("the lab is not a git repository", where, f"git init && {COMMIT_REMEDY}")]
    unmerged = [d.path for d in state.dirty if d.state == "unmerged"]
    if unmerged:
        return [
            Fault(
                f"a merge is not finished:{listing(printable(p) for p in unmerged)}",
                where,
                f"resolve the conflicts, then {COMMIT_REMEDY}",
            )
        ]
    if allow_dirty:
        return []
    remedy = f"{COMMIT_REMEDY} (or --allow-dirty to take them along as they are)"
    if keep_out:
        remedy += f"; first add to .gitignore what must stay secret:{listing(map(printable, keep_out))}"
    if state.commit is None:
        return [Fault(f"the lab has no commit yet{_files(state.dirty)}", where, remedy)]
    faults = []
    if state.detached:
        faults.append(
            Fault(
                f"HEAD is detached at {state.commit[:12]}, so no branch holds what would be submitted",
                where,
                "git switch -c NAME (or --allow-dirty to submit from it as it is)",
            )
        )
    if state.dirty:
        faults.append(Fault(f"the lab has uncommitted changes{_files(state.dirty)}", where, remedy))
    return faults


def read_tree(state: LabState) -> list[TreeEntry]:
    """The commit's files, links and submodules below the lab; empty without a commit."""
    if state.commit is None:
        return []
    # From a sub-folder ls-tree answers for that sub-folder alone, with paths relative to it.
    answer = run_git(state.root, "ls-tree", "-r", "-z", "-l", state.commit)
    if answer.returncode:
        raise _failure("ls-tree", _words(answer.stderr))
    entries = []
    for record in answer.stdout.split(b"\0")[:-1]:
        facts, _, path = record.partition(b"\t")
        mode, kind, oid, size = facts.decode("ascii").split()
        entries.append(TreeEntry(os.fsdecode(path), int(mode, 8), oid, int(size) if kind == "blob" else 0))
    return entries


def read_blobs(state: LabState, oids: Sequence[str]) -> Generator[Blob, None, None]:
    """The blobs of these ids in this order, as committed: no filter, line ending or attribute applies.

    Each must be read (or left) before the next is asked for; close the iterator to end git early.
    Raises OperationError where git lacks one or fails.
    """
    if not oids:
        return
    with tempfile.TemporaryFile() as errors:
        command = [*_git("-c", f"core.bigFileThreshold={_STREAM_BYTES}"), "cat-file", "--batch"]
        process = subprocess.Popen(
            command,
            cwd=state.root,
            env=clean_environment(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for start in range(0, len(oids), _REQUESTS):
                requests = oids[start : start + _REQUESTS]
                with suppress(BrokenPipeError):  # git has died: its answer below is short and says so
                    process.stdin.write("".join(f"{oid}\n" for oid in requests).encode("ascii"))
                    process.stdin.flush()
                for oid in requests:
                    fields = process.stdout.readline().split()
                    if len(fields) != 3 or fields[1] != b"blob":
                        errors.seek(0)
                        told = b" ".join(fields[1:]) or errors.read(4096)
                        raise _failure("cat-file", f"{oid}: {_words(told)}", "git fsck, git fetch")
                    blob = Blob(oid, int(fields[2]), process.stdout)
                    yield blob
                    for _ in blob.chunks():
                        pass
                    process.stdout.read(1)  # the line end after the content
        finally:
            process.kill()
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
            process.wait()


def run_git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run git in `folder`, free of the user's GIT_* variables, writing nothing. Raises OSError."""
    return subprocess.run(
        [*_git(), *arguments],
        cwd=folder,
        env=clean_environment(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment that git is run with: `environment` less all that points git elsewhere."""
    kept = {k: v for k, v in environment.items() if not k.startswith("GIT_") or k in _KEPT_VARIABLES}
    return {**kept, **_SET_VARIABLES}


def parse_status(output: bytes, prefix: str) -> tuple[str | None, str | None, tuple[DirtyFile, ...]]:
    """Commit, branch and dirty files of `git status --porcelain=v2 -z --branch` (git-status(1)).

    git's paths start at the repository's top; `prefix`, the lab's place in it, is taken off.
    """
    commit: str | None = None
    branch: str | None = None
    dirty: dict[tuple[str, bool], DirtyFile] = {}

    def add(raw_path: bytes, state: str) -> None:
        path = os.fsdecode(raw_path).removeprefix(prefix)
        dirty[path, state == "deleted"] = DirtyFile(path, state)

    records = iter(output.split(b"\0")[:-1])
    for record in records:
        kind = record[:1]
        if kind == b"#":
            _, name, value = record.split(b" ", 2)
            if name == b"branch.oid" and value != b"(initial)":
                commit = value.decode("ascii")
            elif name == b"branch.head" and value != b"(detached)":
                branch = os.fsdecode(value)
        elif kind == b"1":
            fields = record.split(b" ", 8)
            add(fields[8], _state(fields[1], fields[2]))
        elif kind == b"2":
            fields = record.split(b" ", 9)
            add(fields[9], _state(fields[1], fields[2]))
            origin = next(records)
            if fields[8].startswith(b"R"):
                add(origin, "deleted")
        elif kind == b"u":
            add(record.split(b" ", 10)[10], "unmerged")
        elif kind == b"?":
            add(record[2:], "untracked")
    return commit, branch, tuple(sorted(dirty.values(), key=lambda d: os.fsencode(d.path)))


def listing(lines: Iterable[str]) -> str:
    """Lines to hang below a sentence: `LISTED` of them, then how many more there are."""
    every = list(lines)
    shown = every[:LISTED]
    if len(every) > LISTED:
        shown.append(f"… and {len(every) - LISTED} more")
    return "".join(f"\n    {line}" for line in shown)


def _files(dirty: Sequence[DirtyFile]) -> str:
    return f":{listing(map(str, dirty))}" if dirty else ""


def _state(xy: bytes, submodule: bytes) -> str:
    if submodule.startswith(b"S"):
        return "submodule"
    if b"D" in xy:
        return "deleted"
    return "staged" if xy.endswith(b".") else "modified"


def _read_commit_time(root: Path, commit: str) -> int:
    # rev-list, for `git log` may be set up to call gpg and print what it says.
    answer = run_git(root, "rev-list", "--timestamp", "--max-count=1", commit)
    if answer.returncode:
        raise _failure("rev-list", _words(answer.stderr))
    return int(answer.stdout.split()[0])


def _git(*options: str) -> list[str]:
    settings = [argument for name, value in _SETTINGS for argument in ("-c", f"{name}={value}")]
    return ["git", *settings, *options]


def _words(output: bytes) -> str:
    return output.decode("utf-8", "replace").strip()


def _failure(command: str, told: str, remedy: str = "") -> OperationError:
    return OperationError(Fault(f"git {command} failed: {told}", remedy=remedy))
