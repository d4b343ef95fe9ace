"""What a run left below its output folder, by the outputs that its recipe declares (C13)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tuneplane.kernel.runfolder import RunFolder
from tuneplane.spec import JobSpec


@dataclass(frozen=True)
class Artifact:
    """One declared output that is there."""

    name: str  # checkpoints, logs, hf_export, …
    path: str  # relative to the output folder
    kind: str  # file | folder
    size_bytes: int
    modified_at: float
    files: int = 1


def output_folder(run: RunFolder, job: JobSpec) -> Path:
    """Where a run leaves what it makes: an operation in the output folder of the run that it works on."""
    return RunFolder(Path(job.spec.subject.folder)).out if job.spec.subject else run.out


def list_artifacts(run: RunFolder, job: JobSpec) -> tuple[list[Artifact], list[str]]:
    """Artifacts, and what was skipped with the reason: nothing outside the output folder is followed."""
    found: list[Artifact] = []
    skipped: list[str] = []
    out = output_folder(run, job)
    if out.is_symlink():
        return found, [f"the output folder is a link, to {out.readlink()}"]
    for output in job.spec.outputs:
        parts = output.path.split("/")
        if output.path.startswith("/") or ".." in parts:
            skipped.append(f"{output.name}: {output.path} is not below the output folder")
            continue
        for path in _matches(out, [part for part in parts if part not in ("", ".")], output.name, skipped):
            relative = str(path.relative_to(out))
            try:
                found.append(_artifact(output.name, relative, path, skipped))
            except OSError as error:
                skipped.append(f"{output.name}: {relative}: {error.strerror}")
    return found, skipped


def _matches(out: Path, parts: list[str], name: str, skipped: list[str]) -> list[Path]:
    """What a declared path matches, sorted. It is walked part by part, so that no link is passed unseen."""
    root = os.path.realpath(out)
    paths = [out]
    for part in parts:
        following: list[Path] = []
        for folder in paths:
            for path in _entries(folder, part, out, name, skipped):
                real = os.path.realpath(path)
                if os.path.commonpath([root, real]) == root:
                    following.append(path)
                else:
                    relative = path.relative_to(out)
                    skipped.append(f"{name}: {relative} leads outside the output folder, to {real}")
        paths = following
    return sorted(set(paths))


def _entries(folder: Path, pattern: str, out: Path, name: str, skipped: list[str]) -> list[Path]:
    """Entries of a folder that one part of a path names; `**`: the folder and all folders below it."""
    if pattern == "**":
        return [Path(path) for path, _, _ in os.walk(folder)]  # passes no link
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if fnmatchcase(entry.name, pattern)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        skipped.append(f"{name}: {folder.relative_to(out)}: {error.strerror}")
        return []


def _artifact(name: str, relative: str, path: Path, skipped: list[str]) -> Artifact:
    status = path.stat()
    if not path.is_dir():
        return Artifact(name, relative, "file", status.st_size, status.st_mtime)
    unread: list[str] = []
    size, files, newest = 0, 0, status.st_mtime
    for folder, _, names in os.walk(path.resolve(), onerror=lambda error: unread.append(str(error.strerror))):
        for entry in names:
            try:
                status = Path(folder, entry).lstat()  # of a link itself
            except FileNotFoundError:  # a trainer removes old checkpoints meanwhile
                continue
            size, files, newest = size + status.st_size, files + 1, max(newest, status.st_mtime)
    if unread:
        count = "1 folder" if len(unread) == 1 else f"{len(unread)} folders"
        skipped.append(f"{name}: {count} in {relative} cannot be read: {unread[0]}")
    return Artifact(name, relative, "folder", size, newest, files)
