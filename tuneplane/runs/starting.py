"""One start of a run at a time: of two `tp job retry` or `resume` at once, one queues a job and one is told.

A mark in the run folder says who is at it (user, host, process); one whose owner is dead is taken over. It is the
same turn-taking as for preparing images.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tuneplane.images.turn import Owner, owner_of, turn
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.runs.index import current_user

NAME = "start"


@contextmanager
def starting(run: RunFolder) -> Iterator[None]:
    """Held while a start of the run is decided and carried out. Raises OperationError where another one is."""

    def refuse(owner: Owner | None) -> None:
        raise Another(run, owner)

    with ExitStack() as held:
        try:
            held.enter_context(turn(run.path, NAME, current_user(), _never, refuse))
        except Another:
            raise
        except OperationError as error:
            why = error.faults[0].what.rpartition(": ")[2]
            what = f"that {run.run_id} is being started could not be noted: {why}"
            raise OperationError(
                Fault(what, str(run.path), "see that it has room and that you may write to it")
            ) from None
        yield


def is_being_started(run: RunFolder) -> bool:
    """Whether some living `tp` is starting the run at this moment."""
    return owner_of(run.path, NAME) is not None


class Another(OperationError):
    """Another `tp` starts the run."""

    def __init__(self, run: RunFolder, owner: Owner | None) -> None:
        what = f"{run.run_id} is being started by {owner or 'another tp of yours'}"
        super().__init__(Fault(what, "RUN", f"tp job status {run.run_id}"))


def _never() -> bool:
    return False
