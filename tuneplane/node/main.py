"""Entry of `kernel.pyz`: `claim`, `node` and `end` for the batch script, `local`, and `shell`.

Its standard output is read by the batch script; everything meant for people goes to standard error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tuneplane.kernel.errors import Exit, TunePlaneError
from tuneplane.kernel.files import read_json
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.spec import read

USAGE = """usage: kernel.pyz claim RUN HOST...
       kernel.pyz node RUN ATTEMPT ADDRESS PORT
       kernel.pyz end RUN ATTEMPT CODE
       kernel.pyz local RUN
       kernel.pyz shell RUN ATTEMPT RANK [COMMAND...]"""


def main(argv: list[str] | None = None) -> int:
    """Run one of the commands of `USAGE`; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if sys.version_info < (3, 9):  # noqa: UP036 - a site's interpreter may be older than ours
        print(f"tuneplane: this node's Python is {sys.version.split()[0]}, 3.9 is needed", file=sys.stderr)
        return Exit.FAILED
    os.umask(0o077)
    try:
        return _run(arguments)
    except TunePlaneError as error:
        print(f"tuneplane: {error}", file=sys.stderr)
        return int(error.exit_code)
    except OSError as error:
        print(f"tuneplane: {error.filename}: {error.strerror}", file=sys.stderr)
        return Exit.FAILED


def _run(arguments: list[str]) -> int:
    if len(arguments) < 2:
        print(USAGE, file=sys.stderr)
        return Exit.WRONG_USE
    name, folder, *rest = arguments
    run = RunFolder(Path(folder))
    # What the job makes is as open as the run folder: 0700 by default, 0750 where a site says so.
    os.umask(0o777 & ~run.path.stat().st_mode)
    job = read(run.job)
    if name == "claim":
        from tuneplane.node.attempt import claim

        attempt = claim(run, job, rest, os.environ)
        start = read_json(attempt.start)
        print(attempt.number, start["address"], start["port"])
        return Exit.DONE
    if name == "node" and len(rest) == 3:
        from tuneplane.node.agent import run_node

        return run_node(job, int(rest[0]), rest[1], int(rest[2]), os.environ)
    if name == "end" and len(rest) == 2:
        from tuneplane.node.attempt import end

        print(end(run, job, int(rest[0]), int(rest[1])))
        return Exit.DONE
    if name == "local" and not rest:
        from tuneplane.node.local import run_local

        return run_local(job, os.environ)
    if name == "shell" and len(rest) >= 2:
        from tuneplane.node.shell import run_shell

        return run_shell(job, int(rest[0]), int(rest[1]), rest[2:])
    print(USAGE, file=sys.stderr)
    return Exit.WRONG_USE
