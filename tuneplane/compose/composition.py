"""The whole of composing on one page: files, environment, flags, locks, rules, in this order.

The package's `compose` is this module's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from tuneplane.compose.composed import Composed
from tuneplane.compose.flags import Flags, add_to_lists, read_flags
from tuneplane.compose.interpolation import resolve
from tuneplane.compose.layers import (
    EXAMPLE,
    PACKAGED,
    TRUSTED,
    Layer,
    find_layers,
    profile_names,
)
from tuneplane.compose.locks import SITE, foreign_site_faults, lock_faults, locked_keys, unknown_lock_faults
from tuneplane.compose.machine import complete
from tuneplane.compose.paths import expand
from tuneplane.compose.reading import Reading, read_profile
from tuneplane.compose.schema import Key, dotted, nearest
from tuneplane.compose.slurm_environment import read_slurm_environment
from tuneplane.compose.tree import MISSING, Statement, Tree, build, built_in, merge
from tuneplane.compose.values import agreement_faults, value_faults
from tuneplane.kernel.errors import Fault, UsageError, raise_faults
from tuneplane.profile import FLAG, parse_profile


def compose(profile: str, *, lab_root: Path | None, flags: Flags, environ: Mapping[str, str]) -> Composed:
    """The configuration of `NAME[:TOTAL_GPUS]`, resolved to plain values.

    flags: dotted key → (flag, value), like `{"cluster.slurm.time": ("--time", "02:00:00")}`; a None is a
        flag that was not given, a list is added to what the files say.
    environ: the user's environment: `SBATCH_*`, what `${oc.env:…}` reads, `HOME`, where files are.

    Raises UsageError with every fault that was found, OperationError where a folder or file is unreadable.
    """
    request = parse_profile(profile)
    layers = find_layers(lab_root, environ)
    _check_profile(layers, request.name)
    reading = read_profile(layers, request.name, environ)
    faults = reading.faults
    given, added = read_flags(flags, faults)
    notices: list[str] = []
    if reading.tree["cluster", "scheduler"].value == "slurm":
        surroundings, notices = read_slurm_environment(environ)
        given = [*surroundings, *given]
    merge(reading.tree, given)
    tree = _plain(reading.tree, added, environ, faults)
    contact = str(tree["site", "contact"].value)

    faults += foreign_site_faults([*reading.said, *given, *added])
    faults += _site_faults(layers, request.name, reading, tree, contact, environ)
    tree_faults = _missing(tree) | value_faults(tree)
    for found in tree_faults.values():
        faults += found
    sound = _reset(tree, tree_faults)
    told = tuple(fault.what for fault in faults)
    if reading.is_whole:
        faults += agreement_faults(build(sound), sound, contact, told)
    raise_faults(sorted(dict.fromkeys(faults), key=_place))
    return Composed(
        request=request,
        config=build(tree),
        origins={dotted(key): statement.where for key, statement in tree.items()},
        layers=layers,
        files=tuple(dict.fromkeys(reading.files)),
        notices=tuple(notices),
    )


def _place(fault: Fault) -> tuple[str, int]:
    """Where a fault stands, to tell the faults of one file from its top to its end."""
    file, _, line = fault.where.rpartition(":")
    return (file, int(line)) if line.isdecimal() else (fault.where, 0)


def _check_profile(layers: tuple[Layer, ...], name: str) -> None:
    """Raises UsageError where no layer has this profile, or it is the documentation's example."""
    owners = [layer for layer in layers if layer.file(f"cluster/{name}") is not None]
    if name == EXAMPLE and [layer.name for layer in owners] == [PACKAGED]:
        path = owners[0].file(f"cluster/{name}")
        raise UsageError(
            Fault(
                "the profile `example` is documentation, not a cluster",
                str(path),
                f"copy it to {_sites_folder(layers)}/cluster/NAME.yaml, edit it there, and ask for NAME",
            )
        )
    if owners:
        return
    known = profile_names(layers)
    wrong = [layer.folder / "cluster" / f"{name}.yml" for layer in layers]
    found = next((path for path in wrong if path.is_file()), None)
    remedy = f"rename {found} to {name}.yaml" if found else nearest(name, known)
    raise UsageError(Fault(f"there is no cluster profile {name!r}", FLAG, remedy))


def _sites_folder(layers: tuple[Layer, ...]) -> Path:
    return next((layer.folder for layer in layers if layer.name == SITE), Path("/etc/tuneplane"))


def _plain(tree: Tree, added: list[Statement], environ: Mapping[str, str], faults: list[Fault]) -> Tree:
    """The tree as plain values: interpolations, this machine's own numbers and homes written out."""
    resolved = resolve(tree, environ, faults)
    for key, default in built_in().items():  # what could not be resolved is a fault; the rest is judged too
        resolved.setdefault(key, replace(default, where=tree[key].where))
    resolved = add_to_lists(resolved, added)
    if resolved["cluster", "scheduler"].value == "local":
        resolved = complete(resolved, environ)
    return expand(resolved, environ, faults)


def _site_faults(
    layers: tuple[Layer, ...],
    profile: str,
    reading: Reading,
    tree: Tree,
    contact: str,
    environ: Mapping[str, str],
) -> list[Fault]:
    """What breaks the site's word: a lock, or a `defaults:` list that leaves the site's files out.

    The site's word is what its own files compose to, for this profile or the one that this profile extends.
    """
    faults = unknown_lock_faults(tree)
    if locked_keys(tree) or reading.choosers:
        trusted = tuple(layer for layer in layers if layer.name in TRUSTED)
        extended = [name for name in reading.clusters if _has(trusted, name)]
        base = profile if _has(trusted, profile) else extended[-1] if extended else None
        ignored: list[Fault] = []  # the same files were judged with all others
        sites = _plain(read_profile(trusted, base, environ).tree, [], environ, ignored)
        locked = [*locked_keys(sites), *([(SITE,)] if reading.choosers else [])]
        faults += lock_faults(sites, tree, locked, contact, reading.choosers)
    return faults


def _has(layers: Iterable[Layer], profile: str) -> bool:
    return any(layer.file(f"cluster/{profile}") is not None for layer in layers)


def _missing(tree: Tree) -> dict[Key, list[Fault]]:
    """Keys that a file marks with `???`, for a later one to fill in, and none does."""
    return {
        key: [Fault(f"{dotted(key)} is still {MISSING}", statement.where, "give it a value")]
        for key, statement in tree.items()
        if statement.value == MISSING
    }


def _reset(tree: Tree, keys: Iterable[Key]) -> Tree:
    """The tree with some keys as built in, where they still say that somebody set them."""
    defaults, result = built_in(), dict(tree)
    for key in keys:
        if key in defaults:
            result[key] = replace(defaults[key], where=tree[key].where)
        else:
            del result[key]
    return result
