"""Which configs make up a profile, and where their content lands: Hydra's defaults lists over all layers.

Imports Hydra, so compose imports this module late. Hydra sees the layers as one tree: a config's `defaults:`
list is that of the last layer whose file has one, and every layer's file of that name contributes its keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

from hydra import __version__ as hydra_version
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from packaging.version import Version

from tuneplane.compose.document import DEFAULTS, Document, plain, read_document
from tuneplane.compose.interpolation import SECRET_REMEDY, SecretRefused, environment
from tuneplane.compose.layers import PACKAGED, Layer
from tuneplane.compose.schema import Key, nearest
from tuneplane.kernel.errors import Fault, UsageError

PRIMARY = "config"
"""The packaged file whose defaults list is the root. No other layer has a say in it: a lab's own
`configs/config.yaml` is its trainer's."""

HYDRA_VERSION_BASE = "1.3"

_NAMED_IN_ERROR = re.compile(r"[Ii]n '?([^\s':]+)'?:")


@dataclass(frozen=True)
class Part:
    """One config, `cluster/h200`, and the key under which its content lands."""

    config: str
    package: Key


def select_parts(layers: tuple[Layer, ...], profile: str | None, environ: Mapping[str, str]) -> list[Part]:
    """The configs of a cluster profile in Hydra's order, later over earlier; without one, the site's alone.

    Raises UsageError where a defaults list cannot be followed.
    """
    choice = "~cluster" if profile is None else f"cluster='{profile}'"
    with _version_base(), environment(environ):
        Plugins.instance().register(LayeredSource)
        loader = ConfigLoaderImpl(create_config_search_path(LayeredSource.address(layers)))
        try:
            chosen = loader.compute_defaults_list(PRIMARY, [choice], RunMode.RUN)
        except (
            HydraException,
            OmegaConfBaseException,
            ValueError,
            TypeError,
            AssertionError,
            RecursionError,
            SecretRefused,
        ) as error:
            raise UsageError(_fault(layers, profile, error)) from error
    parts = [Part(default.config_path or "", _key(default.package)) for default in chosen.defaults]
    return [part for part in parts if part.config != PRIMARY and not part.config.startswith("hydra/")]


class LayeredSource(ConfigSource):
    """Hydra's view of the layers: what a config is there, and its defaults list; its keys are read later."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider=provider, path=path)
        pairs = [part.partition("=") for part in self.path.split(":")]
        self.layers = tuple(
            Layer(name, Path(os.fsdecode(unquote_to_bytes(folder)))) for name, _, folder in pairs
        )

    @staticmethod
    def scheme() -> str:
        return "tuneplane"

    @staticmethod
    def address(layers: tuple[Layer, ...]) -> str:
        """The layers as a search path entry. Hydra makes sources from text alone."""
        named = [
            f"{layer.name}={quote(os.fsencode(layer.folder), safe='/')}" for layer in layers if layer.present
        ]
        return f"{LayeredSource.scheme()}://{':'.join(named)}"

    def load_config(self, config_path: str) -> ConfigResult:
        defaults, package = None, None
        for document in readable(self.layers, config_path):
            if document.defaults is not None:
                defaults = plain(document.defaults)
            package = document.package or package
        content = {} if defaults is None else {"defaults": defaults}
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(content), {"package": package})

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return any((layer.folder / config_path).is_dir() for layer in self.layers)

    def is_config(self, config_path: str) -> bool:
        return any(layer.file(config_path) is not None for layer in readers(self.layers, config_path))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if results_filter == ObjectType.GROUP:
            return []
        return sorted({name for layer in self.layers for name in layer.group(config_path)})


def readers(layers: tuple[Layer, ...], config: str) -> tuple[Layer, ...]:
    """The layers whose file of a config counts."""
    return tuple(layer for layer in layers if config != PRIMARY or layer.name == PACKAGED)


def readable(layers: tuple[Layer, ...], config: str) -> list[Document]:
    """Every layer's file of a config, in order; one with faults is passed over: its reader tells them."""
    found = []
    for layer in readers(layers, config):
        path = layer.file(config)
        if path is not None:
            with suppress(UsageError):
                found.append(read_document(path, layer))
    return found


def _key(package: str | None) -> Key:
    return tuple(part for part in (package or "").split(".") if part and part != "_global_")


def _fault(layers: tuple[Layer, ...], profile: str | None, error: BaseException) -> Fault:
    """Hydra's complaint with the file and line of the defaults list that it is about."""
    text = " ".join(str(error).split("\nConfig search path:", maxsplit=1)[0].split())
    named = _NAMED_IN_ERROR.search(text)
    where = _where(layers, named[1] if named else f"cluster/{profile}")
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, SecretRefused):
            what = f"{DEFAULTS} interpolates {cause}, whose name says that it is a secret"
            return Fault(what, where, SECRET_REMEDY)
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, RecursionError):
        remedy = "files of one name add up by themselves, folder over folder: take the name out"
        return Fault(f"{DEFAULTS} leads back to itself", where, remedy)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = [option for option in error.options or [] if option]
        remedy = nearest(name, options) if options else ""
        return Fault(
            f"{DEFAULTS} names {group}/{name}, and no layer has a {group}/{name}.yaml", where, remedy
        )
    return Fault(f"{DEFAULTS} cannot be followed: {text or type(error).__name__}", where)


def _where(layers: tuple[Layer, ...], config: str) -> str:
    """The line of the defaults list of a config: that of the last layer that has one."""
    where = config
    for document in readable(layers, config):
        if document.defaults is not None:
            where = document.where(document.defaults)
    return where


@contextmanager
def _version_base() -> Iterator[None]:
    """Hydra's behaviour of one version, whatever a program around us chose; its choice is put back.

    From Hydra 1.4 on there is nothing to choose.
    """
    if Version(hydra_version).release >= (1, 4):
        yield
        return
    chosen = version.getbase()
    version.setbase(HYDRA_VERSION_BASE)
    try:
        yield
    finally:
        if isinstance(chosen, Version):
            version.VersionBase.instance().setbase(chosen)
