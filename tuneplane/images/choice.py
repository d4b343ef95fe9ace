"""Which image a run starts: the order of C27. Compile calls `choose_image`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuneplane.kernel.errors import Fault, UsageError

FLAG, SITE_DEFAULT, RUNTIME_REGISTRY, CATALOG_PIN = (
    "--image",
    "site default",
    "runtime registry",
    "catalog pin",
)

ARGUMENT = "IMAGE"
"""Of a command that names an image itself, `tp image pull IMAGE`: no run's choice, and judged like `--image`."""

USER_MANAGED = "user-managed"
EVERY_METHOD = "*"

_GIVE = "give a registry's image, HOST/NAME:TAG, or the path of a .sif or .sqsh file"


@dataclass(frozen=True)
class Choice:
    """An image as somebody wrote it, and who did: one of the constants above."""

    image: str
    source: str

    @property
    def is_sites_own(self) -> bool:
        """Whether the site's configuration chose it; then its lists for users do not judge it."""
        return self.source in (SITE_DEFAULT, RUNTIME_REGISTRY)


def choose_image(
    method: str,
    *,
    flag: str | None,
    site_defaults: Mapping[str, str],
    runtime_id: str | None,
    runtime_images: Mapping[str, str],
    pin: str | None,
) -> Choice:
    """The image of a run of `method`: `--image`, the site's default, the runtime registry, the catalog's pin.

    site_defaults: method or `*` → image. runtime_images: runtime id → image.
    pin: the catalog's image; None or `user-managed` where the recipe leaves it to the user.

    Raises UsageError where nobody chose one, or `--image` is empty.
    """
    if flag is not None:
        if not flag.strip():
            raise UsageError(Fault("the image is empty", FLAG, _GIVE))
        return Choice(flag, FLAG)
    default = site_defaults.get(method) or site_defaults.get(EVERY_METHOD)
    if default:
        return Choice(default, SITE_DEFAULT)
    registered = runtime_images.get(runtime_id) if runtime_id else None
    if registered:
        return Choice(registered, RUNTIME_REGISTRY)
    if pin and pin != USER_MANAGED:
        return Choice(pin, CATALOG_PIN)
    if runtime_id in (None, "", USER_MANAGED):
        what = f"{method} has no image of its own ({USER_MANAGED}) and this site sets none"
        raise UsageError(Fault(f"--image is required: {what}", FLAG, _GIVE))
    what = f"the catalog pins no image for {method}, and this site names none for its runtime {runtime_id}"
    site = f"have the site set site.runtime_images.{runtime_id} (docs/containers.md says what to build)"
    raise UsageError(Fault(f"--image is required: {what}", FLAG, f"{_GIVE}; or {site}"))
