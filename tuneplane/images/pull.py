"""An image of a registry, from its name to the file that nodes start: frozen, found, or fetched and converted.

Prepare calls `freeze`, which asks the registry and fetches nothing, and then `fetch`, where there is no file yet.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tuneplane import __version__
from tuneplane.images.convert import check_program, check_room, convert, remove_tree
from tuneplane.images.distribution import Registry, read_all, unlike_digest
from tuneplane.images.download import Blobs, fetch_image, no_room
from tuneplane.images.folder import ImageFolder, Prepared, Record, file_name
from tuneplane.images.local import SIF as SIF_FORMAT
from tuneplane.images.local import SQUASHFS, hash_file, read_format
from tuneplane.images.manifest import (
    LARGEST_CONFIG_BYTES,
    Index,
    Malformed,
    Manifest,
    choose,
    config_architecture,
    parse,
)
from tuneplane.images.place import Place
from tuneplane.images.progress import Progress, silent
from tuneplane.images.reference import Reference
from tuneplane.images.transport import CannotAsk
from tuneplane.images.turn import Owner, owner_of, turn
from tuneplane.kernel.digests import sha256_bytes
from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.kernel.files import write_json


@dataclass(frozen=True)
class Frozen:
    """A name frozen to what it means now.

    digest: what the tag, or the name's own digest, stands for; of an index where the image is one of several.
    manifest: digest of the one image for these nodes. path: its file, there or to come.
    prepared: the file, where there is one. folder, content, registry: what `fetch` needs where there is none.
    """

    reference: Reference
    digest: str
    manifest: str
    path: Path
    prepared: Prepared | None = None
    folder: ImageFolder | None = None
    notices: tuple[str, ...] = ()
    content: Manifest | None = None
    registry: Registry | None = field(default=None, repr=False)


def freeze(
    reference: Reference, place: Place, environ: Mapping[str, str], cache: Path, *, remember: bool = True
) -> Frozen:
    """Ask the registry what `reference` is now. Fetches no layer and writes no image.

    cache: the user's own folder, which remembers what each tag was last seen to be, unless `remember` is False.

    Where the registry cannot be asked, what is on disk decides: a digest's image is taken, a tag's with a
    notice that the tag may have moved. Raises OperationError where neither helps, UsageError where the image
    is none for these nodes.
    """
    known = _on_disk(reference, place) if reference.digest else None
    if known is not None and reference.digest:
        return Frozen(reference, reference.digest, known.record.manifest, known.path, known)
    registry = Registry(reference, environ, place.insecure)
    try:
        digest = reference.digest or registry.resolve(str(reference.tag))
        if digest is not None and not reference.digest:
            known = _by_digest(digest, place)
            if known is not None:
                if remember:
                    _remember(cache, reference, digest)
                return Frozen(reference, digest, known.record.manifest, known.path, known)
        frozen = _ask(registry, digest, place)
    except CannotAsk as error:
        return _as_last_seen(reference, place, cache, error)
    if remember and not reference.digest:
        _remember(cache, reference, frozen.digest)
    return frozen


def fetch(frozen: Frozen, place: Place, progress: Progress = silent, *, share: bool = False) -> Prepared:
    """The file of a frozen image, fetched and converted where there is none. Raises OperationError.

    share: put it into the site's folder even if only a login can read it in the registry; UsageError where
    it cannot come to lie there.
    """
    shared = _shared_folder(frozen, place) if share else None
    if frozen.prepared is not None:
        ImageFolder(frozen.prepared.path.parent).note_use(frozen.prepared.path)
        return frozen.prepared
    folder = shared or frozen.folder
    assert folder is not None
    folder.make()
    name = file_name(frozen.manifest, place.builder.form)

    def found() -> Prepared | None:
        return _trusted(folder, frozen.manifest, place.builder.form)

    def waiting(owner: Owner | None) -> None:
        progress(f"waiting: {owner or 'another process'} prepares this image")

    with turn(folder.path, name, place.user, lambda: found() is not None, waiting) as mine:
        image = found()  # another may have finished it just before this turn
        if image is None and mine:
            image = _build(frozen, place, folder, progress)
    if image is None or not _is_trusted(folder, image):
        what = "the image that another process prepared is gone again, or is not yours to start"
        raise OperationError(Fault(what, str(folder.path / name), "try again"))
    folder.note_use(image.path)
    return image


def _shared_folder(frozen: Frozen, place: Place) -> ImageFolder:
    """The site's folder, for an image that is to lie there. Raises UsageError where it cannot."""
    shared = next((folder for folder in place.folders if folder.is_shared), None)
    there = frozen.prepared.path if frozen.prepared else None
    if shared is None:
        raise UsageError(
            Fault("this site has no folder of images for all", "--share", "see site.image_cache")
        )
    if there is not None and there.parent != shared.path:
        what = f"the image is there already, as {there}"
        raise UsageError(Fault(what, "--share", f"tp image rm {there.name}, then pull it again with --share"))
    if there is None and not shared.is_writable():
        what = f"the site's folder of images, {shared.path}, is not yours to write"
        raise UsageError(Fault(what, "--share", "ask whoever owns it to pull the image"))
    return shared


def _ask(registry: Registry, digest: str | None, place: Place) -> Frozen:
    """Manifests and, where no index tells it, the configuration: what the image is, and for which nodes."""
    reference = registry.reference
    try:
        raw, kind = registry.manifest(digest or str(reference.tag))
        whole = f"sha256:{sha256_bytes(raw)}"
        parsed = parse(raw, kind)
        if isinstance(parsed, Index):
            chosen = choose(parsed, place.architecture)
            if chosen is None:
                there = ", ".join(dict.fromkeys(str(p) for p in parsed.platforms)) or "none at all"
                raise _wrong_architecture(reference, place, f"it is there for {there}")
            raw, kind = registry.manifest(chosen.digest)
            parsed = parse(raw, kind)
            if isinstance(parsed, Index):
                raise Malformed("its index holds another index")
        else:
            _check_architecture(registry, parsed, place)
    except Malformed as error:
        raise UsageError(Fault(f"image {reference} cannot be used: {error}", str(reference))) from None
    manifest = parsed.descriptor.digest
    prepared = _by_digest(manifest, place)
    if prepared is not None:
        return Frozen(reference, whole, manifest, prepared.path, prepared)
    folder = _target(registry, whole, manifest, place)
    path = folder.file(manifest, place.builder.form)
    if place.elsewhere is not None:  # which has other programs and disks
        return Frozen(reference, whole, manifest, path, None, folder, (), parsed, registry)
    check_program(place.builder, str(reference))
    check_room(folder.path, _missing_bytes(folder, path, parsed), parsed, place.builder)
    return Frozen(reference, whole, manifest, path, None, folder, (), parsed, registry)


def _missing_bytes(folder: ImageFolder, path: Path, manifest: Manifest) -> int:
    return Blobs(folder.work(path.name) / "layout").missing_bytes(manifest)


def _check_architecture(registry: Registry, manifest: Manifest, place: Place) -> None:
    with registry.blob(manifest.config.digest) as answer:
        raw = read_all(answer, LARGEST_CONFIG_BYTES)
    if f"sha256:{sha256_bytes(raw)}" != manifest.config.digest:
        raise unlike_digest(registry.reference, manifest.config.digest, sha256_bytes(raw))
    found = config_architecture(raw)
    if found != place.architecture:
        raise _wrong_architecture(registry.reference, place, f"it is there for {found} alone")


def _wrong_architecture(reference: Reference, place: Place, there: str) -> UsageError:
    return UsageError(
        Fault(
            f"image {reference} is not there for {place.architecture}, which the nodes are: {there}",
            str(reference),
            "build it for them (docker buildx build --platform "
            f"linux/{place.architecture}); if the nodes are another kind, set cluster.architecture",
        )
    )


def _as_last_seen(reference: Reference, place: Place, cache: Path, error: CannotAsk) -> Frozen:
    """What this machine knows of a tag whose registry gives no answer."""
    fault = error.faults[0]
    if reference.digest is None:
        digest = _recall(cache, reference)
        known = _by_digest(digest, place) if digest else None
        if known is None:
            known = _on_disk(reference, place)
            digest = (known.record.index or known.record.manifest) if known else None
        if known is not None and digest:
            day = time.strftime("%Y-%m-%d", time.localtime(known.record.made_at))
            told = (
                f"{fault.what}; {reference.tag} is taken to be {digest}, as it was when the image was prepared "
                f"({day}). The tag may have moved since"
            )
            return Frozen(reference, digest, known.record.manifest, known.path, known, None, (told,))
    elsewhere = (
        f"or build it where {reference.registry} can be reached: apptainer build NAME.sif docker://{reference}, "
        "then --image NAME.sif"
    )
    raise CannotAsk(
        Fault(fault.what, fault.where, f"{fault.remedy}; {elsewhere}" if fault.remedy else elsewhere),
        broke_off=error.broke_off,
    )


def _on_disk(reference: Reference, place: Place) -> Prepared | None:
    """The image on disk that this very name means, without asking anybody."""
    if reference.digest:
        return _by_digest(reference.digest, place)
    name = f"{reference.registry}/{reference.repository}:{reference.tag}"
    fitting = [
        image
        for folder in place.folders
        if (image := folder.find_tag(name, place.architecture, place.builder.form))
        and _is_trusted(folder, image)
    ]
    return max(fitting, key=lambda image: image.record.made_at, default=None)


def _by_digest(digest: str, place: Place) -> Prepared | None:
    form = place.builder.form
    for folder in place.folders:
        image = folder.find(digest, form)
        if image is not None and image.record.architecture != place.architecture:
            image = None
        image = image or folder.find_index(digest, place.architecture, form)
        if image is not None and _is_trusted(folder, image):
            return image
    return None


def _trusted(folder: ImageFolder, manifest: str, form: str) -> Prepared | None:
    image = folder.find(manifest, form)
    return image if image is not None and _is_trusted(folder, image) else None


def _is_trusted(folder: ImageFolder, image: Prepared) -> bool:
    """The site vouches for its own folder; elsewhere a stranger's file is no image of this user's."""
    return (folder.is_shared or image.owner in (os.geteuid(), 0)) and os.access(
        image.path, os.R_OK, effective_ids=True
    )


def _target(registry: Registry, digest: str, manifest: str, place: Place) -> ImageFolder:
    """The folder for a new image: never a shared one for what only this user's login may read."""
    for folder in place.folders:
        if not folder.is_writable():
            continue
        name = file_name(manifest, place.builder.form)
        if folder.is_taken(manifest, place.builder.form) and owner_of(folder.path, name) is None:
            continue
        if not (
            folder.is_shared and registry.used_login and not _is_public(registry.reference, digest, place)
        ):
            return folder
    own = place.folders[-1].path
    raise OperationError(
        Fault(
            "images cannot be prepared there: it is not yours to write",
            str(own),
            "set storage_root of the cluster profile, or ask the administrators for site.image_cache",
        )
    )


def _is_public(reference: Reference, digest: str, place: Place) -> bool:
    """Whether everybody may read the image in its registry, without any login."""
    with suppress(OperationError):
        return Registry(reference, None, place.insecure).resolve(digest) is not None
    return False


def _build(frozen: Frozen, place: Place, folder: ImageFolder, progress: Progress) -> Prepared:
    """Fetch, check, convert, publish. What was fetched stays where this ends early."""
    assert frozen.registry is not None and frozen.content is not None
    manifest, form = frozen.content, place.builder.form
    try:
        work = folder.make_work(file_name(frozen.manifest, form))
        layout, built = work / "layout", work / f"image.{form}"
        missing_bytes = Blobs(layout).missing_bytes(manifest)
        check_room(folder.path, missing_bytes, manifest, place.builder)  # others built while this one waited
        fetch_image(frozen.registry, manifest, layout, progress)
        built.unlink(missing_ok=True)
        convert(layout, built, place.architecture, place.builder, progress)
        _check_format(built, form)
        with built.open("rb") as file:
            sha256 = hash_file(file.fileno(), built.stat().st_size, progress)
        found = built.stat()
        record = Record(
            manifest=frozen.manifest,
            index=frozen.digest if frozen.digest != frozen.manifest else "",
            repository=f"{frozen.reference.registry}/{frozen.reference.repository}",
            tags=_names(frozen.reference),
            architecture=place.architecture,
            form=form,
            sha256=sha256,
            size_bytes=found.st_size,
            modified_s=int(found.st_mtime),
            made_at=time.time(),
            made_by=place.user,
            made_with=f"tuneplane {__version__}, {Path(place.builder.program).name}",
        )
        image = folder.publish(built, record)
    except OSError as error:
        raise no_room(error, folder.path) from None
    if image is None:
        raise OperationError(Fault("the finished image could not be read back", str(folder.path)))
    remove_tree(work)
    return image


def _check_format(built: Path, form: str) -> None:
    found = read_format(built)
    if found != {"sif": SIF_FORMAT, "sqsh": SQUASHFS}[form]:
        raise OperationError(Fault(f"what was built is no {form} file but {found or 'unknown'}", str(built)))


def _names(reference: Reference) -> list[str]:
    return [f"{reference.registry}/{reference.repository}:{reference.tag}"] if reference.tag else []


def _tag_file(cache: Path, reference: Reference) -> Path:
    return cache / "tags" / f"{sha256_bytes(_names(reference)[0].encode())[:32]}.json"


def _remember(cache: Path, reference: Reference, digest: str) -> None:
    """Note what a tag is now, for the day on which the registry cannot be asked. Costs nothing but itself."""
    with suppress(OSError):
        file = _tag_file(cache, reference)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(file, {"name": _names(reference)[0], "digest": digest, "seen_at": time.time()}, 0o600)


def _recall(cache: Path, reference: Reference) -> str | None:
    try:
        noted = json.loads(_tag_file(cache, reference).read_text(encoding="utf-8"))
        return str(noted["digest"]) if noted["name"] == _names(reference)[0] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
