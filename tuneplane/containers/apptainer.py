"""Apptainer (1.1 and later) and SingularityCE (3.10 and later). The package's `launch` calls this.

Every option below was measured on Apptainer 1.4.5; the tests hold what each one keeps out or lets in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tuneplane.containers.container import (
    Container,
    Launch,
    Mount,
    argv_faults,
    environment_faults,
    is_utf8,
    mount_faults,
    path_faults,
    sorted_mounts,
)
from tuneplane.containers.start_script import (
    BEFORE_THE_IMAGES,
    ENTER,
    RUN,
    script_faults,
    script_path,
    start_script,
)
from tuneplane.kernel.errors import Fault

_FROM_IMAGE = ("PATH", "HOME", "TMPDIR")
"""Not taken from `env`: PATH is the image's (C10), the other two are folders of the container."""

_FOR_THE_RUNTIME = (
    "PATH",
    "HOME",
    "TMPDIR",
    "XDG_RUNTIME_DIR",
    "APPTAINER_CACHEDIR",
    "APPTAINER_CONFIGDIR",
    "APPTAINER_TMPDIR",
    "SINGULARITY_CACHEDIR",
    "SINGULARITY_CONFIGDIR",
    "SINGULARITY_TMPDIR",
)
"""What the runtime's own process may have of the host. Nothing else: `APPTAINER_BIND` and its like would
change the container, and the proxies' variables pass into it in spite of `--cleanenv`."""

_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The runtime looks for squashfuse, fusermount and ldconfig on its PATH, and so has one."""

_UNSAYABLE = frozenset(
    (
        *("GID", "PROMPT_COMMAND", "PREPEND_PATH", "APPEND_PATH"),
        *("SING_USER_DEFINED_PATH", "SING_USER_DEFINED_PREPEND_PATH", "SING_USER_DEFINED_APPEND_PATH"),
        *("e", "key", "__exported_env__", "__apptainer_cmd__", "__singularity_cmd__", "__script__"),
    )
)
"""Names that the runtime's start script keeps, changes or drops, so that they cannot arrive as given."""

_OWN_PREFIXES = ("APPTAINER_", "APPTAINERENV_", "SINGULARITY_", "SINGULARITYENV_")


def launch(
    container: Container,
    argv: Sequence[str],
    env: Mapping[str, str],
    mounts: Sequence[Mount],
    host: Mapping[str, str],
) -> Launch:
    """`apptainer exec` of the image's file.

    --no-eval: else values of variables are evaluated by a shell, `$(…)` and all; a runtime too old to know
        it stops there, which is better than running them.
    --no-mount: neither the host's home, /tmp, /var/tmp nor the working directory is inside. Not --contain:
        its bare /dev has no /dev/infiniband, and its /dev/shm is half as large as the host's.
    --home: the home that /etc/passwd names inside. The folder itself is a mount like the others: where it
        lies below /tmp, the mount of /tmp would otherwise hide it.
    start script: an image may set HOME in its own environment, and the runtime lets no variable change it;
        a variable takes the place of the image's, and PYTHONPATH is to go before it; and the image goes when
        the first process does.
    Not --writable-tmpfs: it is limited to 64 MiB and fails on nodes without an overlay filesystem. What a
        program writes goes to the output folder, the home or /tmp; a site may add it in `options`.
    PID, IPC and network namespaces stay the host's: NVML, NCCL and rendezvous addresses need them.
    """
    program = container.binary or container.runtime
    # --quiet leaves warnings and errors, and keeps notes on missing FUSE programs out of users' logs.
    command = [program, "--quiet", "exec", "--cleanenv", "--no-eval", "--no-mount", "home,tmp,cwd,hostfs"]
    if container.home_dir:
        command += ["--home", container.home_dir]
    command += ["--pwd", container.workdir]
    if container.gpus:
        command.append("--nv")
    for mount in _all_mounts(container, mounts):
        command += ["--mount", _mount_option(mount)]
    script = script_path(container)
    command += [*container.options, container.image, "/bin/sh", script]
    prefix = "SINGULARITYENV_" if _is_singularity(container) else "APPTAINERENV_"
    environ = {name: host[name] for name in _FOR_THE_RUNTIME if name in host}
    environ.setdefault("PATH", _DEFAULT_PATH)
    by_script = {name: value for name, value in env.items() if name in BEFORE_THE_IMAGES}
    unseen = {n: value for n, value in env.items() if n not in _FROM_IMAGE and n not in by_script}
    environ.update({prefix + name: value for name, value in unseen.items()})
    # From /, so that no folder of the host is the working directory of a runtime that mounts it regardless.
    files = {script: start_script(container, by_script)}
    return Launch([*command, RUN, *argv], environ, "/", files, [*command, ENTER])


def faults(
    container: Container, argv: Sequence[str], env: Mapping[str, str], mounts: Sequence[Mount]
) -> list[Fault]:
    """All that `launch` could not say to the runtime."""
    return [
        *argv_faults(argv),
        *_argv_faults(argv),
        *environment_faults(env),
        *_environment_faults(env),
        *script_faults(env),
        *_folder_faults(container),
        *_mount_faults(_all_mounts(container, mounts)),
    ]


def _is_singularity(container: Container) -> bool:
    """SingularityCE reads SINGULARITYENV_ alone; an Apptainer of that name reads both."""
    program = container.binary.rpartition("/")[2] or container.runtime
    return program.startswith("singularity")


def _all_mounts(container: Container, mounts: Sequence[Mount]) -> list[Mount]:
    script = script_path(container)
    return sorted_mounts(container, [*mounts, Mount(script, script, read_only=True)])


def _mount_option(mount: Mount) -> str:
    """The value of `--mount`: CSV, so that colons, commas, quotes and line ends in paths stay."""
    fields = ["type=bind", f"source={mount.source}", f"destination={mount.target}"]
    if mount.read_only:
        fields.append("ro")
    return ",".join('"' + f.replace('"', '""') + '"' if set(f) & set(',"\n ') else f for f in fields)


def _argv_faults(argv: Sequence[str]) -> Iterator[Fault]:
    for argument in argv:
        if not is_utf8(argument):
            yield Fault(f"Apptainer cannot be given the argument {argument!r}: it is not UTF-8")


def _environment_faults(env: Mapping[str, str]) -> Iterator[Fault]:
    for name, value in env.items():
        if name in _UNSAYABLE or name.startswith(_OWN_PREFIXES):
            yield Fault(
                f"the variable {name} is Apptainer's own and cannot be set in a container",
                remedy="give it another name",
            )
        if not is_utf8(value):
            yield Fault(f"the value of {name} is not UTF-8: Apptainer would change it")


def _folder_faults(container: Container) -> Iterator[Fault]:
    if not container.image:
        yield Fault("there is no image to start", "--image")
    else:
        yield from path_faults(container.image, "image")
    yield from path_faults(container.workdir, "work folder")
    yield from path_faults(container.state_dir, "folder of the runtime")
    for path in (container.image, container.workdir):
        if not is_utf8(path):
            yield Fault(f"Apptainer cannot be given the path {path!r}: it is not UTF-8")
    if ":" in container.home_dir:
        yield Fault(
            f"Apptainer cannot be given the home {container.home_dir!r}: it would split it at the colon",
            remedy="choose a scratch folder without a colon in the cluster profile",
        )


def _mount_faults(mounts: Sequence[Mount]) -> Iterator[Fault]:
    yield from mount_faults(mounts)
    for mount in mounts:
        for path in (mount.source, mount.target):
            if "\r" in path or not is_utf8(path):
                yield Fault(f"Apptainer cannot mount {path!r}: a carriage return or bytes that are not UTF-8")
