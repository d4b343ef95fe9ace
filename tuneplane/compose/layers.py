"""The folders that configuration comes from, in the order of who has the last word.

Compose looks files up in them; completion lists their cluster profiles without importing Hydra.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.packaged import packaged_configs
from tuneplane.profile import is_profile_name

SITE_FOLDER = Path("/etc/tuneplane")
SITE_VARIABLE = "TUNEPLANE_CONFIG_DIR"

PACKAGED, SITE, USER, LAB = "packaged", "site", "user", "lab"
TRUSTED = (PACKAGED, SITE)
"""Layers whose word on `site.*` and on locked keys is the site's."""

EXAMPLE = "example"
"""The packaged cluster profile that is documentation: not listed, not usable."""


@dataclass(frozen=True)
class Layer:
    """One folder of configuration. An absent folder is a layer that says nothing."""

    name: str
    folder: Path
    present: bool = True

    def file(self, config: str) -> Path | None:
        """This layer's file of a config such as `cluster/h200`; None where it has none, or it lies outside.

        Raises OperationError where the folder cannot be searched.
        """
        parts = PurePosixPath(config).parts
        if not self.present or not parts or config.startswith("/") or ".." in parts:
            return None
        path = self.folder.joinpath(*parts[:-1], f"{parts[-1].removesuffix('.yaml')}.yaml")
        return path if _exists(path) else None

    def group(self, name: str) -> list[str]:
        """Names of the configs in one of this layer's groups, sorted. Raises OperationError."""
        if not self.present:
            return []
        try:
            names = os.listdir(self.folder / name)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _unreadable(self.folder / name, error) from None
        return sorted(n.removesuffix(".yaml") for n in names if n.endswith(".yaml") and not n.startswith("."))


def find_layers(lab_root: Path | None, environ: Mapping[str, str]) -> tuple[Layer, ...]:
    """Packaged, site, user and lab, later ones with the last word; a folder that comes twice counts once.

    Raises UsageError where `$TUNEPLANE_CONFIG_DIR` names no folder, OperationError where one is unreadable.
    """
    wanted = [
        Layer(PACKAGED, packaged_configs()),
        Layer(SITE, _site_folder(environ)),
        Layer(USER, _user_folder(environ)),
    ]
    if lab_root is not None:
        wanted.append(Layer(LAB, lab_root / "configs"))
    layers: list[Layer] = []
    for layer in wanted:
        present = _is_folder(layer.folder)
        if present and any(other.present and layer.folder.samefile(other.folder) for other in layers):
            continue
        layers.append(Layer(layer.name, layer.folder, present))
    return tuple(layers)


def list_profiles(lab_root: Path | None, environ: Mapping[str, str]) -> list[str]:
    """Names of all cluster profiles, sorted. Raises UsageError, OperationError."""
    return profile_names(find_layers(lab_root, environ))


def profile_names(layers: tuple[Layer, ...]) -> list[str]:
    """Names of the cluster profiles in `layers`; `_parts.yaml` and the example are none."""
    names = {name for layer in layers for name in layer.group("cluster") if is_profile_name(name)}
    return sorted(names - {EXAMPLE})


def home(environ: Mapping[str, str]) -> Path:
    """The user's home: `$HOME`, else what the password database says."""
    return Path(environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir)


def _site_folder(environ: Mapping[str, str]) -> Path:
    said = environ.get(SITE_VARIABLE)
    if not said:
        return SITE_FOLDER
    folder = Path(said)
    if not folder.is_absolute() or not _is_folder(folder):
        raise UsageError(
            Fault(
                f"{said!r} is not an absolute path of a folder",
                f"${SITE_VARIABLE}",
                f"name your site's configuration folder, or unset {SITE_VARIABLE}",
            )
        )
    return folder


def _user_folder(environ: Mapping[str, str]) -> Path:
    # The XDG base directory specification: a relative path here is to be ignored.
    said = environ.get("XDG_CONFIG_HOME", "")
    return (Path(said) if said.startswith("/") else home(environ) / ".config") / "tuneplane"


def _is_folder(path: Path) -> bool:
    """Whether a folder is there and readable. Raises OperationError where it is there and is not."""
    try:
        with os.scandir(path):
            return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(path, error) from None


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(path, error) from None
    return True


def _unreadable(path: Path, error: OSError) -> OperationError:
    return OperationError(
        Fault(
            f"cannot be read: {error.strerror or error}",
            str(path),
            "its owner gives you the right to read it (folders need r and x)",
        )
    )
