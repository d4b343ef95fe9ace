"""The model to evaluate, and its digest. A run's export must stay inside that run's output folder (C13)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tuneplane.kernel.digests import Entry, sha256_file, tree_digest
from tuneplane.kernel.errors import Fault, OperationError

EXPORT = "hf_export"
"""Where a run leaves its model, below its output folder (C13)."""

CONFIG = "config.json"
"""Without it no loader of Hugging Face takes a folder for a model."""


@dataclass(frozen=True)
class Digest:
    """sha256: `sha256:<hex>` of the sorted files' paths, sizes and contents."""

    sha256: str
    files: int
    size_bytes: int


def find_export(out: Path) -> Path:
    """The export below a run's output folder. Raises OperationError where there is none, or it leads outside."""
    export = out / EXPORT
    if not export.is_dir():
        raise OperationError(
            Fault(
                "there is no export to evaluate",
                str(export),
                "the run must leave a Hugging Face model there: tp export RUN, or its own training code",
            )
        )
    root = os.path.realpath(out)
    for path in (export, *_files(export)):
        real = os.path.realpath(path)
        if os.path.commonpath([root, real]) != root:
            what = f"it leads outside the output folder, to {real}"
            raise OperationError(Fault(what, str(path), "export the model's own files"))
    if not (export / CONFIG).is_file():
        raise OperationError(
            Fault(f"the export is no Hugging Face model: it has no {CONFIG}", str(export), "export it again")
        )
    return export


def digest_of(folder: Path) -> Digest:
    """The digest of a model's folder; it reads every byte. Raises OSError."""
    entries = []
    for path in _files(folder):
        size = path.stat().st_size
        entries.append(Entry(str(path.relative_to(folder)), "file", 0o644, size, sha256_file(path)))
    return Digest(tree_digest(entries), len(entries), sum(entry.size_bytes for entry in entries))


def _files(folder: Path) -> list[Path]:
    return [Path(place, name) for place, _, names in os.walk(folder) for name in sorted(names)]
