"""How a run is told while it goes from attempt to attempt, by records as the nodes write them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hand_made import HandSlurm, attempt, slurm_run, submit

from tuneplane.kernel.runfolder import RunFolder
from tuneplane.runs import state as state_module
from tuneplane.runs.attempts import read_attempts
from tuneplane.runs.images import images_in_use
from tuneplane.runs.records import note_restarted
from tuneplane.runs.secrets import remove_secrets
from tuneplane.runs.state import RunState, read_state, read_states

pytestmark = pytest.mark.timeout(60)

INTENT = {"cause": "walltime", "way": "requeue", "exclude": []}
BY_WALLTIME = {"cause": "walltime", "to_be_continued": True, "not_restarted": ""}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HandSlurm:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    return HandSlurm(tmp_path / "bin", monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return slurm_run(tmp_path / "tuneplane")


def told(run: RunFolder) -> tuple[str, str]:
    state = read_state(run)
    return state.state, state.reason


# Going on


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("walltime", "met its walltime"),
        ("preemption", "was preempted"),
        ("node_failure", "lost a node"),
        ("asked", "was asked to save and end"),
        ("moonshine", "ended (moonshine)"),
    ],
)
def test_a_requeued_run_says_what_its_last_attempt_met(
    run: RunFolder, slurm: HandSlurm, cause: str, words: str
) -> None:
    submit(run, "42")
    attempt(run, 0, "42", end={**BY_WALLTIME, "cause": cause}, restart={**INTENT, "cause": cause})
    slurm.jobs({"42": "PENDING BeginTime"})
    assert [a.how for a in read_attempts(run, read_state(run))] == ["saved"]
    assert told(run) == ("PENDING", f"attempt 1 waits: attempt 0 {words} (BeginTime)")


@pytest.mark.contract("C46")
def test_a_successor_speaks_for_the_run_though_nobody_noted_it(run: RunFolder, slurm: HandSlurm) -> None:
    submit(run, "42")
    attempt(run, 0, "42", end=BY_WALLTIME, restart=INTENT, restarted={"way": "successor", "job_id": "43"})
    slurm.jobs({"42": "TIMEOUT", "43": "PENDING Priority"})
    state = read_state(run)
    assert (state.state, state.job_id, state.pending_restart) == ("PENDING", "43", "")
    assert state.reason == "attempt 1 waits: attempt 0 met its walltime (Priority)"
    run.secrets.write_text("A=b\n")
    remove_secrets(run, state)
    assert run.secrets.exists()


def test_a_run_that_went_on_by_itself_says_after_what(run: RunFolder, slurm: HandSlurm) -> None:
    submit(run, "42")
    attempt(run, 0, "42", end=BY_WALLTIME, restart=INTENT, restarted={"way": "requeue", "job_id": "42"})
    attempt(run, 1, "42", automatic=True, follows="walltime")
    slurm.jobs({"42": "RUNNING"})
    state = read_state(run)
    assert (state.state, state.follows, state.attempts) == ("RUNNING", "walltime", 2)
    assert state.reason == "goes on after attempt 0 met its walltime"
    first, second = read_attempts(run, state)
    assert (first.how, first.cause, second.how, second.automatic) == ("saved", "walltime", "running", True)


def test_an_attempt_that_left_no_end_and_whose_job_waits_anew_does_not_run(
    run: RunFolder, slurm: HandSlurm
) -> None:
    """Preempted without grace: nothing could be written."""
    submit(run, "42")
    attempt(run, 0, "42")
    slurm.jobs({"42": "PENDING BeginTime"})
    assert [a.how for a in read_attempts(run, read_state(run))] == ["no record of its end"]
    slurm.jobs({"42": "RUNNING"})
    assert [a.how for a in read_attempts(run, read_state(run))] == ["running"]


# Not going on


def test_a_run_that_did_not_go_on_says_why(run: RunFolder, slurm: HandSlurm) -> None:
    why = "no progress since attempt 0: no new checkpoint in out/checkpoints and no new step"
    submit(run, "42")
    attempt(run, 0, "42", end={"cause": "walltime", "to_be_continued": False, "not_restarted": why})
    state = read_state(run)
    assert (state.state, state.cause, state.not_restarted) == ("TIMEOUT", "walltime", why)
    assert state.reason == f"it met its walltime; not restarted: {why}"
    assert state.pending_restart == ""


def test_a_node_that_was_lost_is_named_once(run: RunFolder, slurm: HandSlurm) -> None:
    reason = "n3 has been silent for 30 s: it is dead or cut off"
    end = {"cause": "node_failure", "not_restarted": "", "reason": reason, "first_failing_node": "n3"}
    submit(run, "42")
    attempt(run, 0, "42", end={**end, "to_be_continued": True}, restart={**INTENT, "cause": "node_failure"})
    slurm.jobs({"42": "CANCELLED"})
    state = read_state(run)
    assert state.reason.startswith(f"{reason}; ")
    assert [a.reason for a in read_attempts(run, state)] == [reason]


BY_US = {"restart": INTENT, "restarted": {"way": "requeue", "job_id": "42"}}


@pytest.mark.parametrize(
    ("end", "more"),
    [(BY_WALLTIME, BY_US), ({"cause": "preemption", "to_be_continued": False, "not_restarted": ""}, {})],
)
def test_a_requeued_job_that_was_cancelled_or_refused_before_its_next_attempt_says_so(
    run: RunFolder, slurm: HandSlurm, end: dict[str, object], more: dict[str, dict[str, object]]
) -> None:
    submit(run, "42")
    attempt(run, 0, "42", end=end, **more)
    slurm.jobs({"42": "CANCELLED"})
    assert told(run)[0] == "CANCELLED"
    (run.slurm / "42.out").write_text("tuneplane: max_restarts (1) is reached\n")
    slurm.jobs({"42": "FAILED"})
    assert told(run) == ("FAILED", "max_restarts (1) is reached")


@pytest.mark.contract("C46")
def test_a_restart_that_nobody_carries_out_is_told_and_keeps_the_secrets(
    run: RunFolder, slurm: HandSlurm
) -> None:
    submit(run, "42")
    attempt(run, 0, "42", end=BY_WALLTIME, restart=INTENT)
    (run.attempt(0).path / "restart-error.txt").write_text("sbatch: error: QOSMaxSubmitJob\n")
    slurm.jobs({"42": "TIMEOUT"})
    state = read_state(run)
    assert (state.state, state.is_final, state.pending_restart) == ("TIMEOUT", True, "walltime")
    assert state.reason.endswith(
        "its restart was not carried out (sbatch: error: QOSMaxSubmitJob): "
        f"tp job resume {run.run_id} does it"
    )
    run.secrets.write_text("A=b\n")
    remove_secrets(run, state)
    assert run.secrets.exists()


def test_a_restart_under_way_is_no_lost_one(run: RunFolder, slurm: HandSlurm) -> None:
    submit(run, "42")
    attempt(run, 0, "42", end=BY_WALLTIME, restart=INTENT)
    slurm.jobs({"42": "RUNNING"})  # its batch script is about to carry it out
    state = read_state(run)
    assert (state.state, state.pending_restart) == ("RUNNING", "")


@pytest.mark.parametrize("voided", ["later attempt", "newer job", "stopped", "paused", "done"])
def test_a_restart_is_voided_by_what_came_after_it(run: RunFolder, slurm: HandSlurm, voided: str) -> None:
    submit(run, "42")
    attempt(run, 0, "42", end=BY_WALLTIME, restart=INTENT)
    slurm.jobs({"42": "TIMEOUT", "43": "PENDING Priority"})
    if voided == "later attempt":
        attempt(run, 1, "42", end={"code": 1, "for_good": True, "reason": "exit code 1"})
    elif voided == "newer job":
        submit(run, "43", at=time.time())
    elif voided == "done":
        note_restarted(run.attempt(0), "43")
        assert read_state(run).job_id == "43"
    else:
        (run.path / voided).write_text("42\n")
    assert read_state(run).pending_restart == ""


def test_where_slurm_is_silent_a_requeued_run_is_not_taken_for_ended(
    run: RunFolder, slurm: HandSlurm
) -> None:
    submit(run, "42")
    attempt(run, 0, "42", end=BY_WALLTIME, restart=INTENT, restarted={"way": "requeue", "job_id": "42"})
    slurm.refuses("squeue", "squeue: error: Unable to contact slurm controller")
    state = read_state(run)
    assert state.state == "UNKNOWN" and "Unable to contact" in state.reason


# Paused


@pytest.mark.parametrize(
    ("queue", "end", "state", "reason"),
    [
        ("PENDING JobHeldUser", None, "PENDING", "held by tp job pause"),
        ("PENDING Priority", None, "PENDING", "Priority"),
        ("RUNNING", None, "RUNNING", "asked by tp job pause to save and end"),
        ("COMPLETING", {}, "COMPLETING", ""),
        ("COMPLETED", {}, "PAUSED", "it saved and ended; tp job resume RUN goes on"),
        ("TIMEOUT", {"code": 143, "reason": "SIGTERM"}, "PAUSED", "SIGTERM; tp job resume RUN goes on"),
        ("FAILED", {"code": 1, "for_good": True, "reason": "exit code 1"}, "FAILED", "exit code 1"),
        ("COMPLETED", {"for_good": True, "stop_requested": False}, "COMPLETED", ""),
        ("CANCELLED", None, "CANCELLED", ""),
    ],
)
def test_a_paused_run_is_told_from_its_hold_to_its_end(
    run: RunFolder, slurm: HandSlurm, queue: str, end: dict[str, object] | None, state: str, reason: str
) -> None:
    submit(run, "42")
    if end is not None:
        attempt(run, 0, "42", end=end)
    run.paused.write_text("42\n")
    slurm.jobs({"42": queue})
    assert told(run) == (state, reason.replace("RUN", run.run_id))


def test_a_hold_of_somebody_elses_is_slurms_word(run: RunFolder, slurm: HandSlurm) -> None:
    submit(run, "42")
    slurm.jobs({"42": "PENDING JobHeldUser"})
    assert told(run) == ("PENDING", "JobHeldUser")


def test_the_image_of_a_paused_run_is_in_use(slurm: HandSlurm, tmp_path: Path) -> None:
    image = {
        "reference": "x.sif", "source": "--image", "path": "/images/x.sif", "sha256": "0" * 64,
        "digest": "", "size_bytes": 1, "modified_s": 1,
    }  # fmt: skip
    container = {"spec.container.runtime": "apptainer", "spec.container.image": image}
    run = slurm_run(tmp_path / "tuneplane", changes=container)
    submit(run, "42")
    attempt(run, 0, "42", end={})
    slurm.jobs({"42": "COMPLETED"})
    assert images_in_use() == {}
    run.paused.write_text("42\n")
    assert images_in_use() == {Path("/images/x.sif"): [run.run_id]}


# Half-made and cleared


def test_a_folder_without_a_script_is_incomplete(run: RunFolder, slurm: HandSlurm) -> None:
    run.script.unlink()
    state = read_state(run)
    assert (state.state, state.is_final) == ("INCOMPLETE", False)
    assert "half-made" in state.reason


# Asking Slurm


@pytest.mark.contract("C46")
def test_slurm_is_asked_once_for_all_and_never_again_for_what_it_has_forgotten(
    slurm: HandSlurm, tmp_path: Path
) -> None:
    runs = [slurm_run(tmp_path / "tuneplane", number) for number in range(6)]
    for number, run in enumerate(runs[:5]):
        submit(run, str(40 + number))
        good = {"for_good": True, "stop_requested": False}
        attempt(run, 0, str(40 + number), end=[good, {**good, "code": 3}, BY_WALLTIME, {}, None][number])
    slurm.jobs({"44": "RUNNING"})
    first = read_states(runs)
    assert [s.state for s in first] == ["COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "RUNNING", "PREPARED"]
    assert len(slurm.asked("squeue")) == 1
    before = len(slurm.asked())
    assert [s.state for s in read_states(runs[:4])] == [s.state for s in first[:4]]
    # The third has a restart to be carried out, which a job may be doing at any moment.
    assert [call.split()[0] for call in slurm.asked()[before:]] == ["squeue", "sacct"], slurm.asked()
    assert [call for call in slurm.asked()[before:] if "40" in call or "41" in call] == []


def test_a_run_that_was_settled_and_starts_again_is_asked_for_again(run: RunFolder, slurm: HandSlurm) -> None:
    submit(run, "42")
    attempt(run, 0, "42", end={"code": 3, "for_good": True})
    assert read_state(run).state == "FAILED"
    assert (run.slurm / "settled.json").exists()
    submit(run, "43", at=time.time())
    slurm.jobs({"43": "PENDING Priority"})
    assert told(run) == ("PENDING", "Priority")


def test_slurms_last_word_is_kept(run: RunFolder, slurm: HandSlurm) -> None:
    submit(run, "42")
    attempt(run, 0, "42", end={"code": 137, "for_good": True, "reason": "SIGKILL"})
    (slurm.folder / "sacct").write_text("#!/bin/sh\necho '42|OUT_OF_MEMORY|0:125|n1|None|'\n")
    assert told(run) == ("OUT_OF_MEMORY", "SIGKILL")
    slurm.refuses("squeue", "gone")
    (slurm.folder / "sacct").write_text("#!/bin/sh\nexit 1\n")
    assert told(run) == ("OUT_OF_MEMORY", "SIGKILL")


def test_a_run_that_ended_a_moment_ago_is_not_settled(
    run: RunFolder, slurm: HandSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be requeued by hand for as long as Slurm knows it, and sacct is told late."""
    submit(run, "42", at=time.time())
    attempt(run, 0, "42", end={"code": 3, "for_good": True})
    read_state(run)
    assert not (run.slurm / "settled.json").exists()
    monkeypatch.setattr(state_module, "SETTLE_S", 0.0)
    read_state(run)
    assert (run.slurm / "settled.json").exists()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"job_id": "42"}', '{"job_id": 42, "state": "FAILED"}', "\0" * 9]
)
def test_a_broken_note_of_slurms_last_word_is_none(run: RunFolder, slurm: HandSlurm, text: str) -> None:
    submit(run, "42")
    slurm.jobs({"42": "RUNNING"})
    (run.slurm / "settled.json").write_text(text)
    assert read_state(run).state == "RUNNING"


@pytest.mark.parametrize("name", ["restart.json", "restarted.json", "end.json", "start.json"])
@pytest.mark.parametrize("text", ["", "[1]", '{"cause": 3, "job_id": ["x"], "at": "y", "exclude": 7}', "{"])
def test_records_that_are_no_records_harm_nothing(
    run: RunFolder, slurm: HandSlurm, name: str, text: str
) -> None:
    submit(run, "42")
    attempt(run, 0, "42", end=BY_WALLTIME, restart=INTENT)
    (run.attempt(0).path / name).write_text(text)
    state = read_state(run)
    assert isinstance(state, RunState) and state.state != "UNKNOWN"
    assert len(read_attempts(run, state)) == 1
