"""The bridge's command line: its own options, then the entry and the words that are the entry's alone.

Read by the bridge as it starts. By hand: argparse takes 10 ms and would read the entry's options too.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # `typing` itself costs 10 ms of import; type checkers treat this name the same
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

USAGE = (
    "usage: python -m tuneplane.bridge [--hook NAME]... [--preflight] (script.py | -m module) [argument]..."
)

WRONG_USAGE = 2


class Command:
    """`entry`: a module's name where `is_module`, else the path of a script, or of a folder or zip with
    `__main__.py`. `arguments`: the entry's own. `hooks`: names, in the order given. `preflight`: check the
    ranks' connection first."""

    __slots__ = ("arguments", "entry", "hooks", "is_module", "preflight")

    def __init__(
        self, entry: str, is_module: bool, arguments: list[str], hooks: list[str], preflight: bool = False
    ) -> None:
        self.entry = entry
        self.is_module = is_module
        self.arguments = arguments
        self.hooks = hooks
        self.preflight = preflight


def read_command(words: Sequence[str]) -> Command:
    """What the words ask for. Ends the process with 2 and the usage where they ask for nothing that is known."""
    hooks: list[str] = []
    preflight = False
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in ("--hook", "-m") and not rest:
            refuse(f"{word} needs a name")
        if word == "--hook":
            hooks.append(rest.pop(0))
        elif word.startswith("--hook="):
            hooks.append(word[len("--hook=") :])
        elif word == "--preflight":
            preflight = True
        elif word == "-m":
            return Command(rest[0], True, rest[1:], hooks, preflight)
        elif word in ("-h", "--help"):
            print(USAGE)
            sys.exit()
        elif word.startswith("-"):
            refuse(f"unknown option {word}")
        else:
            return Command(word, False, rest, hooks, preflight)
    refuse("no script and no module given")


def refuse(why: str) -> NoReturn:
    """End the process, which was asked for what cannot be done."""
    print(f"tuneplane.bridge: {why}\n{USAGE}", file=sys.stderr)
    sys.exit(WRONG_USAGE)
