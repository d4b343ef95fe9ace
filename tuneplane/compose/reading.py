"""What the files of some layers say about a profile, merged: later layers over earlier ones.

Within a layer the particular stands over the general: a cluster's file over `defaults.yaml`. Compose reads all
layers so, and the site's alone to know what is locked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tuneplane.compose.document import Document, read_document
from tuneplane.compose.interpolation import secret_faults
from tuneplane.compose.layers import TRUSTED, Layer
from tuneplane.compose.schema import Key
from tuneplane.compose.tree import Statement, Tree, built_in, merge, statements
from tuneplane.kernel.errors import Fault, UsageError

OVERLAY = "defaults"
"""A layer's file that holds for every profile, written from the root."""

_SITE = "site/default"
_CLUSTER = "cluster/"
_NAME: Key = ("cluster", "name")


@dataclass
class Reading:
    """The merged tree; every statement in the order of merging; files read; faults.

    clusters: the cluster configs that take part, the chosen one last.
    choosers: lines of `defaults:` lists that a user's or a lab's file has.
    is_whole: every file was read; else what is left out may stand in one that was not.
    """

    tree: Tree = field(default_factory=built_in)
    said: list[Statement] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    clusters: list[str] = field(default_factory=list)
    choosers: list[str] = field(default_factory=list)
    is_whole: bool = True


@dataclass(frozen=True)
class _Piece:
    """One file's content and the key it lands under."""

    document: Document
    package: Key
    overlay: bool


def read_profile(layers: tuple[Layer, ...], profile: str | None, environ: Mapping[str, str]) -> Reading:
    """All that the layers say about a cluster profile; without one, what they say about all.

    Faults of files and of defaults lists are collected; what could be read is there all the same.
    Raises OperationError where a file is unreadable.
    """
    reading = Reading()
    pieces = _pieces(layers, profile, environ, reading)
    order = {layer.name: index for index, layer in enumerate(layers)}
    pieces.sort(key=lambda piece: (order[piece.document.layer.name], not piece.overlay))
    for piece in pieces:
        document = piece.document
        reading.files.append(document.path)
        reading.faults.extend(secret_faults(document))
        reading.said += statements(document, piece.package, reading.faults)
        if document.defaults is not None and document.layer.name not in TRUSTED:
            reading.choosers.append(document.where(document.defaults))
    reading.faults += [_name_fault(said) for said in reading.said if _is_misnamed(said)]
    merge(reading.tree, reading.said)
    if profile is not None:
        reading.tree[_NAME] = Statement(_NAME, profile, "--profile", "profile")
    return reading


def _pieces(
    layers: tuple[Layer, ...], profile: str | None, environ: Mapping[str, str], reading: Reading
) -> list[_Piece]:
    from tuneplane.compose.selection import Part, readers, select_parts

    try:
        parts = select_parts(layers, profile, environ)
    except UsageError as error:
        # The lists cannot be followed; the files that are surely meant are judged all the same.
        reading.faults.extend(error.faults)
        parts = [Part(OVERLAY, ()), Part(_SITE, ("site",))]
        if profile is not None:
            parts.append(Part(_CLUSTER + profile, ("cluster",)))
    pieces: list[_Piece] = []
    for part in parts:
        found = _documents(readers(layers, part.config), part.config, reading)
        packages = {document.package for document in found}
        if len(packages) > 1:
            what = f"the layers' files of {part.config} differ in their `# @package` lines"
            reading.faults.append(Fault(what, ", ".join(str(document.path) for document in found)))
        if part.config.startswith(_CLUSTER):
            reading.clusters.append(part.config.removeprefix(_CLUSTER))
        pieces += [_Piece(document, part.package, part.config == OVERLAY) for document in found]
    return pieces


def _documents(layers: tuple[Layer, ...], config: str, reading: Reading) -> list[Document]:
    found = []
    for layer in layers:
        path = layer.file(config)
        if path is not None:
            try:
                found.append(read_document(path, layer))
            except UsageError as error:
                reading.faults.extend(error.faults)
                reading.is_whole = False
    return found


def _is_misnamed(said: Statement) -> bool:
    return said.key == _NAME and Path(said.where.rpartition(":")[0]).stem != said.value


def _name_fault(said: Statement) -> Fault:
    return Fault(
        f"cluster.name is {said.value!r}: a profile is called as its file is",
        said.where,
        "take the key out, or rename the file",
    )
