"""What a registry says an image consists of: indexes, manifests, configurations, read and checked. Pure.

Sources: the OCI image specification ("Image Index", "Image Manifest", "Image Configuration") and Docker's
image manifest, version 2, schema 2, which has the same keys under other media types.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEXES, MANIFESTS = (OCI_INDEX, DOCKER_LIST), (OCI_MANIFEST, DOCKER_MANIFEST)
ACCEPTED = ", ".join((*INDEXES, *MANIFESTS))

CONFIGS = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")

LARGEST_MANIFEST_BYTES = 4 << 20
"""The OCI distribution specification, "Pushing Manifests": registries take 4 MiB at least; more is no manifest."""
LARGEST_CONFIG_BYTES = 8 << 20
MOST_LAYERS = 1000

ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "ppc64le": "ppc64le",
    "s390x": "s390x",
    "riscv64": "riscv64",
    "armv7l": "arm",
    "i686": "386",
}
"""uname's words for a machine → Go's, which images use (OCI image specification, "architecture")."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class Malformed(ValueError):
    """Bytes that are no image's manifest, with the reason."""


@dataclass(frozen=True)
class Descriptor:
    """A blob: what it is, `sha256:<hex>` of its bytes, how many there are."""

    media_type: str
    digest: str
    size_bytes: int

    @property
    def hex(self) -> str:
        return self.digest.removeprefix("sha256:")


@dataclass(frozen=True)
class Platform:
    """One image of an index. `architecture` in Go's words."""

    os: str
    architecture: str
    variant: str
    manifest: Descriptor

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


@dataclass(frozen=True)
class Index:
    """Images of one name for several platforms."""

    platforms: tuple[Platform, ...]


@dataclass(frozen=True)
class Manifest:
    """One image: its configuration and layers, and the very bytes whose digest it is known by."""

    descriptor: Descriptor
    config: Descriptor
    layers: tuple[Descriptor, ...]
    raw: bytes

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """Configuration and layers, each once, in order."""
        return tuple(dict.fromkeys((self.config, *self.layers)))

    @property
    def size_bytes(self) -> int:
        """What there is to fetch."""
        return sum(blob.size_bytes for blob in self.blobs)


def own_architecture() -> str:
    """This machine's architecture, in Go's words."""
    machine = os.uname().machine
    return ARCHITECTURES.get(machine, machine)


def parse(raw: bytes, content_type: str) -> Index | Manifest:
    """What `raw` is. Raises Malformed, also for what is no container image."""
    document = _document(raw, content_type)
    if document.get("schemaVersion") == 1 or "fsLayers" in document:
        raise Malformed(
            "it is of Docker's old schema 1, which has no digests: push it again with a newer tool"
        )
    if "manifests" in document and ("layers" in document or "config" in document):
        raise Malformed("it can be read as an index and as an image")  # CVE-2021-41190
    kind = document.get("mediaType")
    if kind is None:
        kind = content_type.partition(";")[0].strip()
        if kind not in (*INDEXES, *MANIFESTS):  # some registries say application/json of everything
            kind = OCI_INDEX if "manifests" in document else OCI_MANIFEST if "layers" in document else kind
    if kind in INDEXES:
        return Index(tuple(_platforms(document)))
    if kind not in MANIFESTS:
        raise Malformed(f"its kind is {kind or 'not said'}, which is no container image")
    return _manifest(document, kind, raw)


def choose(index: Index, architecture: str) -> Descriptor | None:
    """The image for Linux on `architecture`; without a variant, or the first, where there are several."""
    fitting = [p for p in index.platforms if p.os == "linux" and p.architecture == architecture]
    fitting.sort(key=lambda platform: platform.variant not in ("", "v8"))  # v8 is what every arm64 is
    return fitting[0].manifest if fitting else None


def config_architecture(raw: bytes) -> str:
    """The architecture that an image's configuration names. Raises Malformed."""
    document = _document(raw, "")
    found = document.get("architecture")
    if not isinstance(found, str) or not found:
        raise Malformed("its configuration names no architecture")
    return found


def _document(raw: bytes, content_type: str) -> Mapping[str, Any]:
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        kind = content_type.partition(";")[0].strip() or "bytes"
        raise Malformed(f"the answer is no manifest but {kind}: is a proxy or login page in between?")
    return document


def _platforms(document: Mapping[str, Any]) -> Sequence[Platform]:
    entries = document.get("manifests")
    if not isinstance(entries, list):
        raise Malformed("its index has no list of manifests")
    found = []
    for entry in entries:
        platform = entry.get("platform") if isinstance(entry, dict) else None
        if not isinstance(platform, dict) or platform.get("os") in (None, "unknown"):  # attestations and such
            continue
        words = [platform.get(key, "") for key in ("os", "architecture", "variant")]
        if all(isinstance(word, str) for word in words):
            found.append(Platform(words[0], words[1], words[2], _descriptor(entry, MANIFESTS[0])))
    return found


def _manifest(document: Mapping[str, Any], kind: str, raw: bytes) -> Manifest:
    from tuneplane.kernel.digests import sha256_bytes

    config = _descriptor(document.get("config"), "")
    if config.media_type not in CONFIGS:
        raise Malformed(f"it holds {config.media_type or 'something'}, which is no container image")
    layers = document.get("layers")
    if not isinstance(layers, list) or not layers or len(layers) > MOST_LAYERS:
        raise Malformed(f"it has no layers, or more than {MOST_LAYERS}")
    own = Descriptor(kind, f"sha256:{sha256_bytes(raw)}", len(raw))
    return Manifest(own, config, tuple(_descriptor(layer, "") for layer in layers), raw)


def _descriptor(value: Any, kind: str) -> Descriptor:
    if not isinstance(value, dict):
        raise Malformed("a part of it is not described")
    digest, size = value.get("digest"), value.get("size")
    media_type = value.get("mediaType", kind)
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise Malformed(f"a part of it has no sha256 digest ({digest!r:.100})")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size < 1 << 50:
        raise Malformed(f"a part of it has no size ({size!r:.100})")
    return Descriptor(media_type if isinstance(media_type, str) else "", digest, size)
