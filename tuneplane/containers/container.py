"""What a container is, in words that every runtime understands. Shared by the runtimes of this package."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tuneplane.kernel.errors import Fault

ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Mount:
    """A folder or file of the host, `source`, seen as `target` inside; both absolute."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Container:
    """One node's container of one attempt. Folders are absolute paths of the host and exist.

    runtime: a name of `RUNTIMES`.
    image: the image's file.
    options: what the site always passes to the runtime, one argument an item.
    gpus: make the node's NVIDIA GPUs and their driver visible.
    workdir: working directory of the program; in a container a path inside it.
    tmp_dir: writable, of this attempt: `/tmp` and `/var/tmp` of the container.
    home_dir: writable, of this attempt: the container's home, under the same path.
    state_dir: writable, of this attempt, node-local: the runtime's own files, `Launch.files` among them.
    log: file that the program's output is appended to, where the runtime does not pass its own output on.
    binary: the runtime's program, a name or a path; empty: the runtime's own name.
    """

    runtime: str
    image: str = ""
    options: Sequence[str] = ()
    gpus: bool = False
    workdir: str = "/"
    tmp_dir: str = ""
    home_dir: str = ""
    state_dir: str = ""
    log: str = ""
    binary: str = ""


@dataclass(frozen=True)
class Launch:
    """What the node agent starts: `argv` with exactly `environ`, from the folder `cwd`.

    files: path → text of what must be there first, readable by its owner alone.
    enter: what stands before another command to run it beside this one, in the same surroundings.
    terminal: an option to put behind the first word of `enter` where that command has a terminal.
    leader: first words of the process that leads the command, where that is no child of what `argv` starts.
    """

    argv: list[str]
    environ: dict[str, str] = field(repr=False)  # holds secrets: never printed by accident
    cwd: str = "/"
    files: dict[str, str] = field(default_factory=dict, repr=False)  # likewise
    enter: list[str] = field(default_factory=list)
    terminal: str = ""
    leader: list[str] = field(default_factory=list)


def argv_faults(argv: Sequence[str]) -> Iterator[Fault]:
    """What no runtime can start."""
    if not argv or not argv[0]:
        yield Fault("there is no command to start")
    for argument in argv:
        if "\0" in argument:
            yield Fault(f"the argument {argument!r} holds a NUL byte")


def environment_faults(env: Mapping[str, str]) -> Iterator[Fault]:
    """Names and values that no environment can hold. Values are never shown: they may be secrets."""
    for name, value in env.items():
        if not ENVIRONMENT_NAME.fullmatch(name):
            yield Fault(
                f"{name!r} is no name of an environment variable",
                remedy="letters, digits and underscores, not a digit first",
            )
        if "\0" in value:
            yield Fault(f"the value of {name} holds a NUL byte")


def path_faults(path: str, what: str) -> Iterator[Fault]:
    """A path that is not absolute, or not as plain as it looks."""
    if not path.startswith("/"):
        yield Fault(f"{what} {path!r} is not an absolute path")
    elif ".." in path.split("/"):
        yield Fault(f"{what} {path!r} holds '..'", remedy="write the path out")
    if "\0" in path:
        yield Fault(f"{what} {path!r} holds a NUL byte")


def sorted_mounts(container: Container, mounts: Sequence[Mount]) -> list[Mount]:
    """The mounts and the container's own folders, outer ones first, so that none hides another."""
    own = []
    if container.tmp_dir:
        own += [Mount(container.tmp_dir, "/tmp"), Mount(container.tmp_dir, "/var/tmp")]
    if container.home_dir:
        own.append(Mount(container.home_dir, container.home_dir))
    return sorted(dict.fromkeys([*own, *mounts]), key=lambda mount: plain(mount.target).count("/"))


def mount_faults(mounts: Sequence[Mount]) -> Iterator[Fault]:
    """What no runtime can mount."""
    taken: dict[str, Mount] = {}
    for mount in mounts:
        yield from path_faults(mount.source, "mount source")
        yield from path_faults(mount.target, "mount target")
        target = plain(mount.target)
        if target == "/":
            yield Fault(f"{mount.source!r} cannot be mounted as /: that is the image", "mounts")
        elif target in taken:
            yield Fault(
                f"{taken[target].source!r} and {mount.source!r} are both to be mounted as {target!r}",
                "mounts",
                "give one of them another target",
            )
        taken[target] = mount


def plain(path: str) -> str:
    """An absolute path without doubled, leading or trailing slashes, to compare with others."""
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))


def is_utf8(text: str) -> bool:
    """Whether `text` is Unicode, not bytes that os.fsdecode had to escape."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
