"""enroot (3.4 and later), which starts a squashfs as it is. The package's `launch` calls this.

Sources: enroot's doc/cmd/start.md, doc/configuration.md, doc/image-format.md, doc/standard-hooks.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from tuneplane.containers.container import (
    Container,
    Launch,
    Mount,
    argv_faults,
    environment_faults,
    mount_faults,
    path_faults,
    sorted_mounts,
)
from tuneplane.containers.start_script import (
    DEFAULT_PATH,
    ENTER,
    RUN,
    script_faults,
    script_path,
    start_script,
)
from tuneplane.kernel.errors import Fault

FOLDERS = ("RUNTIME", "CACHE", "DATA", "TEMP", "CONFIG")
"""`ENROOT_*_PATH`: where enroot keeps what is its own, by default in the user's home and in /run."""

SETTINGS = {"LOGIN_SHELL": "no", "MOUNT_HOME": "no", "REMAP_ROOT": "no", "ROOTFS_WRITABLE": "no"}
"""`ENROOT_*`: these decide what a command finds, whatever the site's enroot.conf says.

LOGIN_SHELL: with one, /etc/profile of the image takes the place of the image's own PATH.
Not here: UNSHARE_IPC, RESTRICT_DEV and what else a site may decide for all its containers.
"""

_FOR_THE_RUNTIME = ("PATH", "HOME", "USER", "LOGNAME", "TMPDIR")
"""What enroot's own process may have of the host: its configuration may name them."""

HOOKS = re.compile(r"(NVIDIA|MELLANOX)_[A-Z0-9_]+")
"""Variables of the job that enroot's hooks read before anything starts: which devices are inside."""

UNSAYABLE = re.compile(r"""[\s\x00-\x1f\x7f:,'"\\$`]""")
"""Characters that separate fields where enroot writes a path on: in fstab lines, overlay options, bash."""


def launch(
    container: Container,
    argv: Sequence[str],
    env: Mapping[str, str],
    mounts: Sequence[Mount],
    host: Mapping[str, str],
) -> Launch:
    """`enroot start` of the image's file.

    --rc: our script in place of the image's own command script, and so of its entrypoint, as with
        `apptainer exec`. It also takes the place of a working directory, which enroot has no option for.
    Not --rw: what would be written goes to memory. What a program writes goes to the output folder, the home
        or /tmp; a site may add it in `options`.
    Not --env: a value with a line end would become two variables, one in quotes would lose them.
    The host's /dev, with /dev/shm and /dev/infiniband, /proc and /sys come by enroot's own configuration, as
    do the IPC and network namespaces of the host.
    """
    script = script_path(container)
    command = [container.binary or "enroot", "start"]
    for mount in sorted_mounts(container, mounts):
        command += ["--mount", _mount_option(mount)]
    command += [*container.options, "--rc", script, container.image]
    environ = {name: host[name] for name in _FOR_THE_RUNTIME if name in host}
    environ.setdefault("PATH", DEFAULT_PATH)
    environ.update(device_variables(container, env))
    environ.update({f"ENROOT_{name}": value for name, value in SETTINGS.items()})
    environ.update(
        {f"ENROOT_{name}_PATH": f"{container.state_dir}/enroot/{name.lower()}" for name in FOLDERS}
    )
    return Launch(
        [*command, RUN, *argv],
        environ,
        "/",
        files={script: start_script(container, env)},
        enter=[*command, ENTER],
    )


def faults(
    container: Container, argv: Sequence[str], env: Mapping[str, str], mounts: Sequence[Mount]
) -> list[Fault]:
    """All that `launch` could not say to the runtime."""
    return [
        *argv_faults(argv),
        *environment_faults(env),
        *script_faults(env),
        *folder_faults(container, "enroot"),
        *unsayable_faults(container, mounts, "enroot"),
    ]


def device_variables(container: Container, env: Mapping[str, str]) -> dict[str, str]:
    """What enroot's hooks are told of devices: the node's GPUs or none, and whatever the site set."""
    # An image may ask for GPUs itself, and on a node without any the hook would fail.
    values = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    if not container.gpus:
        values = {"NVIDIA_VISIBLE_DEVICES": "void"}
    values.update({name: value for name, value in env.items() if HOOKS.fullmatch(name)})
    return values


def folder_faults(container: Container, runtime: str) -> Iterator[Fault]:
    """The image and the folders that the runtime is told of."""
    if not container.image:
        yield Fault("there is no image to start", "--image")
    else:
        yield from path_faults(container.image, "image")
    yield from path_faults(container.workdir, "work folder")
    yield from path_faults(container.state_dir, "folder of the runtime")
    for path, remedy in (
        (container.image, "rename it"),
        (container.state_dir, "choose another scratch folder in the cluster profile"),
    ):
        if UNSAYABLE.search(path):
            yield Fault(f"{runtime} cannot be given the path {path!r}: {_BECAUSE}", remedy=remedy)


def unsayable_faults(container: Container, mounts: Sequence[Mount], runtime: str) -> Iterator[Fault]:
    """Mounts that are none, and those whose paths would be read as something else."""
    found = sorted_mounts(container, mounts)
    yield from mount_faults(found)
    for mount in found:
        for path in dict.fromkeys((mount.source, mount.target)):
            if UNSAYABLE.search(path):
                yield Fault(
                    f"{runtime} cannot mount {path!r}: {_BECAUSE}",
                    "mounts",
                    "rename it, or use a profile with another container runtime",
                )


_BECAUSE = "white space, quotes and any of : , \\ $ ` have a meaning of their own there"


def _mount_option(mount: Mount) -> str:
    """`--mount`: a line of fstab with colons for blanks. All four fields, so that none is guessed."""
    mode = ",ro" if mount.read_only else ""
    return f"{mount.source}:{mount.target}:none:x-create=auto,rbind{mode}"
