"""Pausing and resuming a run, and stopping one that comes back.

By a hand-made Slurm, and for real on this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hand_made import HandSlurm, attempt, slurm_run, submit
from run_fixture import Run, runs_below, wait_until

from tuneplane.kernel.errors import OperationError, UsageError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import read_submissions
from tuneplane.launch.local import start_local
from tuneplane.runs.pause import pause_run
from tuneplane.runs.starting import is_being_started, starting
from tuneplane.runs.state import read_state
from tuneplane.runs.stop import stop_run
from tuneplane.start import resume, retry

pytestmark = pytest.mark.timeout(120)

INTENT = {"cause": "node_failure", "way": "successor", "exclude": ["n2", "n3"]}
SAVES = 'echo begun; until [ -e "$TUNEPLANE_STOP_FILE" ]; do sleep 0.05; done; echo saved'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TUNEPLANE_CONFIG_DIR", str(tmp_path))
    for module in ("stop", "pause"):
        monkeypatch.setattr(f"tuneplane.runs.{module}.POLL_S", 0.05)
    return tmp_path


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HandSlurm:
    return HandSlurm(tmp_path / "bin", monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return slurm_run(tmp_path / "tuneplane")


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    with runs_below(tmp_path) as make:

        def make_local(train: str, **more: Any) -> Run:
            return make(train, scheduler="local", profile="local:1", reporting=False, **more)

        yield make_local


# A stop that is sure


@pytest.mark.slow
@pytest.mark.contract("C46")
def test_a_job_that_comes_back_while_it_is_ended_is_ended_again(run: RunFolder, slurm: HandSlurm) -> None:
    """Its script had asked for the requeue a moment before it could read that the run is stopped."""
    submit(run, "42")
    attempt(run, 0, "42")
    slurm.jobs({"42": "RUNNING"})
    slurm.on_scancel({"42": "PENDING"})
    told: list[str] = []
    state = stop_run(run, told=told.append)
    assert (state.state, state.reason) == ("CANCELLED", "stopped by tp job stop")
    assert slurm.asked("scancel") == ["scancel 42", "scancel 42"]
    assert told == [
        "Slurm job 42 was cancelled while it was RUNNING",
        "Slurm job 42, which had come back, was cancelled while it was PENDING",
    ]


@pytest.mark.slow
@pytest.mark.contract("C46")
@pytest.mark.parametrize("noted", [True, False])
def test_a_successor_that_is_submitted_while_its_run_is_ended_is_ended_too(
    run: RunFolder, slurm: HandSlurm, noted: bool
) -> None:
    """Known by the attempt's own record, or by the folder in which it works."""
    (slurm.folder / "folder").write_text(str(run.path))
    submit(run, "42")
    attempt(run, 0, "42", restarted={"way": "successor", "job_id": "43"} if noted else None)
    slurm.jobs({"42": "RUNNING"})
    slurm.on_scancel({"43": "PENDING"})
    stop_run(run)
    assert slurm.asked("scancel") == ["scancel 42", "scancel 43"]
    assert run.stopped.read_text() == "42\n43\n"


@pytest.mark.slow
def test_the_array_of_an_element_is_never_cancelled(run: RunFolder, slurm: HandSlurm) -> None:
    (slurm.folder / "folder").write_text("/where/the/array/was/submitted")
    submit(run, "42_1")
    attempt(run, 0, "42_1")
    slurm.jobs({"42_0": "RUNNING", "42_1": "RUNNING", "42_2": "PENDING"})
    stop_run(run)
    assert slurm.asked("scancel") == ["scancel 42_1"]


def test_a_bare_number_of_an_array_stops_nobody(run: RunFolder, slurm: HandSlurm) -> None:
    submit(run, "42")
    slurm.jobs({"42_0": "RUNNING", "42_1": "RUNNING"})
    stop_run(run, wait_s=1.0)
    assert slurm.asked("scancel") == []


@pytest.mark.slow
def test_slurm_that_falls_silent_meanwhile_is_asked_again_and_the_note_stays(
    run: RunFolder, slurm: HandSlurm
) -> None:
    submit(run, "42")
    attempt(run, 0, "42")
    slurm.jobs({"42": "RUNNING"})
    slurm.on_scancel({"42": "COMPLETING"})

    def silent_for_a_while() -> None:
        wait_until(lambda: slurm.asked("scancel"), "asked")
        slurm.refuses("squeue", "squeue: error: Unable to contact slurm controller")
        time.sleep(1)
        slurm.jobs({"42": "CANCELLED"})
        slurm.answers("squeue")

    thread = threading.Thread(target=silent_for_a_while)
    thread.start()
    state = stop_run(run)
    thread.join()
    assert state.state == "CANCELLED"
    assert run.stopped.read_text() == "42\n"


@pytest.mark.slow
def test_a_stop_of_a_paused_run_and_of_one_that_waits_to_go_on_is_for_good(
    run: RunFolder, slurm: HandSlurm
) -> None:
    submit(run, "42")
    attempt(run, 0, "42", end={"cause": "node_failure", "to_be_continued": True}, restart=INTENT)
    slurm.jobs({"42": "NODE_FAIL"})
    assert read_state(run).pending_restart == "node_failure"
    state = stop_run(run)
    assert (state.pending_restart, slurm.asked("scancel")) == ("", [])
    run.stopped.unlink()
    run.paused.write_text("42\n")
    assert read_state(run).state == "PAUSED"
    assert stop_run(run).state != "PAUSED"
    assert not run.paused.exists()


def test_without_waiting_a_stop_returns_once_all_is_asked(run: RunFolder, slurm: HandSlurm) -> None:
    submit(run, "42")
    attempt(run, 0, "42")
    slurm.jobs({"42": "RUNNING"})
    slurm.on_scancel({"42": "COMPLETING"})
    begun = time.monotonic()
    assert stop_run(run, wait=False).state == "COMPLETING"
    assert time.monotonic() - begun < 5


# Pause through Slurm


@pytest.mark.contract("C46")
def test_a_waiting_job_is_held_and_the_note_comes_first(run: RunFolder, slurm: HandSlurm) -> None:
    submit(run, "42")
    slurm.jobs({"42": "PENDING Priority"})
    told: list[str] = []
    state = pause_run(run, told=told.append)
    assert (state.state, state.reason) == ("PENDING", "held by tp job pause")
    assert run.paused.read_text() == "42\n"
    assert told == ["Slurm job 42 is held"]
    done = resume(run, {})
    assert (done.job_id, done.released) == ("42", True)
    assert slurm.asked("scontrol") == ["scontrol hold 42", "scontrol release 42"]
    assert not run.paused.exists() and slurm.asked("sbatch") == []


def test_a_job_that_begins_while_it_is_to_be_held_is_asked_to_save(run: RunFolder, slurm: HandSlurm) -> None:
    submit(run, "42")
    attempt(run, 0, "42")
    slurm.jobs({"42": "RUNNING"})
    assert pause_run(run, wait=False).reason == "asked by tp job pause to save and end"
    assert run.attempt(0).stop_marker.exists()
    assert slurm.asked("scancel") == ["scancel --signal=USR2 --batch 42"]


@pytest.mark.slow
def test_a_job_whose_script_has_not_come_so_far_gets_no_signal(run: RunFolder, slurm: HandSlurm) -> None:
    """It would end before it could say a word."""
    submit(run, "42")
    slurm.jobs({"42": "RUNNING"})
    thread = threading.Timer(0.8, lambda: attempt(run, 0, "42"))
    thread.start()
    pause_run(run, wait=False)
    assert slurm.asked("scancel") == ["scancel --signal=USR2 --batch 42"]
    assert run.attempt(0).stop_marker.exists()


@pytest.mark.slow
def test_a_pause_that_slurm_refuses_leaves_no_note(run: RunFolder, slurm: HandSlurm) -> None:
    submit(run, "42")
    slurm.jobs({"42": "PENDING Priority"})
    slurm.refuses("scontrol", "Access/permission denied for job 42")
    with pytest.raises(OperationError, match="Access/permission denied"):
        pause_run(run)
    assert not run.paused.exists()


@pytest.mark.parametrize("state", ["PREPARED", "INCOMPLETE", "COMPLETED", "PAUSED", "stopping"])
def test_what_cannot_be_paused_is_told(run: RunFolder, slurm: HandSlurm, state: str) -> None:
    if state == "INCOMPLETE":
        run.script.unlink()
    elif state != "PREPARED":
        submit(run, "42")
        attempt(run, 0, "42", end=None if state == "stopping" else {"for_good": state == "COMPLETED"})
        slurm.jobs({"42": "RUNNING" if state == "stopping" else "COMPLETED"})
        if state != "COMPLETED":
            (run.paused if state == "PAUSED" else run.stopped).write_text("42\n")
    with pytest.raises(UsageError, match=r"nothing to pause|paused already|being stopped"):
        pause_run(run)
    assert slurm.asked("scontrol", "scancel") == []


# Resume


@pytest.mark.contract("C46")
def test_a_lost_restart_is_carried_out_once_and_avoids_the_dead_nodes(
    run: RunFolder, slurm: HandSlurm
) -> None:
    submit(run, "42")
    attempt(run, 0, "42", end={"cause": "node_failure", "to_be_continued": True}, restart=INTENT)
    slurm.jobs({"42": "NODE_FAIL"})
    done = resume(run, {})
    assert slurm.asked("sbatch")[-1] == f"sbatch --exclude=n2,n3 {run.script}"
    assert json.loads((run.attempt(0).path / "restarted.json").read_text())["job_id"] == done.job_id
    state = read_state(run)
    assert (state.state, state.job_id) == ("PENDING", done.job_id)
    assert state.reason == "attempt 1 waits: attempt 0 lost a node (Priority)"
    with pytest.raises(UsageError, match="is PENDING"):
        resume(run, {})


def test_nodes_that_the_user_excluded_stay_excluded(tmp_path: Path, slurm: HandSlurm) -> None:
    run = slurm_run(tmp_path / "tuneplane", changes={"spec.slurm.exclude": "n9"})
    submit(run, "42")
    attempt(run, 0, "42", end={"to_be_continued": True}, restart=INTENT)
    slurm.jobs({"42": "NODE_FAIL"})
    resume(run, {})
    assert slurm.asked("sbatch")[-1].startswith("sbatch --exclude=n9,n2,n3 ")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("PREPARED", "was never submitted"),
        ("INCOMPLETE", "was never complete"),
        ("RUNNING", "is RUNNING"),
        ("COMPLETED", "is complete"),
        ("NOT_SUBMITTED", "was never submitted: invalid partition"),
        ("UNKNOWN", "cannot be told"),
    ],
)
def test_what_cannot_go_on_is_told(run: RunFolder, slurm: HandSlurm, made: str, words: str) -> None:
    if made == "INCOMPLETE":
        run.script.unlink()
    elif made == "NOT_SUBMITTED":
        run.submit_error.write_text("invalid partition\n")
    elif made != "PREPARED":
        submit(run, "42")
        attempt(run, 0, "42", end={"for_good": True} if made == "COMPLETED" else None)
        slurm.jobs({"42": made})
    if made == "UNKNOWN":
        slurm.refuses("squeue", "Unable to contact slurm controller")
    with pytest.raises(UsageError, match=words):
        resume(run, {})
    assert slurm.asked("sbatch") == []


def test_an_sbatch_that_refuses_leaves_a_paused_run_paused(run: RunFolder, slurm: HandSlurm) -> None:
    submit(run, "42")
    attempt(run, 0, "42", end={})
    run.paused.write_text("42\n")
    slurm.jobs({"42": "COMPLETED"})
    slurm.refuses("sbatch", "sbatch: error: QOSMaxSubmitJobPerUserLimit")
    with pytest.raises(OperationError, match="QOSMaxSubmitJobPerUserLimit"):
        resume(run, {})
    assert read_state(run).state == "PAUSED"
    assert not is_being_started(run)


def test_a_job_that_a_killed_tp_could_not_note_is_found_before_another_is_queued(
    run: RunFolder, slurm: HandSlurm
) -> None:
    (slurm.folder / "folder").write_text(str(run.path))
    submit(run, "42")
    attempt(run, 0, "42", end={"code": 1, "for_good": True})
    slurm.jobs({"43": "PENDING Priority"})
    with pytest.raises(UsageError, match="is PENDING"):
        retry(run, {})
    assert slurm.asked("sbatch") == []
    assert read_state(run).job_id == "43"


def test_a_pause_that_was_killed_before_it_held_the_job_is_taken_back(
    run: RunFolder, slurm: HandSlurm
) -> None:
    submit(run, "42")
    slurm.jobs({"42": "PENDING Priority"})
    run.paused.write_text("42\n")
    assert resume(run, {}).released
    assert not run.paused.exists() and slurm.asked("scontrol", "sbatch") == []


def test_a_job_whose_script_never_begins_is_not_said_to_be_asked(
    run: RunFolder, slurm: HandSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(run, "42")
    slurm.jobs({"42": "RUNNING"})
    with pytest.raises(OperationError, match="has not begun by now"):
        pause_run(run, wait_s=0.5)
    assert not run.paused.exists()


# One start at a time


@pytest.mark.slow
def test_a_second_start_is_told_who_is_at_it(run: RunFolder, slurm: HandSlurm) -> None:
    submit(run, "42")
    attempt(run, 0, "42", end={"code": 1, "for_good": True})
    code = (
        "import sys, time; from pathlib import Path; from tuneplane.kernel.runfolder import RunFolder\n"
        "from tuneplane.runs.starting import starting\n"
        "with starting(RunFolder(Path(sys.argv[1]))): print('held', flush=True); time.sleep(60)\n"
    )
    root = str(Path(__file__).resolve().parents[1])
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(run.path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(OperationError, match=rf"is being started by \S+ on \S+ \(process {holder.pid}\)"):
            retry(run, {})
        assert slurm.asked("sbatch") == []
    finally:
        holder.kill()
        holder.wait()
    assert retry(run, {}).job_id  # what a killed one left is taken over


def test_many_retries_at_once_queue_one_job(run: RunFolder, slurm: HandSlurm) -> None:
    submit(run, "42")
    attempt(run, 0, "42", end={"code": 1, "for_good": True})
    results: list[str] = []

    def one() -> None:
        try:
            results.append(retry(run, {}).job_id)
        except (OperationError, UsageError):
            results.append("told")

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["9001", "told", "told", "told"]


def test_a_full_disk_is_told_as_such(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tuneplane.images.turn.write_json", full)
    with pytest.raises(OperationError, match="could not be noted: No space left on device"), starting(run):
        pass


# On this machine


@pytest.mark.contract("C47")
def test_a_local_run_saves_ends_and_goes_on(local: Callable[..., Run]) -> None:
    run = local(f'[ "$TUNEPLANE_JOB_ATTEMPT" = 1 ] || {{ {SAVES}; }}')
    start_local(run.folder)
    run.wait_for_line("begun")
    state = pause_run(run.folder)
    assert (state.state, state.code) == ("PAUSED", 0)
    assert "saved" in run.log()
    with pytest.raises(UsageError, match="paused already"):
        pause_run(run.folder)
    resume(run.folder, {})
    wait_until(lambda: read_state(run.folder).is_final, "ended")
    state = read_state(run.folder)
    assert (state.state, state.attempts) == ("COMPLETED", 2)
    assert not run.folder.paused.exists()


@pytest.mark.contract("C47")
def test_a_local_run_that_waits_for_its_share_is_ended_and_resume_starts_it(
    local: Callable[..., Run],
) -> None:
    cpus = len(os.sched_getaffinity(0))
    first = local("echo begun; sleep 300", per_node=cpus)
    start_local(first.folder)
    first.wait_for_line("begun")
    second = local("echo begun", per_node=cpus)
    start_local(second.folder)
    wait_until(lambda: read_state(second.folder).state == "PENDING", "pending")
    state = pause_run(second.folder)
    assert (state.state, state.attempts) == ("PAUSED", 0)
    assert state.reason == f"paused before it had begun; tp job resume {second.folder.run_id} starts it"
    stop_run(first.folder)
    resume(second.folder, {})
    wait_until(lambda: read_state(second.folder).is_final, "ended")
    assert read_state(second.folder).state == "COMPLETED"
    assert len(read_submissions(second.folder)) == 2


@pytest.mark.slow
def test_a_local_run_that_hears_nothing_is_told_to_be_still_there(local: Callable[..., Run]) -> None:
    run = local("trap '' USR2; echo begun; sleep 300")
    start_local(run.folder)
    run.wait_for_line("begun")
    state = pause_run(run.folder, wait_s=1.0)
    assert (state.state, state.reason) == ("RUNNING", "asked by tp job pause to save and end")
    state = stop_run(run.folder)
    assert (state.state, state.reason) == ("CANCELLED", "stopped by tp job stop")
    assert not run.folder.paused.exists()
