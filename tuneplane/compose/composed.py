"""The result of compose: the typed configuration, and where each of its values came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tuneplane.compose.layers import Layer
from tuneplane.profile import ProfileRequest
from tuneplane.site import Config


@dataclass(frozen=True)
class Composed:
    """A configuration resolved to plain values; nothing in it refers to a file any more (C41).

    origins: dotted key → `file:line`, a flag, `$VARIABLE`, `this machine: …` or `built in`.
    layers: where configuration was looked for, later ones with the last word.
    files: every file that was read.
    notices: what the user should know, and what is no fault.
    """

    request: ProfileRequest
    config: Config
    origins: dict[str, str]
    layers: tuple[Layer, ...]
    files: tuple[Path, ...]
    notices: tuple[str, ...] = ()
