"""Preparing images as submit does it, in folders of a test's own: what to say, and what to look at afterwards."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registry_stub import fake_apptainer

from tuneplane.images.folder import ImageFolder, Prepared
from tuneplane.images.place import Builder, Place
from tuneplane.images.pull import Frozen, fetch, freeze
from tuneplane.images.reference import parse_reference


@dataclass
class ImageLab:
    """A user's folders, and a builder that does as it is told."""

    base: Path
    architecture: str = "amd64"
    shared: Path | None = None
    told: list[tuple[str, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.home = self.base / "home"
        self.programs = self.base / "programs"
        self.folder = self.base / "storage" / "images"
        self.cache = self.base / "cache"
        for path in (self.home, self.folder.parent):
            path.mkdir(parents=True, exist_ok=True)
        fake_apptainer(self.programs)

    @property
    def place(self) -> Place:
        shared = [ImageFolder(self.shared, is_shared=True)] if self.shared else []
        builder = Builder("sif", str(self.programs / "apptainer"), self.base / "scratch")
        return Place((*shared, ImageFolder(self.folder)), builder, self.architecture, "alice")

    @property
    def environ(self) -> dict[str, str]:
        return {"HOME": str(self.home), "PATH": "/usr/bin:/bin"}

    def freeze(self, image: str) -> Frozen:
        frozen = freeze(parse_reference(image), self.place, self.environ, self.cache)
        if frozen.registry is not None:
            frozen.registry.pause_s = 0.01
        return frozen

    def pull(self, image: str, **more: Any) -> Prepared:
        return fetch(self.freeze(image), self.place, self.progress, **more)

    def progress(self, what: str, done_bytes: int = 0, total_bytes: int = 0) -> None:
        self.told.append((what, done_bytes, total_bytes))

    def builds(self) -> list[dict[str, Any]]:
        """Each call of the builder."""
        calls = self.programs / "calls"
        return [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []

    def files(self) -> list[str]:
        """What lies in the folder of images."""
        return sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []
