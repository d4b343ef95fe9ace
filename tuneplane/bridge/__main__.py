"""What `python -m tuneplane.bridge` does: prepare the process, run the entry, end as Python would.

Started by torchrun for every rank. Each step is one module's; nothing else is decided here.
"""

from __future__ import annotations

import sys

from tuneplane.bridge.command import read_command
from tuneplane.bridge.ending import leave
from tuneplane.bridge.entry import make_main, run_main
from tuneplane.bridge.preparation import prepare


def main() -> None:
    """Never returns but by SystemExit."""
    command = read_command(sys.argv[1:])
    prepare(command)
    make_main(command)
    leave(*run_main(command))


if __name__ == "__main__":
    main()
