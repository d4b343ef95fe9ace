"""Container images on the login side: which one a run starts, whether it may, and its digest.

Submit and validate call `choose_image`, `image_faults` and `prepare_image`; nothing here starts one.
"""

from tuneplane.images.choice import Choice, choose_image
from tuneplane.images.local import is_local, read_sha256
from tuneplane.images.prepare import PreparedImage, Rules, image_faults, prepare_image
from tuneplane.images.reference import Reference, parse_reference
from tuneplane.images.registries import allowed_registries, registry_fault

__all__ = [
    "Choice",
    "PreparedImage",
    "Reference",
    "Rules",
    "allowed_registries",
    "choose_image",
    "image_faults",
    "is_local",
    "parse_reference",
    "prepare_image",
    "read_sha256",
    "registry_fault",
]
