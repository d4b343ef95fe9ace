"""What `python -m tuneplane.bridge` does: prepare the process, run the entry, end as Python would.

Started by torchrun for every rank. Each step is one module's; nothing else is decided here.
"""

from __future__ import annotations

import os
import sys

from tuneplane.bridge.command import read_command
from tuneplane.bridge.ending import end, leave_in_the_end
from tuneplane.bridge.entry import make_main, run_main
from tuneplane.bridge.preparation import prepare


def main() -> None:
    """Returns, or raises what makes Python end with the entry's exit code."""
    command = read_command(sys.argv[1:])
    process = os.getpid()
    leave_in_the_end()
    prepare(command)
    make_main(command)
    error = run_main(command)
    end(error, note=os.getpid() == process)  # not of a forked child that ran to its end here


if __name__ == "__main__":
    main()
