"""The capsule: the immutable job package of a lab's files and the kernel, and its digest for the JobSpec.

`tp submit` and `tp render` build one, `tp validate` and `--dry-run` check what it would be, `tp job verify`
derives its digest again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tuneplane.capsule.archive import Nowhere, write_archive, write_archive_file
from tuneplane.capsule.kernel import kernel_application, kernel_files, write_kernel_application
from tuneplane.capsule.tree import EARLIEST_MTIME_S, LabTree, Member, read_lab, tree_faults
from tuneplane.kernel.digests import Entry, printable, sha256_file, tree_digest
from tuneplane.kernel.errors import Fault, OperationError, raise_faults
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.unpack import KERNEL_FOLDER, verify_capsule
from tuneplane.lab.git import LabState, commit_faults, read_state

DEFAULT_LIMIT_BYTES = 512 << 20

__all__ = [
    "DEFAULT_LIMIT_BYTES",
    "CapsuleInfo",
    "build_capsule",
    "check_capsule",
    "kernel_application",
    "verify_run",
    "write_kernel_application",
]


@dataclass(frozen=True)
class CapsuleInfo:
    """What a capsule holds. Paths in `dirty` and `left_out` are made fit for a line of text."""

    digest: str  # `sha256:<hex>` of the canonical manifest: lab and kernel
    size_bytes: int  # of capsule.tar
    files: int  # the lab's own, links included
    commit: str | None  # None: no commit yet, all of it taken along by --allow-dirty
    dirty: list[str]  # files taken (or left away) as they stand on disk, not as committed
    left_out: list[str]  # files that C11 keeps out of every capsule
    paths: frozenset[str]  # the lab's own, as in the capsule


@dataclass(frozen=True)
class _Plan:
    state: LabState
    tree: LabTree
    members: list[Member]


def build_capsule(
    lab_root: Path, destination: Path, *, allow_dirty: bool = False, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> CapsuleInfo:
    """Write the lab's capsule to `destination` (0444), whole or not at all.

    Raises UsageError with every reason why this lab cannot be packed, OperationError where disk or git fails.
    """
    faults, plan = _plan(lab_root, allow_dirty, limit_bytes)
    raise_faults(faults)
    assert plan is not None
    return _info(plan, allow_dirty, *write_archive_file(plan.members, plan.state, destination))


def check_capsule(
    lab_root: Path, *, allow_dirty: bool = False, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> tuple[list[Fault], CapsuleInfo | None]:
    """What `build_capsule` would refuse or return, with nothing written. Raises OperationError as it does."""
    faults, plan = _plan(lab_root, allow_dirty, limit_bytes)
    if faults or plan is None:
        return faults, None
    return [], _info(plan, allow_dirty, *write_archive(plan.members, plan.state, Nowhere()))


def verify_run(run: RunFolder, capsule_digest: str, kernel_sha256: str) -> list[Fault]:
    """Derive both digests again from the run folder, and name what differs from what the JobSpec recorded."""
    faults: list[Fault] = []
    try:
        verify_capsule(run.capsule, capsule_digest)
    except OperationError as error:
        faults.extend(error.faults)
    try:
        found = sha256_file(run.kernel)
        if found != kernel_sha256:
            what = f"the kernel's sha256 is {found}, not {kernel_sha256} as recorded at submit"
            faults.append(Fault(what, str(run.kernel), "submit the experiment again"))
    except OSError as error:
        faults.append(Fault(f"the kernel cannot be read ({error.strerror})", str(run.kernel)))
    return faults


def _plan(lab_root: Path, allow_dirty: bool, limit_bytes: int) -> tuple[list[Fault], _Plan | None]:
    """Every fault, and what would be packed where the lab could be read at all."""
    state = read_state(lab_root)
    if state.repository is None:
        return commit_faults(state), None
    tree = read_lab(state, allow_dirty)
    # What never travels cannot make the capsule differ from the commit, so it counts as no change.
    counted = replace(state, dirty=tuple(tree.dirty))
    try:
        kernel = _kernel_members(state)
    except OSError as error:
        raise OperationError(
            Fault(f"the installed tuneplane cannot be read ({error.strerror})", str(error.filename))
        ) from error
    faults = [
        *commit_faults(counted, allow_dirty, keep_out=tree.secrets_untracked),
        *tree_faults(tree, state, limit_bytes),
    ]
    return faults, _Plan(state, tree, [*tree.members, *kernel])


def _kernel_members(state: LabState) -> list[Member]:
    mtime_s = max(state.committed_s, EARLIEST_MTIME_S)
    return [
        Member(
            f"{KERNEL_FOLDER}/{file.path}",
            "file",
            0o644,
            file.source.stat().st_size,
            mtime_s,
            source=file.source.resolve(),
        )
        for file in kernel_files()
    ]


def _info(plan: _Plan, allow_dirty: bool, entries: Sequence[Entry], size_bytes: int) -> CapsuleInfo:
    return CapsuleInfo(
        digest=tree_digest(entries),
        size_bytes=size_bytes,
        files=len(plan.tree.members),
        commit=plan.state.commit,
        dirty=[printable(change.path) for change in plan.tree.dirty] if allow_dirty else [],
        left_out=[printable(path) for path in plan.tree.left_out],
        paths=frozenset(member.path for member in plan.tree.members),
    )
