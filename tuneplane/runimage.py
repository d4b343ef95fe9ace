"""The image of a run: who chose it, which rules judge it, where it is prepared. Compile and `tp image` call it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from tuneplane import containers
from tuneplane.imagejob import pull_by_job
from tuneplane.images import (
    Choice,
    ChosenImage,
    Rules,
    allowed_registries,
    choose_image,
    resolve_image,
)
from tuneplane.images.choice import ARGUMENT
from tuneplane.images.folder import SIF, SQSH, ImageFolder
from tuneplane.images.manifest import own_architecture
from tuneplane.images.place import Builder, Place, default_scratch
from tuneplane.images.progress import Progress
from tuneplane.images.registries import VARIABLE
from tuneplane.kernel.errors import Fault, UsageError
from tuneplane.recipes.recipe import Recipe
from tuneplane.runs.index import current_user, remember_root
from tuneplane.site import Cluster, Config, Site

_ENDINGS = {containers.SIF: SIF, containers.SQUASHFS: SQSH}
"""A runtime's form of an image → that of the folder of images."""


def run_choice(recipe: Recipe, config: Config, image: str | None) -> Choice:
    """The image by the order of C27; `image` is what `--image` said. Raises UsageError where nobody chose one."""
    pin = recipe.runtime.image
    return choose_image(
        recipe.id,
        flag=image,
        site_defaults=config.site.default_images,
        runtime_id=recipe.runtime.id,
        runtime_images=config.site.runtime_images,
        pin=f"{pin.reference}@{pin.digest}" if pin and pin.digest else pin.reference if pin else None,
    )


def image_rules(site: Site, environ: Mapping[str, str]) -> Rules:
    """What the site, and the user's own list, say of images. Raises UsageError."""
    registries = allowed_registries(site.allowed_registries, environ.get(VARIABLE))
    return Rules(registries=registries, folders=site.image_folders, contact=site.contact)


def image_place(config: Config, user: str, environ: Mapping[str, str], *, here: bool = False) -> Place:
    """Where images for a cluster profile are looked for and made. here: by this process, whatever the site says.

    Raises UsageError where compute nodes would not reach the site's folder, or no runtime starts images.
    """
    site, cluster = config.site, config.cluster
    form = _ENDINGS.get(containers.image_form(cluster.container.runtime))
    if form is None:
        raise UsageError(
            Fault(
                f"profile {cluster.name} runs without containers, so no image is prepared for it",
                "--profile",
                "name a profile with a container runtime",
            )
        )
    outside = cluster.outside_shared(Path(site.image_cache)) if site.image_cache is not None else ""
    if outside:
        what = f"site.image_cache {outside}: compute nodes would not reach images there"
        remedy = "have the administrators choose a folder below one of them"
        raise UsageError(Fault(what, f"profile {cluster.name}", remedy))
    by_job = cluster.scheduler == "slurm" and bool(site.image_job) and not here
    runtime = cluster.container.runtime
    program = "enroot" if runtime == "pyxis" else cluster.container.binary or runtime  # pyxis' own is srun
    return Place(
        folders=tuple(image_folders(site, cluster)),
        builder=Builder(form, program, default_scratch(site.image_scratch, environ)),
        architecture=cluster.architecture or own_architecture(),
        user=user,
        insecure=tuple(site.insecure_registries),
        elsewhere=partial(pull_by_job, tuple(site.image_job), cluster.name) if by_job else None,
    )


def named_image(
    image: str,
    config: Config,
    environ: Mapping[str, str],
    cache: Path,
    progress: Progress,
    *,
    here: bool = False,
) -> ChosenImage:
    """A registry's image by its name alone, of no run: judged like a user's `--image`, frozen, not yet fetched.

    Its folder is one that `tp image ls` and `gc` look into from now on. here: see `image_place`.
    Raises UsageError, OperationError.
    """
    rules = image_rules(config.site, environ)
    place = image_place(config, current_user(), environ, here=here)
    chosen = resolve_image(Choice(image, ARGUMENT), rules, place, environ, cache, progress)
    remember_root(Path(config.cluster.storage_root).expanduser())
    return chosen


def image_folders(site: Site, cluster: Cluster) -> list[ImageFolder]:
    """The site's folder of images, where it has one, then the user's own."""
    shared = [ImageFolder(Path(site.image_cache), is_shared=True)] if site.image_cache else []
    return [*shared, ImageFolder(Path(cluster.storage_root).expanduser() / "images")]
