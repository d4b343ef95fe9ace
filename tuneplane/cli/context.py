"""What commands start from: the lab around the working directory, the catalog, the caches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuneplane.compose import Composed
    from tuneplane.lab.marker import Lab
    from tuneplane.recipes.catalog import Catalog


def lab_here(folder: str | None = None) -> Lab:
    """The lab around `folder`, else around the working directory. Raises UsageError."""
    from tuneplane.lab.marker import find_lab

    return find_lab(Path(folder) if folder else Path.cwd())


def site_folder() -> Path:
    """The site's configuration: `$TUNEPLANE_CONFIG_DIR`, else `/etc/tuneplane`."""
    return Path(os.environ.get("TUNEPLANE_CONFIG_DIR") or "/etc/tuneplane")


def load_methods() -> Catalog:
    """The catalog: packaged recipes and the site's own."""
    from tuneplane.packaged import packaged_configs
    from tuneplane.recipes.catalog import load_catalog

    return load_catalog([packaged_configs(), site_folder()])


def compose_here(profile: str) -> Composed:
    """The configuration of `NAME[:TOTAL_GPUS]` as a submit from this folder has it. Raises UsageError."""
    from tuneplane.compose import compose
    from tuneplane.lab.marker import marked_folder

    return compose(profile, lab_root=marked_folder(Path.cwd()), flags={}, environ=os.environ)


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/tuneplane`, else `~/.cache/tuneplane`."""
    told = Path(os.environ.get("XDG_CACHE_HOME") or "")
    # A relative one is to be ignored (XDG Base Directory Specification); it would lie in the lab.
    return (told if told.is_absolute() else Path.home() / ".cache") / "tuneplane"
