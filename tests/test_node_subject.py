"""How the run that an operation waits for is judged: by its own records, whatever Slurm's codes say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import record_submission
from tuneplane.node import subject
from tuneplane.node.queue import QueuedJob, jobs_in
from tuneplane.node.subject import Evidence, Standing, read_standing, standing

DONE = {"code": 0, "for_good": True}
FAILED = {"code": 7, "for_good": True}
SAVED = {"code": 0, "for_good": False, "to_be_continued": True, "cause": "walltime"}
OF_7 = {"job_id": "7"}


def job(job_id: str, state: str) -> QueuedJob:
    return QueuedJob(job_id, f"{job_id}_N/A", state)


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        # its own end decides, also where Slurm says otherwise
        ({"end": DONE, "start": OF_7, "jobs": ("7",), "queue": (job("7", "FAILED"),)}, "COMPLETED"),
        ({"end": {"code": 0}, "start": OF_7, "jobs": ("7",)}, "COMPLETED"),
        ({"end": FAILED, "start": OF_7, "jobs": ("7",), "queue": (job("7", "COMPLETED"),)}, "FAILED"),
        ({"end": FAILED, "start": OF_7, "jobs": ("7",), "queue": (job("7", "COMPLETING"),)}, "FAILED"),
        # stopped, paused, ended from outside
        ({"end": SAVED, "start": OF_7, "jobs": ("7",), "stopped": frozenset("7")}, "CANCELLED"),
        ({"end": SAVED, "start": OF_7, "jobs": ("7",), "paused": frozenset("7")}, "PAUSED"),
        ({"end": {"code": 143, "for_good": False}, "start": OF_7, "jobs": ("7",)}, "FAILED"),
        ({"end": SAVED, "start": OF_7, "jobs": ("7",)}, "TIMEOUT"),  # its restart was lost
        ({"jobs": ("7",), "stopped": frozenset("7")}, "CANCELLED"),
        ({"jobs": ("7",), "queue": (job("7", "CANCELLED"),)}, "CANCELLED"),
        ({"start": OF_7, "jobs": ("7",), "queue": (job("7", "NODE_FAIL"),)}, "NODE_FAIL"),
        ({"start": OF_7, "jobs": ("7",), "queue": (job("7", "COMPLETED"),)}, "LOST"),  # it left no record
        ({"start": OF_7, "jobs": ("7",)}, "LOST"),
        ({}, "NOT_SUBMITTED"),
        # an operation that another one waits for
        ({"jobs": ("7",), "not_run": OF_7}, "NOT_RUN"),
        ({"jobs": ("7", "8"), "not_run": OF_7, "queue": (job("8", "PENDING"),)}, ("GOES_ON", "8")),
        # what tp job gc left
        ({"cleared": {"state": "COMPLETED"}}, "COMPLETED"),
        ({"cleared": {"state": "FAILED"}}, "FAILED"),
        # it goes on: running, waiting, requeued, in a successor, again by somebody's hand
        ({"start": OF_7, "jobs": ("7",), "queue": (job("7", "RUNNING"),)}, ("GOES_ON", "7")),
        ({"jobs": ("7",), "queue": (job("7", "PENDING"),)}, ("GOES_ON", "7")),
        (
            {
                "end": SAVED,
                "start": OF_7,
                "jobs": ("7",),
                "restarted": {"way": "requeue", "job_id": "7"},
                "queue": (job("7", "COMPLETING"),),
            },
            ("GOES_ON", "7"),
        ),
        (
            {
                "end": SAVED,
                "start": OF_7,
                "jobs": ("7", "8"),
                "restarted": {"way": "successor", "job_id": "8"},
                "queue": (job("7", "COMPLETING"), job("8", "PENDING")),
            },
            ("GOES_ON", "8"),
        ),
        (
            {"end": FAILED, "start": OF_7, "jobs": ("7", "9"), "queue": (job("9", "RUNNING"),)},
            ("GOES_ON", "9"),
        ),
        # a successor that was cancelled before it began
        ({"end": SAVED, "start": OF_7, "jobs": ("7", "8"), "queue": (job("8", "CANCELLED"),)}, "CANCELLED"),
        # on this machine: the process that ran it lives a moment longer than its attempt
        (
            {"start": {"job_id": "local-5"}, "jobs": ("local-5",), "alive": ("local-5",)},
            ("GOES_ON", "local-5"),
        ),
        (
            {"end": FAILED, "start": {"job_id": "local-5"}, "jobs": ("local-5",), "alive": ("local-5",)},
            "FAILED",
        ),
    ],
)
def test_how_a_run_is(evidence: dict[str, Any], expected: str | tuple[str, str]) -> None:
    words = (expected, "") if isinstance(expected, str) else expected
    assert standing(Evidence(**evidence)) == Standing(*words)


def test_squeues_lines_are_told_apart_by_the_runs_folder() -> None:
    said = "7|7_N/A|RUNNING|/r/a b|c\n8|6_2|PENDING|/r/other\n\n9|9_N/A|PENDING|/r/a b|c\n"
    assert [found.job_id for found in jobs_in(Path("/r/a b|c"), said)] == ["7", "9"]
    assert jobs_in(Path("/r/other"), said)[0].names == {"8", "6_2"}


def test_a_controller_that_is_away_for_a_moment_ends_no_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path)
    run.submissions.mkdir()
    record_submission(run, "7", "tp")
    answers = [OperationError(Fault("squeue: Unable to contact slurm controller", "Slurm"))] * 2

    def squeue(*_: Any, **__: Any) -> list[QueuedJob]:
        if answers:
            raise answers.pop()
        return [job("7", "RUNNING")]

    monkeypatch.setattr(subject, "read_queue", squeue)
    monkeypatch.setattr(subject, "LOOK_AGAIN_S", 0.01)
    assert read_standing(run, {}) == Standing("GOES_ON", "7")
    answers += [OperationError(Fault("squeue: no answer", "Slurm"))] * 9
    monkeypatch.setattr(subject, "SLURM_AWAY_S", -1.0)
    with pytest.raises(OperationError, match="no answer"):
        read_standing(run, {})
