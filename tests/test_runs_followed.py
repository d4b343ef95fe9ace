"""Which runs `tp collect` reads: each that may say something new."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from launch_jobs import local_job, write_run

from tuneplane.kernel.runfolder import RunFolder
from tuneplane.runs import followed
from tuneplane.runs.followed import FollowedRuns
from tuneplane.runs.state import RunState

RUN_ID = "ring-20260102-030405-ab12"


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> list[RunState]:
    """What is known of the one run, exchanged by the test; every look is due at once."""
    known = [RunState(RUN_ID, "ring", "RUNNING", attempts=1)]
    monkeypatch.setattr(followed, "read_states", lambda runs: [known[0] for _ in runs])
    monkeypatch.setattr(followed, "LOOK_S", 0.0)
    monkeypatch.setattr(followed, "ENDED_LOOKS", 2)
    return known


def given(runs: FollowedRuns) -> list[bool]:
    """Of each run that is to be read, whether it has ended."""
    return [source.ended for source in runs.sources()]


def test_a_run_that_goes_on_after_its_end_is_read_again(tmp_path: Path, state: list[RunState]) -> None:
    run = write_run(local_job(tmp_path / RUN_ID))
    runs = FollowedRuns([run])
    assert given(runs) == [False]
    state[0] = replace(state[0], state="PAUSED")
    assert given(runs) == [True]
    assert [given(runs) for _ in range(4)] == [[]] * 4, "once"
    state[0] = replace(state[0], state="RUNNING", attempts=2)
    assert [False] in (given(runs), given(runs))
    state[0] = replace(state[0], state="COMPLETED")
    assert given(runs) == [True]
    assert given(runs) == []


def test_an_attempt_that_came_and_went_between_two_looks_is_read(
    tmp_path: Path, state: list[RunState]
) -> None:
    runs = FollowedRuns([write_run(local_job(tmp_path / RUN_ID))])
    state[0] = replace(state[0], state="TIMEOUT")
    assert given(runs) == [True]
    state[0] = replace(state[0], attempts=2)
    assert [True] in (given(runs), given(runs))


def test_a_run_whose_folder_is_gone_is_no_longer_given(
    tmp_path: Path, state: list[RunState], monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[RunFolder] = [write_run(local_job(tmp_path / RUN_ID))]
    monkeypatch.setattr(followed, "iterate_runs", lambda: list(there))
    runs = FollowedRuns()
    assert given(runs) == [False]
    there.clear()
    assert given(runs) == []
