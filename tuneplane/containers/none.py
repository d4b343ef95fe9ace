"""No container: the program runs on the host as it is. The package's `launch` calls this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuneplane.containers.container import (
    Container,
    Launch,
    Mount,
    argv_faults,
    environment_faults,
    path_faults,
    plain,
)
from tuneplane.kernel.errors import Fault


def launch(
    container: Container,
    argv: Sequence[str],
    env: Mapping[str, str],
    mounts: Sequence[Mount],
    host: Mapping[str, str],
) -> Launch:
    """`argv` and `env` unchanged, `PATH` too; a mount is the folder itself, so `read_only` binds nobody."""
    return Launch(list(argv), dict(env), container.workdir)


def faults(
    container: Container, argv: Sequence[str], env: Mapping[str, str], mounts: Sequence[Mount]
) -> list[Fault]:
    """Mounts that would need a container, and what no program can be given."""
    found = [*argv_faults(argv), *environment_faults(env), *path_faults(container.workdir, "work folder")]
    for mount in mounts:
        if plain(mount.source) != plain(mount.target):
            found.append(
                Fault(
                    f"{mount.source!r} cannot be mounted as {mount.target!r} without a container",
                    "mounts",
                    "use one path for both, or a profile with a container runtime",
                )
            )
    return found
