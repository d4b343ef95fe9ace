"""Where and how images are prepared for a cluster profile. Made from the configuration by `tuneplane.runimage`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tuneplane.images.folder import ImageFolder
from tuneplane.images.progress import Progress


@dataclass(frozen=True)
class Builder:
    """How images are built here.

    form: what runtimes of the profile start, one of `folder.FORMS`. program: a name on PATH or a path.
    scratch: folder for what is unpacked meanwhile.
    """

    form: str
    program: str
    scratch: Path


@dataclass(frozen=True)
class Made:
    """An image that was prepared elsewhere: what its name was frozen to, and its file."""

    digest: str
    path: str
    sha256: str
    size_bytes: int
    modified_s: int


class Elsewhere(Protocol):
    """Prepares images where registries are reached and nobody is disturbed: by a job."""

    def __call__(self, image: str, progress: Progress, share: bool = False) -> Made:
        """Prepare it and wait. Raises OperationError."""


@dataclass(frozen=True)
class Place:
    """Where images are looked for and made.

    folders: in the order in which they are looked into; the first that may be written takes a new image.
    architecture: the nodes', in Go's words. insecure: registries that may be asked by plain HTTP.
    user: this user's name, for the mark of whoever builds.
    elsewhere: what prepares images in place of this process, where the site says so.
    """

    folders: tuple[ImageFolder, ...]
    builder: Builder
    architecture: str
    user: str
    insecure: Sequence[str] = ()
    elsewhere: Elsewhere | None = None


def default_scratch(site_scratch: str | None, environ: Mapping[str, str]) -> Path:
    """Where builds unpack: what the user told the runtime, what the site says, TMPDIR, /tmp."""
    told = environ.get("APPTAINER_TMPDIR") or environ.get("SINGULARITY_TMPDIR")
    return Path(told or site_scratch or environ.get("TMPDIR") or "/tmp")
