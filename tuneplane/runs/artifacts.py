"""What a run left below its output folder, by the outputs that its recipe declares (C13)."""

from __future__ import annotations

import os
from dataclasses import dataclass
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


def list_artifacts(run: RunFolder, job: JobSpec) -> tuple[list[Artifact], list[str]]:
    """Artifacts, and what was skipped with the reason: nothing outside the output folder is followed."""
    root = Path(os.path.realpath(run.out))
    found: list[Artifact] = []
    skipped: list[str] = []
    for output in job.spec.outputs:
        for path in sorted(run.out.glob(output.path)):
            relative = str(path.relative_to(run.out))
            real = Path(os.path.realpath(path))
            if not real.is_relative_to(root):
                skipped.append(f"{output.name}: {relative} leads outside the output folder, to {real}")
                continue
            try:
                found.append(_artifact(output.name, relative, real))
            except OSError as error:
                skipped.append(f"{output.name}: {relative}: {error.strerror}")
    return found, skipped


def _artifact(name: str, relative: str, path: Path) -> Artifact:
    if not path.is_dir():
        status = path.stat()
        return Artifact(name, relative, "file", status.st_size, status.st_mtime)
    size, files, newest = 0, 0, path.stat().st_mtime
    for folder, _, names in os.walk(path):  # does not follow links
        for entry in names:
            status = (Path(folder) / entry).lstat()
            size, files, newest = size + status.st_size, files + 1, max(newest, status.st_mtime)
    return Artifact(name, relative, "folder", size, newest, files)
