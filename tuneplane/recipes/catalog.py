"""The published catalog: which methods there are, in which folders, and the scaffold of each.

`tp methods`, `tp new`, compile and the lock's checks ask it. Only the packaged tree and the site's are
searched: a recipe is its publisher's, and no lab can change one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuneplane.kernel.digests import Entry, sha256_bytes, tree_digest
from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.recipes.documents import read_document
from tuneplane.recipes.manifest import METHOD, recipe_of
from tuneplane.recipes.names import remedy_for
from tuneplane.recipes.recipe import Recipe

SCAFFOLD_SUFFIX = ".scaffold"
_COMPILED = ("__pycache__",)  # pip compiles what it installs, scaffolds too


@dataclass(frozen=True)
class ScaffoldFile:
    """A file of a scaffold. path: relative, `/`-separated. It is executable where it starts with `#!`."""

    path: str
    content: bytes

    @property
    def executable(self) -> bool:
        return self.content.startswith(b"#!")


@dataclass(frozen=True)
class Scaffold:
    """What `tp new` copies. `{{experiment}}` and `{{method}}` stand for the new experiment's own."""

    files: tuple[ScaffoldFile, ...]

    @property
    def digest(self) -> str:
        """Digest of the template, whatever the umask of whoever installed it."""
        return tree_digest(
            Entry(f.path, "file", 0o755 if f.executable else 0o644, len(f.content), sha256_bytes(f.content))
            for f in self.files
        )

    def filled(self, experiment: str, method: str) -> tuple[ScaffoldFile, ...]:
        """The files of a new experiment."""
        words = {b"{{experiment}}": experiment.encode(), b"{{method}}": method.encode()}
        filled = []
        for file in self.files:
            content = file.content
            for word, value in words.items():
                content = content.replace(word, value)
            filled.append(ScaffoldFile(file.path, content))
        return tuple(filled)


@dataclass(frozen=True)
class Catalog:
    """Methods by name. manifests: of each method, the file that the last folder holds; folders: in order."""

    folders: tuple[Path, ...]
    manifests: Mapping[str, Path]

    def methods(self) -> list[str]:
        """Every method's name, sorted."""
        return sorted(self.manifests)

    def get(self, method: str) -> Recipe:
        """The recipe of that name. Raises UsageError: unknown (with the nearest), or a wrong manifest."""
        if method not in self.manifests:
            remedy = remedy_for(method, self.manifests, f"methods: {', '.join(self.methods()) or 'none'}")
            raise UsageError(Fault(f"there is no method {method}", "", remedy))
        return recipe_of(read_document(self.manifests[method]), method)

    def find(self, method: str) -> Recipe | None:
        """The recipe of that name, None where the catalog has none. Raises UsageError where it is wrong."""
        return self.get(method) if method in self.manifests else None

    def scaffold(self, recipe: Recipe) -> Scaffold:
        """The recipe's scaffold, of the last folder that has one. Raises UsageError, OperationError."""
        framework, _, name = recipe.scaffold.partition("/")
        for folder in reversed(self.folders):
            place = folder / "recipe" / framework / f"{name}{SCAFFOLD_SUFFIX}"
            if place.is_dir():
                return _read_scaffold(place, recipe)
        raise UsageError(
            Fault(
                f"the catalog has no scaffold for {recipe.scaffold}",
                str(self.manifests.get(recipe.id, recipe.id)),
                f"put it beside the manifest: recipe/{recipe.scaffold}{SCAFFOLD_SUFFIX}/",
            )
        )


def load_catalog(folders: Sequence[Path]) -> Catalog:
    """The catalog of configuration folders, later ones shadowing earlier ones: packaged, then the site's.

    Only lists; manifests are read when asked for, so that a broken one stops nobody else. A folder that does
    not exist or has no `recipe/` adds nothing. Raises OperationError where one cannot be read.
    """
    manifests: dict[str, Path] = {}
    for folder in folders:
        root = folder / "recipe"
        try:
            frameworks = [f for f in sorted(root.iterdir()) if f.is_dir()] if root.is_dir() else []
            files = [file for f in frameworks for file in sorted(f.iterdir()) if file.suffix == ".yaml"]
        except OSError as error:
            raise OperationError(Fault(f"cannot be read: {error.strerror}", str(error.filename))) from None
        for file in files:
            method = f"{file.parent.name}/{file.stem}"
            if METHOD.fullmatch(method):
                manifests[method] = file
    return Catalog(tuple(folders), manifests)


def _read_scaffold(place: Path, recipe: Recipe) -> Scaffold:
    """The files below a scaffold folder; links are not followed."""
    files = []
    try:
        for parent, folders, names in os.walk(place):
            folders[:] = [f for f in folders if f not in _COMPILED]
            for name in names:
                path = Path(parent) / name
                if not path.is_symlink() and not name.endswith(".pyc"):
                    files.append(ScaffoldFile(path.relative_to(place).as_posix(), path.read_bytes()))
    except OSError as error:
        raise OperationError(Fault(f"cannot be read: {error.strerror}", str(error.filename))) from None
    present = {f.path for f in files}
    entry = [recipe.entrypoint.value] if recipe.entrypoint.kind == "experiment" else []
    faults = [
        Fault(f"the scaffold has no {name}", str(place))
        for name in (*entry, "config.yaml", "README.md")
        if name not in present
    ]
    if "recipe.lock.json" in present:
        faults.append(Fault("a scaffold holds no recipe.lock.json: tp new writes it", str(place)))
    if faults:
        raise UsageError(*faults)
    return Scaffold(tuple(sorted(files, key=lambda f: f.path)))
