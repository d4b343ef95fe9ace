"""Operations made and handed over: all folders before the queue, and all in the queue or none.

`tp export`, `tp eval` and `tp submit --then` come here with what `operation.py` planned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from tuneplane.compile import Draft
from tuneplane.frozen import prepare_copy
from tuneplane.images.progress import Progress, silent
from tuneplane.kernel.errors import Fault, OperationError, TunePlaneError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.operation import Planned
from tuneplane.runs.stop import stop_run
from tuneplane.spec import Image, JobSpec, Subject, read
from tuneplane.start import Submitted, check_room, hand_over
from tuneplane.submit import prepare, remove_unfinished


def start(
    run: RunFolder, planned: Planned, environ: Mapping[str, str], progress: Progress = silent
) -> Submitted:
    """Make the folder of an operation on a run and hand it over. Raises UsageError, OperationError."""
    check_room(planned.job.spec.resources, planned.site)
    made, job = _prepared(planned, run, run, environ, progress)
    return hand_over(made, job, after=planned.after)


def submit_then(
    draft: Draft, then: Sequence[Planned], environ: Mapping[str, str], progress: Progress = silent
) -> tuple[Submitted, list[Submitted]]:
    """Make the folders of a run and of the operations behind it, then hand all over.

    Where anything fails, nothing stays queued. Raises UsageError, OperationError.
    """
    check_room(draft.spec.resources, draft.site, [one.job.spec.resources for one in then])
    run = prepare(draft, environ, progress)
    folders, awaited = [run], run
    jobs: list[tuple[RunFolder, JobSpec]] = []
    try:
        for planned in then:
            jobs.append(_prepared(planned, run, awaited, environ, progress))
            awaited = jobs[-1][0]
            folders.append(awaited)
    except BaseException:
        for folder in folders:
            remove_unfinished(folder)
        raise
    try:
        first = hand_over(run, read(run.job))
    except BaseException:
        for folder, _ in jobs:
            remove_unfinished(folder)
        raise
    return first, _hand_over_behind(run, first, jobs)


def _hand_over_behind(
    run: RunFolder, first: Submitted, jobs: Sequence[tuple[RunFolder, JobSpec]]
) -> list[Submitted]:
    """The operations behind a run that is queued, each behind the one before it; all or none."""
    done = [first]
    for folder, job in jobs:
        after = "" if done[-1].job_id.startswith("local-") else done[-1].job_id
        try:
            done.append(hand_over(folder, job, after=after))
        except BaseException as error:  # a signal too: what was to follow would be missed only at the end
            faults = _take_back(done)
            for other, _ in jobs[len(done) - 1 :]:
                remove_unfinished(other)
            if not isinstance(error, Exception):
                raise
            told = error.faults[0].what if isinstance(error, TunePlaneError) else str(error)
            became = "could not be stopped" if faults else "was stopped"
            what = f"{job.spec.operation} was not taken, so {run.run_id} {became}: {told}"
            remedy = "submit again without --then, and say tp export or tp eval once it runs"
            raise OperationError(Fault(what, "--then", "" if faults else remedy), *faults) from None
    return done[1:]


def _take_back(done: Sequence[Submitted]) -> list[Fault]:
    """Stop all that was queued, the last one first; what could not be stopped, with Slurm's words."""
    faults = []
    for submitted in reversed(done):
        try:
            stop_run(submitted.run, wait=False)
        except (TunePlaneError, OSError) as error:
            told = error.faults[0].what if isinstance(error, TunePlaneError) else str(error)
            what = f"{submitted.run.run_id} is still queued, as job {submitted.job_id}: {told}"
            faults.append(Fault(what, "--then", f"tp job stop {submitted.run.run_id}"))
    return faults


def _prepared(
    planned: Planned, run: RunFolder, awaited: RunFolder, environ: Mapping[str, str], progress: Progress
) -> tuple[RunFolder, JobSpec]:
    """The complete folder of an operation on `run`, which waits for `awaited`."""
    image = planned.job.spec.container.image
    if planned.chosen is not None:
        image = Image(**dataclasses.asdict(planned.chosen.fetch(progress)))
    elif planned.own_image:
        image = read(run.job).spec.container.image
    spec = dataclasses.replace(
        planned.job.spec,
        container=dataclasses.replace(planned.job.spec.container, image=image),
        subject=Subject(run.run_id, str(run.path), "" if awaited == run else str(awaited.path)),
    )
    job = dataclasses.replace(planned.job, spec=spec)
    return prepare_copy(job, run.capsule, run.path.parents[3], planned.site, environ)
