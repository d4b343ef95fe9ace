"""What evaluations found of a run's model: the report below its output folder, whoever wrote it.

`tp job status` and the board show it. Nothing in it is trusted, and no link out of the folder is followed (C13).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuneplane.collect.printable import printable
from tuneplane.evalkit.report import FOLDER, Row, own_report_path, read_report, report_path
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.runs.records import read_object


@dataclass(frozen=True)
class Evaluation:
    """rows: task, metric and value of the report that there is. notices: why it, or a part of it, is not read."""

    rows: tuple[Row, ...] = ()
    run_id: str = ""  # of the evaluation that wrote it
    model_digest: str = ""
    harness: str = ""
    ended_at: str = ""
    notices: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_evaluation(run: RunFolder) -> Evaluation:
    """The report of a run: the latest on its model; of an evaluation itself, its own. Never raises."""
    out, path = _place(run)
    found = read_report(path, out)
    if found is None:
        return Evaluation()
    if isinstance(found, str):
        return Evaluation(notices=(printable(found),))
    return Evaluation(
        rows=found.rows,
        run_id=found.run_id,
        model_digest=found.model_digest,
        harness=found.harness,
        ended_at=found.ended_at,
        notices=found.notices,
    )


def _place(run: RunFolder) -> tuple[Path, Path]:
    """The output folder, and where the report lies below it."""
    if not (run.out / FOLDER).exists():  # of most runs no JobSpec need be read
        spec = read_object(run.job).get("spec")
        subject = spec.get("subject") if isinstance(spec, dict) else None
        folder = subject.get("folder") if isinstance(subject, dict) else None
        evaluates = isinstance(spec, dict) and spec.get("operation") == "eval"
        if evaluates and isinstance(folder, str) and folder.startswith("/"):
            out = RunFolder(Path(folder)).out
            return out, own_report_path(out, run.run_id)
    return run.out, report_path(run.out)
