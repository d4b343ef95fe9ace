"""From a chosen image to the file that nodes start: judged by the site's rules, with its digest.

Submit calls `image_faults` with all its other checks, then `prepare_image`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tuneplane.images.choice import FLAG, Choice
from tuneplane.images.local import ImageFile, Progress, inspect, is_local, read_sha256
from tuneplane.images.reference import Reference, parse_reference
from tuneplane.images.registries import registry_fault
from tuneplane.kernel.errors import Fault, UsageError


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
    """An image that nodes can start. The fields are those of the JobSpec's `Image`."""

    reference: str  # as asked
    source: str  # who chose it
    path: str  # the file that is started, absolute, with no link in it
    sha256: str


def image_faults(choice: Choice, rules: Rules) -> list[Fault]:
    """Why this image may not or cannot be started; empty where `prepare_image` will read it. Reads no image."""
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
    return registry_image_faults(reference, choice.source)


def prepare_image(
    choice: Choice,
    rules: Rules,
    cache_folder: Path,
    progress: Progress | None = None,
    *,
    remember: bool = True,
) -> PreparedImage:
    """The image as nodes will start it. Raises UsageError with the faults of `image_faults`, OperationError.

    cache_folder: TunePlane's own in the user's XDG cache. progress, remember: see `read_sha256`.
    """
    faults = image_faults(choice, rules)
    if faults:
        raise UsageError(*faults)
    file = _inspect(choice, rules)
    if isinstance(file, list):
        raise UsageError(*file)
    sha256 = read_sha256(file.path, cache_folder, progress, remember=remember)
    return PreparedImage(choice.image, choice.source, file.path, sha256)


def registry_image_faults(reference: Reference, where: str) -> list[Fault]:
    """What stands against preparing an image that lies in a registry."""
    return [
        Fault(
            f"image {reference}: preparing registry images is not in this version",
            where,
            f"use a local .sif path: apptainer build NAME.sif docker://{reference}, then --image NAME.sif",
        )
    ]


def _inspect(choice: Choice, rules: Rules) -> ImageFile | list[Fault]:
    if choice.source != FLAG and not choice.image.startswith(("/", "~")):
        # A path in a configuration has no working directory to be relative to.
        return [Fault(f"image {choice.image!r} is not an absolute path", choice.source)]
    return inspect(
        choice.image,
        rules.folders,
        trusted=choice.is_sites_own,
        contact=rules.contact,
        where=choice.source,
    )
