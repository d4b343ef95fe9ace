"""What a reader of metrics must know of a run, from its JobSpec and records. For all who open a `Store`."""

from __future__ import annotations

from tuneplane import spec as jobspec
from tuneplane.collect.source import Declared, RunSource
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.runs.records import number, read_object
from tuneplane.runs.state import RunState


def read_source(run: RunFolder, state: RunState | None = None) -> RunSource:
    """The run as its metrics are read; it is taken for ended only where `state` says so.

    Raises UsageError or OSError where job.json cannot be read.
    """
    spec = jobspec.read(run.job).spec
    starts = (
        (attempt.number, number(read_object(attempt.start).get("started_at"))) for attempt in run.attempts()
    )
    return RunSource(
        folder=run.path,
        run_id=run.run_id,
        token_sha256=spec.reporting.token_sha256,
        outputs=tuple(
            Declared(output.name, output.path, output.kind, output.step_key)
            for output in spec.outputs
            if output.kind != "artifact"
        ),
        metrics=tuple((name, tuple(aliases)) for name, aliases in spec.metrics.items()),
        attempts=tuple((attempt, at) for attempt, at in starts if at is not None),
        ended=state is not None and state.is_final,
    )
