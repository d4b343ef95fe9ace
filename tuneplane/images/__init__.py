"""Container images on the login side: which one a run starts, whether it may, and the file that nodes start.

Compile calls `image_faults` and `resolve_image`, submit fetches what that chose; nothing here starts an image.
"""

from tuneplane.images.choice import Choice, choose_image
from tuneplane.images.local import is_local
from tuneplane.images.prepare import ChosenImage, PreparedImage, Rules, image_faults, resolve_image
from tuneplane.images.reference import Reference, parse_reference
from tuneplane.images.registries import allowed_registries, registry_fault

__all__ = [
    "Choice",
    "ChosenImage",
    "PreparedImage",
    "Reference",
    "Rules",
    "allowed_registries",
    "choose_image",
    "image_faults",
    "is_local",
    "parse_reference",
    "registry_fault",
    "resolve_image",
]
