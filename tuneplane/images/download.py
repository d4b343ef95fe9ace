"""Blobs of an image into an OCI layout on disk: resumed where they were left, checked byte by byte.

Pull calls `fetch_image`. A blob has its final name only once its sha256 is the one that the manifest says.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tuneplane.images.distribution import BLOCK_BYTES, Registry, unlike_digest
from tuneplane.images.manifest import Descriptor, Manifest
from tuneplane.images.progress import Progress
from tuneplane.images.transport import CannotAsk, Response
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.files import is_full, write_atomic

CONNECTIONS = 3
"""Blobs fetched at once: what Docker does; one connection alone is often kept slow on purpose."""

TRIES = 6
"""How often a blob is taken up again where a connection breaks, as long as each time brings bytes."""

PAUSE_S = 1.0


class _Stopped(Exception):
    """Another blob failed, or the user ended it."""


class Blobs:
    """The folder of an OCI image layout ("OCI Image Layout Specification"), partial blobs beside whole ones."""

    def __init__(self, layout: Path) -> None:
        self.layout = layout
        self.folder = layout / "blobs" / "sha256"

    def path(self, blob: Descriptor) -> Path:
        return self.folder / blob.hex

    def partial(self, blob: Descriptor) -> Path:
        return self.folder / f".{blob.hex}.part"

    def missing_bytes(self, manifest: Manifest) -> int:
        """What is still to be fetched."""
        return sum(blob.size_bytes - self.present_bytes(blob) for blob in manifest.blobs)

    def present_bytes(self, blob: Descriptor) -> int:
        for path in (self.path(blob), self.partial(blob)):
            try:
                return min(path.stat().st_size, blob.size_bytes)
            except OSError:
                continue
        return 0


def fetch_image(registry: Registry, manifest: Manifest, layout: Path, progress: Progress) -> None:
    """Make `layout` an OCI image layout that holds this one image. Raises OperationError.

    What an interrupted call has fetched is kept, so that the next one asks for the rest alone.
    """
    blobs = Blobs(layout)
    blobs.folder.mkdir(parents=True, exist_ok=True)
    whole = _Count(manifest, blobs, progress)
    stopped = threading.Event()

    def fetch(blob: Descriptor) -> None:
        try:
            _fetch_blob(registry, blob, blobs, whole.add, stopped)
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(CONNECTIONS, "image-layer") as pool:
        waiting = [pool.submit(fetch, blob) for blob in manifest.blobs]
        try:
            while not all(future.done() for future in waiting):
                whole.tell()
                time.sleep(0.1)
        except BaseException:
            stopped.set()
            raise
    errors = [error for future in waiting if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, _Stopped)):
        raise error
    whole.tell()
    write_layout(layout, manifest)


def write_layout(layout: Path, manifest: Manifest) -> None:
    """The files that make a folder of blobs an image layout."""
    own = manifest.descriptor
    entry = {"mediaType": own.media_type, "digest": own.digest, "size": own.size_bytes}
    write_atomic(Blobs(layout).path(own), manifest.raw, 0o644)
    write_atomic(layout / "index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}), 0o644)
    write_atomic(layout / "oci-layout", '{"imageLayoutVersion": "1.0.0"}', 0o644)


class _Count:
    """Bytes of all blobs together."""

    def __init__(self, manifest: Manifest, blobs: Blobs, progress: Progress) -> None:
        self._lock = threading.Lock()
        self._progress = progress
        self._total = manifest.size_bytes
        self._done = self._total - blobs.missing_bytes(manifest)

    def add(self, count_bytes: int) -> None:
        with self._lock:
            self._done += count_bytes

    def tell(self) -> None:
        self._progress("fetching layers", self._done, self._total)


def _fetch_blob(
    registry: Registry,
    blob: Descriptor,
    blobs: Blobs,
    count: Callable[[int], None],
    stopped: threading.Event,
) -> None:
    if _is_whole(blobs.path(blob), blob, stopped, count):
        return
    tries = TRIES
    while True:
        partial = blobs.partial(blob)
        digest, start = _digest_of(partial, blob, stopped, count)
        try:
            if blob.size_bytes == 0:
                partial.touch(0o600)
            if start < blob.size_bytes:
                # A registry that has no ranges, or a proxy that drops them, gives all from the start.
                start, digest = _append(registry, blob, partial, digest, start, count, stopped)
        except CannotAsk:
            tries -= 1
            gained = blobs.present_bytes(blob) > start
            if tries == 0 or not gained:
                raise
            _pause(stopped, registry.pause_s)
            continue
        if digest.hexdigest() != blob.hex:
            partial.unlink(missing_ok=True)
            raise unlike_digest(registry.reference, blob.digest, digest.hexdigest())
        partial.chmod(0o644)
        partial.replace(blobs.path(blob))
        return


def _append(
    registry: Registry,
    blob: Descriptor,
    partial: Path,
    digest: hashlib._Hash,
    start: int,
    count: Callable[[int], None],
    stopped: threading.Event,
) -> tuple[int, hashlib._Hash]:
    """Ask for the rest of a blob and write it behind what is there. Returns where it started, and the digest."""
    answer = registry.blob(blob.digest, start)
    if start and not _continues(answer, start):
        count(-start)
        start, digest = 0, hashlib.sha256()
        if answer.status != 200:
            answer.close()
            answer = registry.blob(blob.digest)
    with answer:
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.truncate(start)
                file.seek(start)
                size = start
                while block := answer.read(BLOCK_BYTES):
                    if stopped.is_set():
                        raise _Stopped
                    size += len(block)
                    if size > blob.size_bytes:
                        break  # more than it has is not its bytes: the digest of them says so
                    file.write(block)
                    digest.update(block)
                    count(len(block))
        except OSError as error:
            raise no_room(error, partial) from None
        if size > blob.size_bytes:
            digest.update(block)
        elif size < blob.size_bytes:
            what = f"{registry.reference.registry} cannot be asked: it ended the connection too early"
            raise CannotAsk(
                Fault(what, str(registry.reference), "try again: what was fetched is kept"), broke_off=True
            )
    return start, digest


def _continues(answer: Response, start: int) -> bool:
    said = answer.headers.get("Content-Range", "")
    return answer.status == 206 and said.startswith(f"bytes {start}-")


def _digest_of(
    path: Path, blob: Descriptor, stopped: threading.Event, count: Callable[[int], None]
) -> tuple[hashlib._Hash, int]:
    """The digest so far of a partial blob, and its size; of one that is too long, none of it."""
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(BLOCK_BYTES):
                if stopped.is_set():
                    raise _Stopped
                digest.update(block)
                size += len(block)
    except OSError:
        count(-min(size, blob.size_bytes))
        return hashlib.sha256(), 0
    if size > blob.size_bytes:
        path.unlink(missing_ok=True)
        count(-blob.size_bytes)
        return hashlib.sha256(), 0
    return digest, size


def _is_whole(path: Path, blob: Descriptor, stopped: threading.Event, count: Callable[[int], None]) -> bool:
    """Whether a blob that an earlier call finished is still what it was; else it is removed."""
    if not path.exists():
        return False
    digest, size = _digest_of(path, blob, stopped, count)
    if digest.hexdigest() == blob.hex:
        return True
    count(-size)
    path.unlink(missing_ok=True)
    return False


def _pause(stopped: threading.Event, seconds: float) -> None:
    if stopped.wait(seconds):
        raise _Stopped


def no_room(error: OSError, path: Path) -> OperationError:
    """A file that could not be written, with the remedy where the disk or a quota is full."""
    full = is_full(error)
    remedy = "free space or quota there; tp image gc shows what of TunePlane's images may go" if full else ""
    what = f"cannot be written: {error.strerror or error}"
    return OperationError(Fault(what, str(error.filename2 or error.filename or path), remedy))
