"""The capsule's archive: an uncompressed tar, written as a stream and hashed on the way.

The capsule writes one, or has one written to nowhere to learn its digest and size.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

from tuneplane.capsule.tree import Member
from tuneplane.kernel.digests import Entry, printable
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.files import room_or_right
from tuneplane.lab.git import LabState, read_blobs

_CHUNK_BYTES = 1 << 20


class Sink(Protocol):
    """What takes the archive's bytes: a file, or nothing."""

    def write(self, data: bytes, /) -> object: ...


class Nowhere:
    """A sink for those who only want to know what the archive would be."""

    def write(self, data: bytes, /) -> None:
        """Forget `data`."""


def write_archive(members: Sequence[Member], state: LabState, sink: Sink) -> tuple[list[Entry], int]:
    """Write every member to `sink`. Returns the manifest's entries and the archive's size in bytes.

    Holds one chunk of content at a time. Raises OperationError where git fails or a file changes meanwhile,
    and the OSError of the sink.
    """
    ordered = sorted(members, key=lambda m: os.fsencode(m.path))
    entries = []
    size_bytes = 0
    with closing(read_blobs(state, [m.oid for m in ordered if m.oid])) as blobs:
        for member in ordered:
            chunks: Iterable[bytes] = ()
            if member.oid:
                chunks = next(blobs).chunks()
            elif member.source is not None:
                chunks = _file_chunks(member.source, member.size_bytes)
            header = _header(member)
            sink.write(header)
            digest = hashlib.sha256(os.fsencode(member.target))
            for chunk in chunks:
                digest.update(chunk)
                sink.write(chunk)
            entries.append(
                Entry(member.path, member.kind, member.mode, member.size_bytes, digest.hexdigest())
            )
            content_bytes = member.size_bytes if member.kind == "file" else 0
            padding = b"\0" * (-content_bytes % tarfile.BLOCKSIZE)
            sink.write(padding)
            size_bytes += len(header) + content_bytes + len(padding)
    end = b"\0" * (2 * tarfile.BLOCKSIZE)
    end += b"\0" * (-(size_bytes + len(end)) % tarfile.RECORDSIZE)
    sink.write(end)
    return entries, size_bytes + len(end)


def write_archive_file(
    members: Sequence[Member], state: LabState, destination: Path
) -> tuple[list[Entry], int]:
    """`write_archive` to `destination`, mode 0444, whole or not at all. Raises OperationError."""
    temporary = destination.with_name(f".{destination.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "wb", buffering=_CHUNK_BYTES) as file:
                written = write_archive(members, state, file)
                file.flush()
                os.fchmod(descriptor, 0o444)
            temporary.replace(destination)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OperationError(
            Fault(
                f"the capsule cannot be written ({error.strerror})",
                str(destination),
                room_or_right(error),
            )
        ) from error
    return written


def _header(member: Member) -> bytes:
    """GNU headers: any name, of any bytes and length, and nothing that depends on who packs."""
    info = tarfile.TarInfo(_text(member.path))
    info.mode = member.mode
    info.mtime = member.mtime_s
    if member.kind == "link":
        info.type = tarfile.SYMTYPE
        info.linkname = _text(member.target)
    else:
        info.size = member.size_bytes
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _text(path: str) -> str:
    """The archive is UTF-8 under any locale, and bytes that are not UTF-8 pass through."""
    return os.fsencode(path).decode("utf-8", "surrogateescape")


def _file_chunks(source: Path, size_bytes: int) -> Iterator[bytes]:
    """A file's content, exactly as long as its header says."""
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise OperationError(
            Fault(f"the file cannot be read ({error.strerror})", printable(str(source)))
        ) from error
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        left = size_bytes
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES)) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
            if not chunk:
                raise _changed(source)
            left -= len(chunk)
            yield chunk
        if os.fstat(descriptor).st_size != size_bytes:
            raise _changed(source)


def _changed(source: Path) -> OperationError:
    return OperationError(
        Fault("the file changed while it was packed", printable(str(source)), "submit again")
    )
