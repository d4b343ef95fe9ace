"""Which registries a user's image may come from (C28). Submit calls `allowed_registries`, prepare the rest."""

from __future__ import annotations

from collections.abc import Sequence

from tuneplane.images.reference import Reference, parse_registry
from tuneplane.kernel.errors import Fault, UsageError, raise_faults

VARIABLE = "TUNEPLANE_ALLOWED_IMAGE_REGISTRIES"
SITE_KEY = "site.allowed_registries"


def allowed_registries(site: Sequence[str] | None, environment: str | None) -> tuple[str, ...]:
    """The registries allowed here, `host[:port]` each, in the order they were written.

    site: the site's setting, None where it has none; then `environment` alone decides.
    environment: the value of TUNEPLANE_ALLOWED_IMAGE_REGISTRIES, comma-separated, None where it is unset;
        it narrows the site's list and never adds to it. Set and empty, it leaves nothing.

    An empty result allows no user's image. Raises UsageError with every entry that is no `host[:port]`.
    """
    faults: list[Fault] = []
    of_site = None if site is None else _registries(site, SITE_KEY, faults)
    of_user = None if environment is None else _registries(environment.split(","), VARIABLE, faults)
    raise_faults(faults)
    if of_site is None:
        return tuple(of_user or ())
    if of_user is None:
        return tuple(of_site)
    return tuple(registry for registry in of_site if registry in of_user)


def registry_fault(
    reference: Reference, allowed: Sequence[str], contact: str = "", where: str = ""
) -> Fault | None:
    """The refusal of an image whose registry is not, character by character, one of `allowed`.

    contact: whom the site wants to be asked.
    """
    if reference.registry in allowed:
        return None
    whom = contact or "the administrators of this cluster"
    return Fault(
        f"image registry {reference.registry} is not in {VARIABLE}",
        where,
        f"allowed here: {', '.join(allowed) or 'none'}; ask {whom} to add it",
    )


def _registries(entries: Sequence[str], where: str, faults: list[Fault]) -> list[str]:
    found: dict[str, None] = {}
    for entry in entries:
        text = entry.strip(" \t")
        if not text:  # `a,,b`, and the end of `a,b,`
            continue
        try:
            found[parse_registry(text, where)] = None
        except UsageError as error:
            faults.extend(error.faults)
    return list(found)
