"""What of a lab enters its capsule: the commit's files, or what stands on disk where that is allowed.

The capsule asks for the tree and for what is wrong with it. C11 and C26 are decided here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from tuneplane.kernel.digests import printable
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.unpack import LINK_MODE, structure_faults
from tuneplane.lab.git import DirtyFile, LabState, TreeEntry, listing, read_blobs, read_tree, run_git
from tuneplane.lab.marker import MARKER

RESERVED = ".tuneplane"  # where a capsule keeps the kernel

# A day after the zip format's first, for every time zone: what zips the work folder must not choke on it.
EARLIEST_MTIME_S = 315_619_200

_CACHES = frozenset(("__pycache__", ".ipynb_checkpoints", ".pytest_cache", ".mypy_cache", ".ruff_cache"))
_LFS_POINTER_BYTES = 1024  # a pointer file is smaller than this (the Git LFS specification)
_LFS_POINTER_STARTS = (
    b"version https://git-lfs.github.com/spec/",
    b"version https://hawser.github.com/spec/",
)
_GIT_LINK = 0o120000
_GIT_SUBMODULE = 0o160000
_LARGEST_NAMED = 10


@dataclass(frozen=True)
class Member:
    """One file or link that is to enter a capsule, and where its content is read."""

    path: str
    kind: str  # "file" or "link"
    mode: int
    size_bytes: int
    mtime_s: int
    oid: str = ""  # the git blob that holds a file's content,
    source: Path | None = None  # or the file on disk that does
    target: str = ""  # of a link


@dataclass
class LabTree:
    """The lab's members, and what was met beside them. Paths are relative to the lab."""

    members: list[Member] = field(default_factory=list)
    dirty: list[DirtyFile] = field(default_factory=list)  # what differs from the commit and could travel
    left_out: list[str] = field(
        default_factory=list
    )  # committed, or meant to go along, but never in a capsule
    secrets_untracked: list[str] = field(default_factory=list)
    submodules: list[str] = field(default_factory=list)
    special: list[str] = field(default_factory=list)  # neither file nor link
    lfs_pointers: list[str] = field(default_factory=list)


def is_secret(path: str) -> bool:
    """Whether C11 keeps this file out as a secret: `**/*.key`, `**/secrets.env`, folders too."""
    return any(part.endswith(".key") or part == "secrets.env" for part in path.rstrip("/").split("/"))


def is_cache(path: str) -> bool:
    """Whether this is git's own or some tool's cache, which no run needs and which no capsule holds (C11)."""
    parts = path.rstrip("/").split("/")
    return path.endswith(".pyc") or any(part in _CACHES or part == ".git" for part in parts)


def read_lab(state: LabState, allow_dirty: bool) -> LabTree:
    """The lab at HEAD; with `allow_dirty` each file that differs from HEAD as it stands on disk.

    Only what git calls different is read from disk: a clean lab gives the same tree either way, and neither a
    sparse checkout nor a line-ending filter shows. Raises OperationError where git or the disk fails.
    """
    tree = LabTree()
    members: dict[str, Member] = {}
    for entry in read_tree(state):
        if is_secret(entry.path) or is_cache(entry.path):
            tree.left_out.append(entry.path)
        elif entry.mode == _GIT_SUBMODULE:
            tree.submodules.append(entry.path)
        else:
            members[entry.path] = _committed(entry, max(state.committed_s, EARLIEST_MTIME_S))
    for change in state.dirty:
        if is_secret(change.path):
            if change.state == "untracked":
                tree.secrets_untracked.append(change.path)
        elif not is_cache(change.path):
            tree.dirty.append(change)
    if allow_dirty:
        tree.left_out.extend(tree.secrets_untracked)
        _apply_changes(tree, members, state)
    _read_small_contents(tree, members, state)
    tree.members = sorted(members.values(), key=lambda m: os.fsencode(m.path))
    return tree


def tree_faults(tree: LabTree, state: LabState, limit_bytes: int) -> list[Fault]:
    """Why this tree, of at most `limit_bytes` of content, cannot become a capsule; empty where it can."""
    faults = [*_name_faults(tree, state)]
    where = str(state.root)
    if tree.submodules:
        inner = listing(map(printable, tree.submodules))
        faults.append(
            Fault(
                f"submodules and repositories inside the lab do not travel:{inner}",
                where,
                "commit their files into the lab, or keep them outside and mount them (--mount SRC:DST)",
            )
        )
    if tree.special:
        faults.append(
            Fault(
                f"neither file nor link, so it cannot travel:{listing(map(printable, tree.special))}", where
            )
        )
    if tree.lfs_pointers:
        pointers = listing(map(printable, tree.lfs_pointers))
        faults.append(
            Fault(
                f"Git LFS keeps these files elsewhere, the commit holds only pointers to them:{pointers}",
                where,
                "put them on shared storage and mount them (--mount SRC:DST), or take them out of LFS",
            )
        )
    links = {m.path: m.target for m in tree.members if m.kind == "link"}
    found = structure_faults([m.path for m in tree.members], links)
    if found:
        faults.append(
            Fault(
                f"the lab holds what must not be unpacked:{listing(found)}",
                where,
                "in place of a link that leads out commit the file itself, or mount it (--mount SRC:DST)",
            )
        )
    total_bytes = sum(m.size_bytes for m in tree.members)
    if total_bytes > limit_bytes:
        largest = sorted(tree.members, key=lambda m: m.size_bytes, reverse=True)[:_LARGEST_NAMED]
        lines = listing(f"{_mebibytes(m.size_bytes):>12}  {printable(m.path)}" for m in largest)
        faults.append(
            Fault(
                f"the lab's files take {_mebibytes(total_bytes)}, a capsule holds {_mebibytes(limit_bytes)}; "
                f"the largest:{lines}",
                where,
                "put data and weights on shared storage and mount them (--mount SRC:DST)",
            )
        )
    return faults


def _name_faults(tree: LabTree, state: LabState) -> Iterator[Fault]:
    where = str(state.root)
    every = [*(m.path for m in tree.members), *tree.submodules, *tree.special]
    tops = {path.rstrip("/").split("/")[0] for path in every}
    if RESERVED in tops:
        yield Fault(
            f"{RESERVED} at the lab's top is where a capsule keeps the kernel",
            where,
            f"git rm -r --cached {RESERVED}",
        )
    shadows = sorted(name for name in tops if _importable_as_tuneplane(name, name in every))
    if shadows:
        names = ", ".join(map(printable, shadows))
        yield Fault(
            f"{names} at the lab's top would be imported in place of the installed tuneplane",
            where,
            "rename it, or move it out of the lab's top folder",
        )
    committed = state.commit is not None or not state.dirty
    if committed and MARKER not in every and all(d.path != MARKER for d in tree.dirty):
        yield Fault(
            f"{MARKER} is not in the commit",
            where,
            f"git check-ignore -v {MARKER} says which rule ignores it",
        )


def _importable_as_tuneplane(name: str, is_file: bool) -> bool:
    if name == "tuneplane":
        return (
            True  # a folder is, even an empty one; a plain file is not, but who could tell them apart later
        )
    return is_file and name.startswith("tuneplane.") and name.endswith((".py", ".so"))


def _committed(entry: TreeEntry, mtime_s: int) -> Member:
    if entry.mode == _GIT_LINK:
        return Member(entry.path, "link", LINK_MODE, entry.size_bytes, mtime_s, entry.oid)
    mode = 0o755 if entry.mode & 0o100 else 0o644
    return Member(entry.path, "file", mode, entry.size_bytes, mtime_s, entry.oid)


def _apply_changes(tree: LabTree, members: dict[str, Member], state: LabState) -> None:
    """Bring `members` from HEAD to what stands on disk."""
    # A file taken out of the index but kept on disk is both deleted and untracked: deletions first.
    for change in tree.dirty:
        if change.state == "deleted":
            members.pop(change.path, None)
    present = [change for change in tree.dirty if change.state != "deleted"]
    modes_count = bool(present) and _reads_modes(state)
    for change in present:
        if change.state == "submodule" or change.path.endswith("/"):
            if change.path not in tree.submodules:
                tree.submodules.append(change.path)
            continue
        before = members.get(change.path)
        after = _on_disk(state.root / change.path, change.path)
        if after is None:
            members.pop(change.path, None)
            tree.special.append(change.path)
            continue
        if not modes_count and after.kind == "file":
            after = replace(after, mode=before.mode if before and before.kind == "file" else 0o644)
        members[change.path] = after


def _reads_modes(state: LabState) -> bool:
    """Whether the execute bits on this disk mean anything to git."""
    return run_git(state.root, "config", "--bool", "--get", "core.fileMode").stdout.strip() != b"false"


def _on_disk(place: Path, path: str) -> Member | None:
    """The file or link as it stands on disk; None where it is neither."""
    try:
        found = place.lstat()
        mtime_s = max(int(found.st_mtime), EARLIEST_MTIME_S)
        if stat.S_ISLNK(found.st_mode):
            target = os.readlink(place)  # noqa: PTH115  # Path.readlink would normalise it
            return Member(path, "link", LINK_MODE, len(os.fsencode(target)), mtime_s, target=target)
    except OSError as error:
        raise OperationError(
            Fault(f"the file cannot be read ({error.strerror})", printable(str(place)), "submit again")
        ) from error
    if not stat.S_ISREG(found.st_mode):
        return None
    mode = 0o755 if found.st_mode & 0o100 else 0o644
    return Member(path, "file", mode, found.st_size, mtime_s, source=place)


def _read_small_contents(tree: LabTree, members: dict[str, Member], state: LabState) -> None:
    """Read what is small and decides: the targets of links, and which files are Git LFS pointers."""
    blobs = [m for m in members.values() if m.oid and (m.kind == "link" or m.size_bytes < _LFS_POINTER_BYTES)]
    with closing(read_blobs(state, [m.oid for m in blobs])) as contents:
        for member, blob in zip(blobs, contents, strict=True):
            content = b"".join(blob.chunks())
            if member.kind == "link":
                members[member.path] = replace(member, oid="", target=os.fsdecode(content))
            elif content.startswith(_LFS_POINTER_STARTS):
                tree.lfs_pointers.append(member.path)
    for member in members.values():
        if member.source is not None and member.size_bytes < _LFS_POINTER_BYTES:
            try:
                content = member.source.read_bytes()
            except OSError as error:
                raise OperationError(
                    Fault(f"the file cannot be read ({error.strerror})", printable(str(member.source)))
                ) from error
            if content.startswith(_LFS_POINTER_STARTS):
                tree.lfs_pointers.append(member.path)


def _mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.1f} MiB"
