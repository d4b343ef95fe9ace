"""The commands of ``testbed``: parse, call, print. What they do is in the modules named for it."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import catalog
import cluster
import hosts
import images
import wheel
from layout import CONTROLLER, NODES, USERS, Layout, TestbedError, read_layout

#: Exit code where the testbed itself refused or failed, apart from what the command inside did (as env(1)).
EXIT_FAILED = 125

DESCRIPTION = """\
A real Slurm of four hosts on this machine: a controller, which is also the login host, and the nodes n1 to n4
with eight (fake) H200 each. README.md beside this program has examples.
"""


def say(text: str) -> None:
    print(f"testbed: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def locked(layout: Layout, name: str = "lock") -> Iterator[None]:
    """One command at a time changes a testbed or the cache; others wait."""
    layout.cache.mkdir(parents=True, exist_ok=True)
    with (layout.cache / name).open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def parse_env(words: Sequence[str]) -> dict[str, str]:
    """``K=V``, or ``K`` alone for its value in this process, which keeps a value out of every argument list."""
    values = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name:
            raise TestbedError(f"--env {word!r} has no name")
        if not equals:
            if name not in os.environ:
                raise TestbedError(f"--env {name}: there is no such variable here, and no value was given")
            value = os.environ[name]
        values[name] = value
    return values


def parse_changes(words: Sequence[str]) -> dict[str, str]:
    changes = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isalnum() or "\n" in value:
            raise TestbedError(f"{word!r} is no KEY=VALUE of slurm.conf")
        changes[name] = value
    return changes


def execute(layout: Layout, host: str, arguments: argparse.Namespace) -> None:
    """Become the command inside a host; comes back only by an exception."""
    if not arguments.argv:
        raise TestbedError("give a command after --")
    if arguments.user != "root" and arguments.user not in USERS:
        raise TestbedError(f"there is no user {arguments.user!r}: take root, {', '.join(USERS)}")
    values = parse_env(arguments.env)
    if arguments.env_fd is not None:
        os.lseek(arguments.env_fd, 0, os.SEEK_SET)
        with os.fdopen(arguments.env_fd, encoding="utf-8") as source:
            values.update(json.load(source))
    environment = hosts.environment_for(layout, arguments.user, values)
    command = hosts.enter_command(
        hosts.find_host(layout, host), arguments.argv, arguments.user, arguments.cwd or environment["HOME"]
    )
    sys.stdout.flush()
    os.umask(0o022)
    os.execve(shutil.which(command[0]) or command[0], command, environment)


def add_inside_options(parser: argparse.ArgumentParser, user: str) -> None:
    parser.add_argument("--user", default=user, help="root, " + ", ".join(USERS) + f" (default {user})")
    parser.add_argument(
        "--env", action="append", default=[], metavar="K[=V]", help="on top of a fresh login's"
    )
    parser.add_argument(
        "--env-fd", type=int, metavar="N", help="read more of it from a JSON file open as descriptor N"
    )
    parser.add_argument("--cwd", metavar="DIR", help="default: the user's home")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="testbed", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="start what does not run yet")
    up.add_argument("--no-accounting", action="store_true", help="without MariaDB, slurmdbd and sacct")
    commands.add_parser("down", help="end everything and remove the state folder; the cache stays")
    commands.add_parser("status", help="what runs and how to reach it; exit 1 where something is missing")
    inside = commands.add_parser(
        "exec",
        usage="testbed exec [OPTIONS] -- CMD…",
        help="run a command on the login host as an ordinary user",
    )
    add_inside_options(inside, "alice")
    shell = commands.add_parser("shell", help="a login shell on the login host")
    shell.add_argument("user", nargs="?", default="alice")
    node = commands.add_parser(
        "node-exec",
        usage="testbed node-exec NODE [OPTIONS] -- CMD…",
        help="run a command on a node, outside any job",
    )
    node.add_argument("node", choices=NODES)
    add_inside_options(node, "root")
    for name, text in (("cut", "cut a node off the network"), ("join", "end its cut")):
        commands.add_parser(name, help=text).add_argument("node", choices=NODES)
    commands.add_parser("restart-controller", help="end slurmctld and start it again")
    accounting = commands.add_parser("accounting", help="switch slurmctld between slurmdbd and no accounting")
    accounting.add_argument("state", choices=("on", "off"))
    change = commands.add_parser("set", help="change values of slurm.conf, such as MinJobAge=5")
    change.add_argument("changes", nargs="+", metavar="KEY=VALUE")
    commands.add_parser("reset", help="bring the default slurm.conf back, and accounting on")
    commands.add_parser("image", help="build the images of the tests; prints the minimal one's path")
    methods = commands.add_parser("catalog-images", help="build containers/catalog; prints a line for each")
    methods.add_argument("wheel", type=Path, help="this project's wheel, of `make wheel`")
    methods.add_argument("names", nargs="*", metavar="NAME", help="of " + ", ".join(catalog.NAMES) + " (all)")
    methods.add_argument("--index", default="", help="where pip looks for torch beside where it looks anyway")
    commands.add_parser(
        "install-tp", help="install this checkout's wheel for the users; prints the path of tp"
    )
    return parser


def build_catalog(layout: Layout, arguments: argparse.Namespace) -> None:
    """Minutes: with a lock of its own, so that other testbeds on this machine go on."""
    names = arguments.names or catalog.NAMES
    unknown = set(names) - {*catalog.NAMES}
    if unknown:
        raise TestbedError(f"no image {', '.join(sorted(unknown))}: there are {', '.join(catalog.NAMES)}")
    with locked(layout, "catalog-lock"):
        with locked(layout):
            base = catalog.write_base(layout)
        try:
            for line in catalog.build_all(layout, base, names, arguments.wheel, arguments.index):
                print(line, flush=True)
        finally:
            shutil.rmtree(base.parent, ignore_errors=True)


def run(layout: Layout, arguments: argparse.Namespace) -> int:
    command = arguments.command
    if command == "exec":
        execute(layout, CONTROLLER, arguments)
    elif command == "node-exec":
        execute(layout, arguments.node, arguments)
    elif command == "shell":
        arguments.env, arguments.env_fd, arguments.cwd = (
            [f"TERM={os.environ.get('TERM', 'dumb')}"],
            None,
            None,
        )
        arguments.argv = ["bash", "-l"]
        execute(layout, CONTROLLER, arguments)
    elif command == "status":
        text, whole = cluster.describe(layout)
        print(text)
        return 0 if whole else 1
    elif command == "catalog-images":
        build_catalog(layout, arguments)
        return 0
    with locked(layout):
        started = time.monotonic()
        if command == "up":
            cluster.up(layout, False if arguments.no_accounting else None)
            say(f"up ({time.monotonic() - started:.1f} s); `testbed status` says how to reach it")
        elif command == "down":
            cluster.down(layout)
        elif command in ("cut", "join"):
            hosts.set_link(layout, arguments.node, up=command == "join")
            if command == "join":
                cluster.notice_nodes(layout)
        elif command == "restart-controller":
            cluster.restart_controller(layout)
        elif command == "accounting":
            cluster.set_accounting(layout, arguments.state == "on")
        elif command == "set":
            cluster.change_conf(layout, parse_changes(arguments.changes))
        elif command == "reset":
            cluster.reset(layout)
        elif command == "image":
            print(images.install_images(layout))
        elif command == "install-tp":
            print(wheel.install_tp(layout))
    return 0


def main(argv: Sequence[str]) -> int:
    """Run one command; returns its exit code."""
    # What follows the first ``--`` is the command inside; argparse never sees it.
    cut = argv.index("--") if "--" in argv else len(argv)
    arguments = build_parser().parse_args(argv[:cut])
    arguments.argv = list(argv[cut + 1 :])
    try:
        if os.geteuid() != 0:
            raise TestbedError("this needs root: namespaces, mounts and cgroups")
        return run(read_layout(), arguments)
    except TestbedError as error:
        say(str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130
