"""The capsule as an archive that nobody trusts: read it, check the whole of it, then unpack it read-only.

The node agent calls `unpack_capsule` and `remove_tree`, `tp job verify` calls `verify_capsule`, and the login
side asks `structure_faults` before it packs, so that what is sent is what a node accepts.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Callable

from tuneplane.kernel.digests import Entry, printable, sha256_bytes, tree_digest
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.files import is_full

KERNEL_FOLDER = ".tuneplane/kernel"  # in a capsule: what goes on sys.path to import its own tuneplane
FILE_MODES = (0o644, 0o755)
LINK_MODE = 0o777

_BLOCK_BYTES = tarfile.BLOCKSIZE
_CHUNK_BYTES = 1 << 20
_LONGEST_NAME_BYTES = 4096  # PATH_MAX on Linux: a longer name could not be opened
_LATEST_MTIME_S = 1 << 36  # far beyond any real date, small enough for every file system's call
_LINUX_LINK_LIMIT = 40  # path_resolution(7): one hop more and the kernel answers ELOOP
_REMEDY = "the capsule was damaged or changed after submit: submit the experiment again"


@dataclass(frozen=True)
class Member:
    """One file or link as it lies in the archive."""

    entry: Entry
    target: str  # of a link; empty for a file
    offset: int  # of a file's content in the archive, bytes
    mtime_s: int


class _Damaged(Exception):
    """The archive is not one that `tp` wrote; the text is one sentence."""


def read_manifest(capsule: Path) -> list[Entry]:
    """Every file and link of `capsule`, its content hashed.

    Raises OperationError where it cannot be read, or holds anything but files and links that stay inside.
    """
    with _opened(capsule) as file:
        return [member.entry for member in _read_members(file, capsule)]


def verify_capsule(capsule: Path, digest: str) -> list[Entry]:
    """`read_manifest`, and OperationError too where the digest derived from it is not `digest`."""
    with _opened(capsule) as file:
        return [member.entry for member in _verified_members(file, capsule, digest)]


def unpack_capsule(capsule: Path, destination: Path, digest: str) -> list[Entry]:
    """Unpack `capsule` into the new folder `destination`: files 0444 or 0555, folders 0555, the top one 0500.

    The whole archive and its digest are checked before the folder is made, each content again when written.
    Raises OperationError (damaged, wrong digest, `destination` exists, no space); nothing is then left.
    """
    with _opened(capsule) as file:
        members = _verified_members(file, capsule, digest)
        try:
            destination.mkdir(mode=0o700)
        except FileExistsError:
            raise OperationError(
                Fault("the folder to unpack the capsule into exists already", str(destination), "remove it")
            ) from None
        except OSError as error:
            raise _write_failure(destination, error) from error
        try:
            destination.chmod(0o700)
            _write_tree(file, members, destination)
        except BaseException as error:
            _discard(destination)
            if isinstance(error, _Damaged):
                raise OperationError(Fault(str(error), str(capsule), _REMEDY)) from None
            if isinstance(error, OSError):
                raise _write_failure(destination, error) from error
            raise
    return [member.entry for member in members]


def remove_tree(path: Path) -> None:
    """Remove `path` and all below it, read-only folders too, never what a link points at.

    Nothing there is no error. Raises OSError where something cannot be removed.
    """
    try:
        top = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(top.st_mode):
        path.unlink()
        return
    pending = [os.fspath(path)]
    folders = []
    while pending:  # a loop, no recursion: a tree may be deeper than Python's stack
        folder = pending.pop()
        folders.append(folder)
        descriptor = _open_writable_folder(folder)
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(os.path.join(folder, entry.name))  # noqa: PTH118
                    else:
                        os.unlink(entry.name, dir_fd=descriptor)
        finally:
            os.close(descriptor)
    for folder in reversed(folders):
        os.rmdir(folder)  # noqa: PTH106


def structure_faults(paths: Sequence[str], links: Mapping[str, str]) -> list[str]:
    """What is wrong with a tree of these member paths and link targets, one sentence each; none: it is sound.

    A path is relative and plain, stands once and has no member above it; a link leads nowhere outside, not
    through other links either. Links are followed by name alone; one that leads to nothing is sound.
    """
    found = []
    known = set(paths)
    seen = set()
    for path in paths:
        if path in seen:
            found.append(f"{printable(path)} stands in it twice")
            continue
        seen.add(path)
        parts = path.split("/")
        if path.startswith("/"):
            found.append(f"{printable(path)} is an absolute path")
        elif any(part in ("", ".", "..") for part in parts) or "\0" in path:
            found.append(f"{printable(path)} is not a plain relative path")
        elif len(os.fsencode(path)) >= _LONGEST_NAME_BYTES:
            found.append(f"{printable(path)} is longer than a path may be")
        above = next((up for n in range(1, len(parts)) if (up := "/".join(parts[:n])) in known), None)
        if above is not None:
            found.append(f"{printable(path)} lies below {printable(above)}, which is not a folder")
    for path in sorted(links):
        target = links[path]
        if not target or "\0" in target or len(os.fsencode(target)) >= _LONGEST_NAME_BYTES:
            found.append(f"{printable(path)} is a link whose target cannot be a path")
        elif _leads_out(path, links):
            found.append(f"{printable(path)} is a link that leads out: {printable(target)}")
    return found


def _leads_out(path: str, links: Mapping[str, str]) -> bool:
    """Whether following the link `path` by name would ever leave the tree's root."""
    here = path.split("/")[:-1]
    pending = [links[path]]
    hops = 0
    while pending:
        part = pending.pop()
        if part.startswith("/"):
            return True
        if "/" in part:
            pending.extend(reversed([p for p in part.split("/") if p]))
        elif part == "..":
            if not here:
                return True
            here.pop()
        elif part not in ("", "."):
            target = links.get("/".join([*here, part]))
            if target is None:
                here.append(part)
            else:
                hops += 1
                if hops > _LINUX_LINK_LIMIT:
                    return False  # a loop: it leads nowhere at all
                pending.append(target)
    return False


@contextmanager
def _opened(capsule: Path) -> Iterator[BinaryIO]:
    try:
        # O_NONBLOCK: a FIFO in its place is refused here, not waited for.
        descriptor = os.open(capsule, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise OperationError(Fault(f"the capsule cannot be read ({error.strerror})", str(capsule))) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OperationError(Fault("the capsule is not a file", str(capsule)))
    with os.fdopen(descriptor, "rb", buffering=_CHUNK_BYTES) as file:
        yield file


def _verified_members(file: BinaryIO, capsule: Path, digest: str) -> list[Member]:
    members = _read_members(file, capsule)
    found = tree_digest(member.entry for member in members)
    if found != digest:
        raise OperationError(
            Fault(
                f"the capsule's digest is {found}, not {digest} as recorded at submit", str(capsule), _REMEDY
            )
        )
    return members


def _read_members(file: BinaryIO, capsule: Path) -> list[Member]:
    """All members, each hashed and the whole structure checked."""
    try:
        members = list(_scan(file))
        links = {m.entry.path: m.target for m in members if m.entry.kind == "link"}
        found = structure_faults([m.entry.path for m in members], links)
        if found:
            raise _Damaged(f"the capsule is not safe to unpack: {found[0]}")
    except _Damaged as error:
        raise OperationError(Fault(str(error), str(capsule), _REMEDY)) from None
    except OSError as error:
        raise OperationError(Fault(f"the capsule cannot be read ({error.strerror})", str(capsule))) from error
    return members


def _scan(file: BinaryIO) -> Iterator[Member]:
    """The members in the archive's order, by hand.

    Only what the login side writes is accepted: plain files, links, GNU long names. tarfile's own iterator is
    not strict: a broken header is the end to it, and it obeys pax headers, which rename and resize members.
    """
    size_bytes = os.fstat(file.fileno()).st_size
    long_name: bytes | None = None
    long_target: bytes | None = None
    while True:
        header = _read_header(file)
        if header is None:
            break
        if not 0 <= header.size <= size_bytes - file.tell():
            raise _Damaged(
                f"the capsule is cut short: {printable(header.name)} is longer than what is left of it"
            )
        if header.type == tarfile.GNUTYPE_LONGNAME and long_name is None:
            long_name = _read_long(file, header)
            continue
        if header.type == tarfile.GNUTYPE_LONGLINK and long_target is None:
            long_target = _read_long(file, header)
            continue
        name = header.name.encode("utf-8", "surrogateescape") if long_name is None else long_name
        target = header.linkname.encode("utf-8", "surrogateescape") if long_target is None else long_target
        long_name = long_target = None
        yield _read_member(file, header, os.fsdecode(name), os.fsdecode(target))
    if long_name is not None or long_target is not None:
        raise _Damaged("the capsule ends after a long name")
    rest = file.read(tarfile.RECORDSIZE + 1)
    if len(rest) < _BLOCK_BYTES or len(rest) > tarfile.RECORDSIZE or rest.count(0) != len(rest):
        raise _Damaged("the capsule does not end as an archive ends")


def _read_header(file: BinaryIO) -> tarfile.TarInfo | None:
    """The next header, or None at the first of the blocks of zeros that end an archive."""
    block = file.read(_BLOCK_BYTES)
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.TarError as error:
        if len(block) == _BLOCK_BYTES and block.count(0) == _BLOCK_BYTES:
            return None
        raise _Damaged(f"the capsule is not a sound archive ({error})") from None
    if not 0 <= header.mtime <= _LATEST_MTIME_S:
        raise _Damaged(f"the capsule holds an impossible date at {printable(header.name)}")
    return header


def _read_long(file: BinaryIO, header: tarfile.TarInfo) -> bytes:
    """A GNU long name: NUL-terminated content of a member of its own."""
    if header.size > _LONGEST_NAME_BYTES + 1:
        raise _Damaged("the capsule holds a name longer than a path may be")
    content = file.read(header.size)
    _skip_padding(file, header.size)
    if not content.endswith(b"\0") or content.count(0) != 1:
        raise _Damaged("the capsule holds a malformed long name")
    return content[:-1]


def _read_member(file: BinaryIO, header: tarfile.TarInfo, path: str, target: str) -> Member:
    mtime_s = int(header.mtime)
    if header.type == tarfile.SYMTYPE:
        if header.size or header.mode != LINK_MODE:
            raise _Damaged(f"the capsule holds a malformed link: {printable(path)}")
        content = os.fsencode(target)
        entry = Entry(path, "link", LINK_MODE, len(content), sha256_bytes(content))
        return Member(entry, target, file.tell(), mtime_s)
    if header.type != tarfile.REGTYPE or target:
        raise _Damaged(f"the capsule holds what is neither file nor link: {printable(path)}")
    if header.mode not in FILE_MODES:
        raise _Damaged(f"the capsule holds a file of mode {header.mode:o}: {printable(path)}")
    offset = file.tell()
    sha256 = _hash(file, header.size, lambda _chunk: None)
    _skip_padding(file, header.size)
    return Member(Entry(path, "file", header.mode, header.size, sha256), "", offset, mtime_s)


def _hash(file: BinaryIO, size_bytes: int, take: Callable[[bytes], object]) -> str:
    """Hash the next `size_bytes`, passing each chunk to `take`."""
    digest = hashlib.sha256()
    left = size_bytes
    while left:
        chunk = file.read(min(left, _CHUNK_BYTES))
        if not chunk:
            raise _Damaged("the capsule is cut short")
        digest.update(chunk)
        take(chunk)
        left -= len(chunk)
    return digest.hexdigest()


def _skip_padding(file: BinaryIO, size_bytes: int) -> None:
    expected = -size_bytes % _BLOCK_BYTES
    padding = file.read(expected)
    if len(padding) != expected or padding.count(0) != expected:
        raise _Damaged("the capsule is cut short or holds data between its files")


def _write_tree(file: BinaryIO, members: Sequence[Member], destination: Path) -> None:
    """Fill the empty folder `destination`. Checked members: no path leaves it, none lies below a link."""
    root = os.fspath(destination)
    folders = [root]
    made = {""}
    for member in members:
        parts = member.entry.path.split("/")
        for n in range(1, len(parts)):
            parent = "/".join(parts[:n])
            if parent not in made:
                made.add(parent)
                folders.append(f"{root}/{parent}")
                os.mkdir(folders[-1], 0o700)  # noqa: PTH102
                os.chmod(folders[-1], 0o700)  # noqa: PTH101  # whatever the umask took away
        if member.entry.kind == "file":
            _write_file(file, member, f"{root}/{member.entry.path}")
    for member in members:
        if member.entry.kind == "link":
            os.symlink(member.target, f"{root}/{member.entry.path}")  # noqa: PTH211
    for folder in reversed(folders):
        os.chmod(folder, 0o500 if folder == root else 0o555)  # noqa: PTH101  # 0500: another user's code is not read


def _write_file(file: BinaryIO, member: Member, path: str) -> None:
    file.seek(member.offset)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb", buffering=0) as output:
        sha256 = _hash(file, member.entry.size_bytes, lambda chunk: _write_all(output.fileno(), chunk))
        if sha256 != member.entry.sha256:
            raise _Damaged(f"the capsule changed while it was unpacked: {printable(member.entry.path)}")
        os.fchmod(descriptor, 0o555 if member.entry.mode & 0o100 else 0o444)
        os.utime(descriptor, (member.mtime_s, member.mtime_s))


def _write_all(descriptor: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(descriptor, view) :]


def _write_failure(destination: Path, error: OSError) -> OperationError:
    remedy = ""
    if is_full(error):
        remedy = f"free space under {destination.parent}, or choose another folder for what a job unpacks"
    return OperationError(
        Fault(f"the capsule cannot be unpacked ({error.strerror})", str(destination), remedy)
    )


def _discard(destination: Path) -> None:
    with suppress(OSError):  # the failure that brought us here is the one to tell
        remove_tree(destination)


def _open_writable_folder(folder: str) -> int:
    """A descriptor of `folder` itself, never of a link in its place, its owner then allowed all in it."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        descriptor = os.open(folder, flags)
    except PermissionError:
        # Not even readable. O_PATH opens it all the same, and /proc names that very folder for chmod.
        handle = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.chmod(f"/proc/self/fd/{handle}", 0o700)  # noqa: PTH101
        finally:
            os.close(handle)
        return os.open(folder, flags)
    try:
        os.fchmod(descriptor, 0o700)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
