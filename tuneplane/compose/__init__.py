"""Composing the configuration: packaged, site, user and lab files, `SBATCH_*` and flags, into one typed tree.

Compile calls `compose`, the command line also `list_profiles` and `render_config`. The package itself imports
next to nothing, so that completing a profile's name is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuneplane.compose.composed import Composed
    from tuneplane.compose.composition import compose
    from tuneplane.compose.layers import list_profiles
    from tuneplane.compose.mounts import parse_mount
    from tuneplane.compose.render import render_config

__all__ = ["Composed", "compose", "list_profiles", "parse_mount", "render_config"]

_ROOMS = {
    "Composed": "composed",
    "compose": "composition",
    "list_profiles": "layers",
    "parse_mount": "mounts",
    "render_config": "render",
}


def __getattr__(name: str) -> Any:
    """The package's own names, each imported from its module when first asked for (PEP 562)."""
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ROOMS[name]}"), name)
