"""The secrets file of a run that has ended: gone, once it is sure that nothing starts the run again (C11).

The batch script removes it where the run ended by itself; what Slurm ended from outside is known here alone.
"""

from __future__ import annotations

from contextlib import suppress

from tuneplane.kernel.runfolder import RunFolder
from tuneplane.runs.state import RunState

ENDED_FOR_GOOD = frozenset(("COMPLETED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL"))
"""Not PREEMPTED and NODE_FAIL, after which Slurm itself may start the job again, nor LOST, which may be wrong.
Not CANCELLED: whoever cancelled a start by hand may start the same script again (C42); `tp job stop` ends it for
good and removes them.
"""


def remove_secrets(run: RunFolder, state: RunState) -> None:
    """Remove `secrets.env` of a run that has ended for good. `tp job retry` writes it anew.

    Not where a restart was decided and is not carried out yet: that start needs them.
    Never raises: a colleague who looks at the run may not, and its owner's next look will.
    """
    if state.state in ENDED_FOR_GOOD and not state.pending_restart:
        with suppress(OSError):
            run.secrets.unlink(missing_ok=True)
