"""From a chosen image to the file that nodes start: judged by the site's rules, frozen, fetched.

Compile calls `image_faults` with all its other checks and then `resolve_image`, which writes nothing; submit
calls `fetch` of what that gave, once nothing else can fail any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tuneplane.images.choice import ARGUMENT, FLAG, Choice
from tuneplane.images.local import ImageFile, inspect, is_local, read_sha256
from tuneplane.images.progress import Progress, silent
from tuneplane.images.reference import parse_reference
from tuneplane.images.registries import registry_fault
from tuneplane.kernel.errors import Fault, UsageError

if TYPE_CHECKING:
    from tuneplane.images.folder import Prepared
    from tuneplane.images.place import Elsewhere, Place
    from tuneplane.images.pull import Frozen


@dataclass(frozen=True)
class Rules:
    """What a site says of images.

    registries: the result of `allowed_registries`. folders: see `local.inspect`.
    contact: whom refusals tell users to ask.
    """

    registries: Sequence[str] = ()
    folders: Sequence[str] | None = None
    contact: str = ""


@dataclass(frozen=True)
class PreparedImage:
    """An image that nodes start. The fields are those of the JobSpec's `Image`."""

    reference: str  # as asked
    source: str  # who chose it
    path: str  # the file that is started, absolute
    sha256: str  # "" before it is fetched
    digest: str = ""  # what a registry's name was frozen to
    size_bytes: int = 0
    modified_s: int = 0


@dataclass(frozen=True)
class ChosenImage:
    """An image as it will be started; where it has no file yet, what it takes to make one."""

    image: PreparedImage
    notices: tuple[str, ...] = ()
    frozen: Frozen | None = None
    place: Place | None = None

    def fetch(self, progress: Progress = silent, *, share: bool = False) -> PreparedImage:
        """The image with its file: fetched and converted where there was none. Raises OperationError.

        share: see `pull.fetch`.
        """
        if self.place is None or (self.frozen is None and self.place.elsewhere is None):
            return self.image
        if self.place.elsewhere is not None and (self.frozen is None or self.frozen.prepared is None):
            return self._fetch_elsewhere(self.place.elsewhere, progress, share)
        assert self.frozen is not None
        from tuneplane.images.pull import fetch

        return _of_registry(self.image, fetch(self.frozen, self.place, progress, share=share))

    def _fetch_elsewhere(self, elsewhere: Elsewhere, progress: Progress, share: bool) -> PreparedImage:
        reference = parse_reference(self.image.reference, self.image.source)
        # Frozen here already: the job gets the digest, and a tag that moves meanwhile changes nothing.
        asked = str(replace(reference, digest=self.image.digest or None))
        made = elsewhere(asked, progress, share)
        return PreparedImage(
            self.image.reference,
            self.image.source,
            made.path,
            made.sha256,
            made.digest,
            made.size_bytes,
            made.modified_s,
        )


def image_faults(choice: Choice, rules: Rules) -> list[Fault]:
    """Why this image may not be started; empty where `resolve_image` will look for it. Reads no image."""
    if is_local(choice.image):
        found = _inspect(choice, rules)
        return found if isinstance(found, list) else []
    try:
        reference = parse_reference(choice.image, choice.source)
    except UsageError as error:
        return list(error.faults)
    if not choice.is_sites_own:
        refused = registry_fault(reference, rules.registries, rules.contact, choice.source)
        if refused:
            return [refused]
    return []


def resolve_image(
    choice: Choice,
    rules: Rules,
    place: Place,
    environ: Mapping[str, str],
    cache_folder: Path,
    progress: Progress = silent,
    *,
    remember: bool = True,
) -> ChosenImage:
    """What `choice` is now: a local file with its sha256, or a registry's name frozen to its digest.

    Fetches no image. cache_folder: TunePlane's own in the user's XDG cache. environ: whose files hold the
    logins of registries. remember: False writes nothing anywhere.
    Raises UsageError with the faults of `image_faults`, OperationError.
    """
    faults = image_faults(choice, rules)
    if faults:
        raise UsageError(*faults)
    if is_local(choice.image):
        return ChosenImage(_local(choice, rules, cache_folder, progress, remember))
    from tuneplane.images.pull import freeze
    from tuneplane.images.transport import CannotAsk

    reference = parse_reference(choice.image, choice.source)
    try:
        frozen = freeze(reference, place, environ, cache_folder, remember=remember)
    except CannotAsk as error:
        if place.elsewhere is None:
            raise
        to_come = place.folders[-1].path / f"to-come.{place.builder.form}"
        image = PreparedImage(choice.image, choice.source, str(to_come), "")
        told = (
            f"{error.faults[0].what}; a job freezes the name and prepares the image when the run is submitted"
        )
        return ChosenImage(image, (told,), None, place)
    image = PreparedImage(choice.image, choice.source, str(frozen.path), "", frozen.digest)
    if frozen.prepared is not None:
        image = _of_registry(image, frozen.prepared)
    return ChosenImage(image, frozen.notices, frozen, place)


def _local(
    choice: Choice, rules: Rules, cache_folder: Path, progress: Progress, remember: bool
) -> PreparedImage:
    file = _inspect(choice, rules)
    if isinstance(file, list):
        raise UsageError(*file)
    sha256 = read_sha256(file.path, cache_folder, progress, remember=remember)
    return PreparedImage(choice.image, choice.source, file.path, sha256, "", file.size_bytes, file.modified_s)


def _of_registry(image: PreparedImage, prepared: Prepared) -> PreparedImage:
    record = prepared.record
    return PreparedImage(
        image.reference,
        image.source,
        str(prepared.path),
        record.sha256,
        image.digest,
        record.size_bytes,
        record.modified_s,
    )


def _inspect(choice: Choice, rules: Rules) -> ImageFile | list[Fault]:
    if choice.source not in (FLAG, ARGUMENT) and not choice.image.startswith(("/", "~")):
        # A path in a configuration has no working directory to be relative to.
        return [Fault(f"image {choice.image!r} is not an absolute path", choice.source)]
    return inspect(
        choice.image,
        rules.folders,
        trusted=choice.is_sites_own,
        contact=rules.contact,
        where=choice.source,
    )
