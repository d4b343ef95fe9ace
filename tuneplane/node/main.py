"""Entry of `kernel.pyz`: `claim`, `node`, `end` and `clear` for the batch script, `local`, and `shell`.

Its standard output is read by the batch script; everything meant for people goes to standard error.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from pathlib import Path

from tuneplane.kernel.errors import Exit, TunePlaneError
from tuneplane.kernel.runfolder import RunFolder

USAGE = """usage: kernel.pyz claim RUN HOST...
       kernel.pyz node RUN ATTEMPT ADDRESS PORT
       kernel.pyz end RUN ATTEMPT CODE
       kernel.pyz clear RUN
       kernel.pyz local RUN
       kernel.pyz shell RUN ATTEMPT RANK [COMMAND...]"""

NUMBERS = {"claim": (), "node": (0, 2), "end": (0, 1), "clear": (), "local": (), "shell": (0, 1)}
"""Which arguments after RUN are whole numbers."""

FEWEST = {"claim": 0, "node": 3, "end": 2, "clear": 0, "local": 0, "shell": 2}
MOST = {"node": 3, "end": 2, "clear": 0, "local": 0}


class Unfailing(io.TextIOBase):
    """Standard error, which may be a file on a full disk: what cannot be said there fails nothing.

    Unbuffered: what is left in a buffer at the end makes Python leave with 120.
    """

    def write(self, text: str) -> int:
        with suppress(OSError):
            os.write(2, text.encode("utf-8", "backslashreplace"))
        return len(text)


def main(argv: list[str] | None = None) -> int:
    """Run one of the commands of `USAGE`; returns the exit code. Without `argv` this process is the program."""
    arguments = sys.argv[1:] if argv is None else argv
    if argv is None:
        sys.stderr = Unfailing()
    os.umask(0o077)
    if not is_sound(arguments):
        print(USAGE, file=sys.stderr)
        return Exit.WRONG_USE
    name, folder, *rest = arguments
    try:
        return _run(name, RunFolder(Path(folder)), rest)
    except TunePlaneError as error:
        print(f"tuneplane: {error}", file=sys.stderr)
        return int(error.exit_code)
    except OSError as error:
        print(f"tuneplane: {error.filename or folder}: {error.strerror or error}", file=sys.stderr)
        return Exit.FAILED


def is_sound(arguments: list[str]) -> bool:
    """Whether these are the arguments of one of the commands."""
    if len(arguments) < 2 or arguments[0] not in FEWEST:
        return False
    name, _, *rest = arguments
    enough = FEWEST[name] <= len(rest) <= MOST.get(name, len(rest))
    return enough and all(rest[place].isascii() and rest[place].isdigit() for place in NUMBERS[name])


def _run(name: str, run: RunFolder, rest: list[str]) -> int:
    from tuneplane.spec import read

    # What the job makes is as open as the run folder: 0700 by default, 0750 where a site says so.
    os.umask(0o777 & ~run.path.stat().st_mode)
    if name == "end":
        from tuneplane.node.outcome import end

        print(end(run, int(rest[0]), int(rest[1]), os.environ))
        return Exit.DONE
    job = read(run.job)
    if name == "claim":
        from tuneplane.kernel.files import read_json
        from tuneplane.node.attempt import claim
        from tuneplane.node.operation import admit

        attempt = claim(run, job, rest, os.environ) if admit(run, job, os.environ) else None
        if attempt is None:
            print("over")
            return Exit.DONE
        start = read_json(attempt.start)
        print(attempt.number, start["address"], start["port"])
        return Exit.DONE
    if name == "node":
        from tuneplane.node.signals import Signals

        signals = Signals()
        signals.listen()
        from tuneplane.node.agent import NodeRun

        return NodeRun(job, int(rest[0]), rest[1], int(rest[2]), os.environ, signals).run()
    if name == "clear":
        from tuneplane.node.clear import clear_here

        clear_here(job)
        return Exit.DONE
    if name == "local":
        from tuneplane.node.local import run_local

        return run_local(job, os.environ)
    from tuneplane.node.shell import run_shell

    return run_shell(job, int(rest[0]), int(rest[1]), rest[2:])
