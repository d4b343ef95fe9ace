"""`tp image …`: images of registries as files for nodes, made, listed, cleared."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuneplane.cli.completion import complete_profiles
from tuneplane.cli.context import cache_folder, compose_here
from tuneplane.cli.image_check import check_command
from tuneplane.cli.progress import image_progress
from tuneplane.cli.show import age, show_fields, show_json, show_notices, show_table, size
from tuneplane.kernel.errors import Exit, Fault, UsageError

if TYPE_CHECKING:
    from tuneplane.images.folder import ImageFolder, Prepared

DAYS = 30
SHORT_DIGEST = len("sha256:") + 12

profile_option = click.option(
    "--profile", shell_complete=complete_profiles, help="Only folders of this cluster profile."
)
json_option = click.option("--json", "as_json", is_flag=True, help="For programs.")


@click.group("image")
def image_command() -> None:
    """Prepare images of registries for nodes, list them, clear them away.

    `tp submit` does the first by itself; saying it beforehand saves waiting then.
    """


image_command.add_command(check_command)


@image_command.command("pull")
@click.argument("image")
@click.option("--profile", required=True, shell_complete=complete_profiles, help="For whose nodes.")
@click.option("--share", is_flag=True, help="Into the site's folder, though only a login can read it.")
@click.option("--here", is_flag=True, help="By this process, also where the site has jobs for it.")
@json_option
def pull_command(image: str, profile: str, share: bool, here: bool, as_json: bool) -> None:
    """Make the file that nodes of a profile start from IMAGE, HOST/NAME:TAG or @sha256:…, unless it is there."""
    from tuneplane.images import is_local
    from tuneplane.runimage import named_image

    if is_local(image):
        what = f"image {image!r} is the name of a file, which is started as it is"
        raise UsageError(Fault(what, "IMAGE", "say it to tp submit; for a registry's image: HOST/NAME:TAG"))
    composed = compose_here(profile)
    progress = image_progress()
    chosen = named_image(image, composed.config, os.environ, cache_folder(), progress, here=here)
    show_notices([] if as_json else [*composed.notices, *chosen.notices])
    was_there = bool(chosen.image.sha256)
    made = chosen.fetch(progress, share=share)
    if as_json:
        show_json(
            {
                "image": image,
                "digest": made.digest,
                "path": made.path,
                "sha256": made.sha256,
                "bytes": made.size_bytes,
                "modified_s": made.modified_s,
                "was_there": was_there,
                "notices": list(chosen.notices),
            }
        )
        return
    fields = [("image", image), ("digest", made.digest), ("file", made.path), ("size", size(made.size_bytes))]
    show_fields([*fields, ("made", "before" if was_there else "now")])


@image_command.command("ls")
@profile_option
@json_option
def ls_command(profile: str | None, as_json: bool) -> None:
    """List prepared images, the last used first."""
    found = sorted(
        ((folder, image) for folder in _folders(profile) for image in folder.images()),
        key=lambda pair: -pair[1].used_at,
    )
    if as_json:
        show_json([_as_dict(folder, image) for folder, image in found])
        return
    if not found:
        click.echo("no images yet: tp image pull HOST/NAME:TAG --profile …")
    now = time.time()
    rows = [
        (
            _name(image),
            image.record.manifest[:SHORT_DIGEST],
            image.record.architecture,
            size(image.record.size_bytes),
            age(max(0.0, now - image.used_at)),
            str(image.path),
        )
        for _, image in found
    ]
    show_table(("IMAGE", "DIGEST", "FOR", "SIZE", "USED", "FILE"), rows)


@image_command.command("rm")
@click.argument("images", nargs=-1, required=True)
@profile_option
@click.option("--force", is_flag=True, help="Even if a run that has not ended starts it, or others use it.")
def rm_command(images: tuple[str, ...], profile: str | None, force: bool) -> None:
    """Remove prepared images of yours, each by name, digest or file."""
    from tuneplane.kernel.errors import raise_faults
    from tuneplane.runs.images import images_in_use

    held = {} if force else images_in_use()
    there = [(folder, image) for folder in _folders(profile) for image in folder.images()]
    faults: list[Fault] = []
    chosen: dict[Path, tuple[ImageFolder, Prepared]] = {}
    for text in images:
        fitting = [(folder, image) for folder, image in there if _means(text, image)]
        if not fitting:
            faults.append(Fault(f"no prepared image {text!r}", "IMAGES", "tp image ls lists them"))
        for folder, image in fitting:
            faults += _removal_faults(folder, image, held, force)
            chosen[image.path] = (folder, image)
    raise_faults(faults)
    for folder, image in chosen.values():
        folder.remove(image)
        click.echo(f"removed {image.path}")


def _removal_faults(
    folder: ImageFolder, image: Prepared, held: Mapping[Path, list[str]], force: bool
) -> list[Fault]:
    """Why an image is not to be removed. held: see `images_in_use`."""
    name = _name(image)
    if os.geteuid() not in (image.owner, 0):
        return [Fault(f"{name} at {image.path} belongs to {_user(image.owner)}", "IMAGES", "ask there")]
    if force:
        return []
    found = []
    runs = ", ".join(held.get(_real(image), [])[:3])
    if runs:
        found.append(Fault(f"{name} is started by {runs}", "IMAGES", "wait for it, stop it, or say --force"))
    now = time.time()
    # Runs of others cannot be looked at; their marks can.
    others = {user: now - at for user, at in folder.uses(image).items() if user != os.geteuid()}
    recent = sorted((ago, user) for user, ago in others.items() if ago < DAYS * 86_400)
    if recent:
        ago, user = recent[0]
        what = f"{name} was used by {_user(user)} {age(max(0.0, ago))} ago"
        found.append(Fault(what, "IMAGES", "a run of theirs may still start it; ask there, or say --force"))
    return found


@image_command.command("gc")
@profile_option
@click.option("--days", default=DAYS, show_default=True, type=click.IntRange(0), help="Unused for so long.")
@click.option("--yes", is_flag=True, help="Remove them; else they are only listed.")
@json_option
def gc_command(profile: str | None, days: int, yes: bool, as_json: bool) -> int:
    """List, or with --yes remove, your images that nobody used for a while and no unended run of yours starts."""
    from tuneplane.images.convert import remove_tree
    from tuneplane.runs.images import unused_images

    old, left = unused_images(_folders(profile), days * 86_400.0)
    freed = sum(image.record.size_bytes for _, image in old) + sum(_size_of(item.path) for item in left)
    if yes:
        for folder, image in old:
            folder.remove(image)
        for item in left:
            remove_tree(item.path) if item.path.is_dir() else item.path.unlink(missing_ok=True)
    paths = [*(str(image.path) for _, image in old), *(str(item.path) for item in left)]
    if as_json:
        show_json({"removed": yes, "paths": paths, "bytes": freed})
        return Exit.DONE
    for path in paths:
        click.echo(path)
    verb = "freed" if yes else "to be freed: say the same with --yes"
    click.echo(f"{size(freed)} {verb}" if paths else "nothing to remove")
    return Exit.DONE


def _folders(profile: str | None) -> list[ImageFolder]:
    """Where images may lie: of a profile, else of every storage root that this user submitted to."""
    from tuneplane.images.folder import ImageFolder
    from tuneplane.runimage import image_folders
    from tuneplane.runs.index import storage_roots

    if profile is not None:
        config = compose_here(profile).config
        return image_folders(config.site, config.cluster)
    site = compose_here("local").config.site
    shared = [ImageFolder(Path(site.image_cache), is_shared=True)] if site.image_cache else []
    own = [ImageFolder(root / "images") for root in storage_roots()]
    folders: dict[str, ImageFolder] = {}
    for folder in (*shared, *own):  # two storage roots may lead to one
        folders.setdefault(os.path.realpath(folder.path), folder)
    return list(folders.values())


def _real(image: Prepared) -> Path:
    return Path(os.path.realpath(image.path))


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _name(image: Prepared) -> str:
    return image.record.tags[0] if image.record.tags else f"{image.record.repository}@{image.record.manifest}"


def _means(text: str, image: Prepared) -> bool:
    """Whether a user means this image: its name, its digest or a beginning of it, its file."""
    from tuneplane.images.reference import parse_reference

    record = image.record
    digests = [digest for digest in (record.manifest, record.index) if digest]
    names = [*record.tags, *(f"{record.repository}@{digest}" for digest in digests)]
    if text in (*names, image.path.name) or os.path.realpath(text) == os.path.realpath(image.path):
        return True
    with suppress(UsageError):
        if str(parse_reference(text)) in names:  # docker:// before it, or without a tag
            return True
    hexadecimal = text.removeprefix("sha256:")
    return len(hexadecimal) >= 6 and any(d.removeprefix("sha256:").startswith(hexadecimal) for d in digests)


def _as_dict(folder: ImageFolder, image: Prepared) -> dict[str, object]:
    record = image.record
    return {
        "tags": record.tags,
        "repository": record.repository,
        "manifest": record.manifest,
        "index": record.index,
        "architecture": record.architecture,
        "form": record.form,
        "path": image.path,
        "sha256": record.sha256,
        "bytes": record.size_bytes,
        "made_at": record.made_at,
        "made_by": record.made_by,
        "used_at": image.used_at,
        "shared": folder.is_shared,
    }


def _size_of(path: Path) -> int:
    if not path.is_dir():
        return 0
    return sum(item.lstat().st_size for item in path.rglob("*") if not item.is_dir())
