"""Container runtimes as argv builders: what to start, with which environment, from which folder.

The node agent calls `launch`; submit calls `faults` to say beforehand what a runtime cannot be told.
One small module a runtime; none of them keeps state or touches the machine.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType

from tuneplane.containers.container import Container, Launch, Mount
from tuneplane.kernel.errors import Fault, UsageError

__all__ = [
    "NEVER_RUN_HERE",
    "RUNTIMES",
    "SIF",
    "SQUASHFS",
    "Container",
    "Launch",
    "Mount",
    "faults",
    "form_faults",
    "image_form",
    "launch",
    "serves_image",
]

_MODULES: Mapping[str, str] = {
    "apptainer": "apptainer",
    "singularity": "apptainer",
    "enroot": "enroot",
    "pyxis": "pyxis",
    "none": "none",
}
"""Runtime → module of this package. Only the one that a run needs is imported: each costs its start some 2 ms."""

RUNTIMES = tuple(_MODULES)
"""What a cluster profile's `container.runtime` may say."""

NEVER_RUN_HERE = frozenset({"singularity", "enroot", "pyxis"})
"""Runtimes that this project's own tests never start: no Debian has them. `tests/live` does, where they are."""

SIF, SQUASHFS = "sif", "squashfs"

_FORMS: Mapping[str, tuple[str, ...]] = {
    "apptainer": (SIF, SQUASHFS),
    "singularity": (SIF, SQUASHFS),
    "enroot": (SQUASHFS,),
    "pyxis": (SQUASHFS,),
    "none": (),
}
"""What each runtime starts as it is; an image that is built for it has the first form."""

_IMAGE_SERVERS = frozenset({"squashfuse", "squashfuse_ll", "fuse-overlayfs", "fuse2fs", "gocryptfs"})


def launch(
    container: Container,
    argv: Sequence[str],
    env: Mapping[str, str],
    mounts: Sequence[Mount] = (),
    host: Mapping[str, str] | None = None,
) -> Launch:
    """How `argv` is started in `container`.

    env: what the program is to see, byte for byte; it passes no argv (C11). In a container `HOME` and
        `TMPDIR` are `home_dir` and `/tmp` whatever `env` says, and `PATH` is the image's (C10).
        `Launch.files` and `Launch.environ` hold it, so both are as secret as its values are.
    mounts: folders and files of the host; nothing else of it is inside, but what the site's own
        configuration of the runtime adds, and the kernel's `/dev`, `/proc`, `/sys`.
    host: the caller's own environment; the runtime's process gets the few variables of it that it needs,
        the program none.

    Raises UsageError with every fault of `faults`; OperationError where the runtime needs a Slurm job.
    """
    found = faults(container, argv, env, mounts)
    if found:
        raise UsageError(*found)
    result: Launch = _module(container.runtime).launch(container, argv, env, mounts, host or {})
    return result


def faults(
    container: Container, argv: Sequence[str], env: Mapping[str, str], mounts: Sequence[Mount] = ()
) -> list[Fault]:
    """All that this runtime cannot be told of such a start; empty where `launch` would succeed."""
    if container.runtime not in _MODULES:
        what = f"container runtime {container.runtime!r} is not one of {', '.join(RUNTIMES)}"
        return [Fault(what, "cluster.container.runtime")]
    found: list[Fault] = _module(container.runtime).faults(container, argv, env, mounts)
    return found


def _module(runtime: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{_MODULES[runtime]}")


def image_form(runtime: str) -> str:
    """The form in which an image is built for a runtime: SIF or SQUASHFS; empty where there are no images."""
    return next(iter(_FORMS[runtime]), "")


def form_faults(runtime: str, form: str, path: str, where: str = "") -> list[Fault]:
    """Why an image file of this form (SIF or SQUASHFS) cannot be started by this runtime."""
    if form in _FORMS[runtime]:
        return []
    return [
        Fault(
            f"{runtime} starts squashfs files (.sqsh), and {path} is a SIF",
            where,
            "build it again from its registry: enroot import -o NAME.sqsh docker://REGISTRY#IMAGE:TAG",
        )
    ]


def serves_image(process_name: str) -> bool:
    """Whether a process, by its name in /proc/PID/comm, is one that serves the image's files.

    Without setuid Apptainer mounts images by such a child of its own. Whoever ends a container must leave
    it to the last: told to end with the others, it takes the image away while a trainer still saves.
    """
    return process_name in _IMAGE_SERVERS
