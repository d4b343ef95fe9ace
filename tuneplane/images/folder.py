"""The folder of prepared images: which files are in it, what each was made from, who used it last.

Pull publishes into it, submit looks images up in it, `tp image ls|rm|gc` list and clear it. Flat, so that a
folder which several users may write (mode 1777) needs no folders of anybody's in it:

    sha256-<hex>.sif            the image, 0444, named by the digest of its manifest
    sha256-<hex>.sif.json       what it was made from (`Record`)
    .sha256-<hex>.sif.used.<uid>    touched by each use of that user
    .sha256-<hex>.sif.turn.<n>/     whose turn it is to build it (`turn`)
    .sha256-<hex>.sif.work.<uid>/   layers fetched so far
"""

from __future__ import annotations

import errno
import math
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tuneplane.images.notes import read_note
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.files import write_json

SIF, SQSH = "sif", "sqsh"
FORMS = (SIF, SQSH)
"""What runtimes start: Apptainer a `.sif`, enroot and pyxis a squashfs."""

_FILE = rf"sha256-[0-9a-f]{{64}}\.(?:{'|'.join(FORMS)})"
_NAME = re.compile(_FILE)
_HIDDEN = re.compile(rf"\.({_FILE})\.(used|turn|work)\.([0-9a-f]+)")


@dataclass(frozen=True)
class Record:
    """What an image's file was made from.

    manifest: digest of the one image that is in the file. index: that of the index it was chosen from, or "".
    tags: names under which it was asked for when it was made. modified_s: of the file, to see that it is the
    one that was hashed.
    """

    manifest: str
    index: str
    repository: str  # registry/repository
    tags: list[str]
    architecture: str
    form: str
    sha256: str
    size_bytes: int
    modified_s: int
    made_at: float
    made_by: str
    made_with: str


@dataclass(frozen=True)
class Prepared:
    """An image's file and its record. `owner`: user id. `used_at`: its last known use, seconds since the epoch."""

    path: Path
    record: Record
    owner: int
    used_at: float


@dataclass(frozen=True)
class Leftover:
    """Something of an interrupted preparation: layers fetched so far, or a dead turn."""

    path: Path
    kind: str  # work | turn | used
    of: str  # the image's file name
    owner: int
    touched_at: float


def file_name(manifest_digest: str, form: str) -> str:
    """The name of an image's file."""
    return f"{manifest_digest.replace(':', '-')}.{form}"


@dataclass(frozen=True)
class ImageFolder:
    """One folder of images. `is_shared`: the site's own, from which everybody may take."""

    path: Path
    is_shared: bool = field(default=False)

    def file(self, manifest_digest: str, form: str) -> Path:
        return self.path / file_name(manifest_digest, form)

    def work(self, name: str) -> Path:
        """Where this user's layers for an image are fetched to."""
        return self.path / f".{name}.work.{os.getuid()}"

    def make_work(self, name: str) -> Path:
        """Make that folder, 0700. Raises OSError; PermissionError where a stranger made it."""
        path = self.work(name)
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            # Its owner could exchange layers after they were checked.
            raise PermissionError(errno.EPERM, "it is not this user's alone", str(path))
        return path

    def find(self, manifest_digest: str, form: str) -> Prepared | None:
        """The image made from this manifest, whole and as recorded; None where it is not there."""
        return self._read(self.file(manifest_digest, form))

    def find_index(self, index_digest: str, architecture: str, form: str) -> Prepared | None:
        """The image that was chosen from this index for an architecture."""
        for image in self.images():
            record = image.record
            if (record.index, record.architecture, record.form) == (index_digest, architecture, form):
                return image
        return None

    def find_tag(self, name: str, architecture: str, form: str) -> Prepared | None:
        """The latest image that was made when `registry/repository:tag` was asked for."""
        fitting = [
            image
            for image in self.images()
            if name in image.record.tags
            and (image.record.architecture, image.record.form) == (architecture, form)
        ]
        return max(fitting, key=lambda image: image.record.made_at, default=None)

    def images(self) -> Iterator[Prepared]:
        """Every image that is whole, in no order."""
        for name in self._names():
            if _NAME.fullmatch(name):
                image = self._read(self.path / name)
                if image is not None:
                    yield image

    def leftovers(self) -> Iterator[Leftover]:
        """What lies beside the images, whoever it belongs to."""
        for name in self._names():
            found = _HIDDEN.fullmatch(name)
            if found is None:
                continue
            with suppress(OSError):
                status = (self.path / name).lstat()
                yield Leftover(
                    self.path / name, found[2], found[1], status.st_uid, _touched(self.path / name)
                )

    def is_writable(self) -> bool:
        """Whether this user can put an image here, or make the folder. Makes nothing.

        A folder of a stranger's is not: its owner could exchange what lies in it. The site's own is vouched for.
        """
        place = self.path
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            owner = place.stat().st_uid
        except OSError:
            return False
        return (self.is_shared or owner in (os.geteuid(), 0)) and os.access(
            place, os.W_OK | os.X_OK, effective_ids=True
        )

    def is_taken(self, manifest_digest: str, form: str) -> bool:
        """Whether a stranger has something under the names of this image that is no image (`find`).

        In a shared folder nobody can take it away but its owner: one that was cut short, or touched afterwards.
        """
        file = self.file(manifest_digest, form)
        if not self.is_shared or os.geteuid() == 0 or self._read(file) is not None:
            return False
        for path in (file, self._record(file), self.work(file.name)):
            with suppress(OSError):
                if path.lstat().st_uid != os.geteuid():
                    return True
        return False

    def make(self) -> None:
        """Make the folder where it is missing. Raises OperationError."""
        try:
            self.path.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            what = f"the folder for images cannot be made: {error.strerror}"
            raise OperationError(
                Fault(what, str(self.path), "set storage_root of the cluster profile")
            ) from None

    def publish(self, built: Path, record: Record) -> Prepared | None:
        """Give a finished image its name. Another's of the same name, come first, is kept. Raises OSError."""
        target = self.file(record.manifest, record.form)
        earlier = self._read(target)
        if earlier is not None:  # runs may know it by its sha256 already
            built.unlink()
            return earlier
        with built.open("rb") as file:
            os.fsync(file.fileno())
        built.chmod(0o444)
        with suppress(OSError):
            target.unlink()  # cut short, or without a record of its own
        try:
            write_json(self._record(target), asdict(record), 0o644)
            built.rename(target)
        except PermissionError:  # in a folder with the sticky bit, where another user was as quick
            if self._read(target) is None:
                raise
            built.unlink(missing_ok=True)
        self.note_use(target)
        return self._read(target)

    def uses(self, image: Prepared) -> dict[int, float]:
        """User id → when that user last took an image, seconds since the epoch."""
        return {
            left.owner: left.touched_at
            for left in self.leftovers()
            if left.kind == "used" and left.of == image.path.name
        }

    def note_use(self, file: Path) -> None:
        """Remember that this user takes an image, so that nobody's `gc` takes it away."""
        mark = file.parent / f".{file.name}.used.{os.getuid()}"
        with suppress(OSError):
            # Whoever may write to a shared folder could have put a link there.
            descriptor = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            try:
                os.utime(descriptor)
            finally:
                os.close(descriptor)

    def remove(self, image: Prepared) -> None:
        """Take an image away: its file, its record, this user's marks. Raises OSError."""
        image.path.unlink()
        with suppress(OSError):
            self._record(image.path).unlink()
        for left in list(self.leftovers()):
            if left.of == image.path.name and left.kind == "used":
                with suppress(OSError):
                    left.path.unlink()

    def _record(self, file: Path) -> Path:
        return file.with_name(f"{file.name}.json")

    def _names(self) -> Sequence[str]:
        try:
            return os.listdir(self.path)
        except OSError:
            return []

    def _read(self, file: Path) -> Prepared | None:
        try:
            status = file.lstat()
            record = _record_of(read_note(self._record(file)))
        except (OSError, ValueError, KeyError):
            return None
        whole = (
            stat.S_ISREG(status.st_mode)
            and (record.size_bytes, record.modified_s) == (status.st_size, int(status.st_mtime))
            and file_name(record.manifest, record.form) == file.name
        )
        if not whole:
            return None
        return Prepared(file, record, status.st_uid, max(record.made_at, self._used_at(file)))

    def _used_at(self, file: Path) -> float:
        prefix = f".{file.name}.used."
        return max((_touched(self.path / n) for n in self._names() if n.startswith(prefix)), default=0.0)


def _record_of(value: dict[str, Any]) -> Record:
    """Checked field by field: another user may have written it. Raises KeyError, ValueError."""

    def text(name: str) -> str:
        found = value[name]
        if not isinstance(found, str):
            raise ValueError(name)
        return found

    def number(name: str) -> float:
        found = value[name]
        if not isinstance(found, (int, float)) or isinstance(found, bool) or not math.isfinite(found):
            raise ValueError(name)
        return found

    tags = value["tags"]
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ValueError("tags")
    return Record(
        manifest=text("manifest"),
        index=text("index"),
        repository=text("repository"),
        tags=tags,
        architecture=text("architecture"),
        form=text("form"),
        sha256=text("sha256"),
        size_bytes=int(number("size_bytes")),
        modified_s=int(number("modified_s")),
        made_at=number("made_at"),
        made_by=text("made_by"),
        made_with=text("made_with"),
    )


def _touched(path: Path) -> float:
    """The newest change of a file, or of what lies in a folder."""
    newest = 0.0
    try:
        newest = path.lstat().st_mtime
        if stat.S_ISDIR(path.lstat().st_mode):
            for folder, _, names in os.walk(path):
                for name in names:
                    with suppress(OSError):
                        newest = max(newest, Path(folder, name).lstat().st_mtime)
    except OSError:
        return newest or time.time()
    return newest
