"""How a run is, told from records that the kernel itself wrote and from what squeue and sacct print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_fixture import Run, runs_below, wait_until

from tuneplane.kernel.files import write_atomic, write_json
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import read_submissions, record_submission
from tuneplane.runs.causes import on_node
from tuneplane.runs.state import FINAL, RunState, read_state, read_states

pytestmark = pytest.mark.timeout(120)

MakeRun = Callable[..., Run]
HOST = os.uname().nodename
FAIL = "echo failed; exit 3"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRun]:
    with runs_below(tmp_path) as make_one:
        yield make_one


class Slurm:
    """What squeue and sacct say of jobs, as programs first on the PATH, and how often they were asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.calls, self._monkeypatch = folder, folder / "calls", monkeypatch
        folder.mkdir()
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        self.queue()
        self.books()

    def queue(self, *lines: str, refuses: str = "") -> None:
        """squeue knows these lines (`id|state|nodes|reason`), or refuses with these words."""
        self._program(
            "squeue", lines, refuses or ("" if lines else "slurm_load_jobs error: Invalid job id specified")
        )

    def queue_all(self, *lines: str) -> None:
        """squeue knows these lines, of whatever it is asked."""
        self._program("squeue", lines, "", asked="[line.split('|')[0] for line in known.splitlines()]")

    def books(self, *lines: str, refuses: str = "") -> None:
        """sacct knows these lines (`id|state|code|nodes|reason`)."""
        self._program("sacct", lines, refuses)

    def gone(self) -> None:
        """A machine without Slurm."""
        (self.folder / "empty").mkdir()
        self._monkeypatch.setenv("PATH", str(self.folder / "empty"))

    def asked(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    def _program(
        self,
        name: str,
        lines: tuple[str, ...],
        refuses: str,
        asked: str = "next(a for a in sys.argv if a.startswith('--jobs=')).split('=')[1].split(',')",
    ) -> None:
        known = "\n".join(lines)
        write_atomic(
            self.folder / name,
            "#!/usr/bin/python3 -IS\nimport sys\n"
            f"open({str(self.calls)!r}, 'a').write({name!r} + ' ' + ' '.join(sys.argv[1:]) + '\\n')\n"
            f"known = {known!r}\nasked = {asked}\n"
            "lines = [line for line in known.splitlines() if line.split('|')[0] in asked]\n"
            "print('\\n'.join(lines))\n"
            f"sys.exit({refuses!r} or None)\n",
            0o755,
        )


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(tmp_path / "slurm bin", monkeypatch)


def told(state: RunState) -> tuple[str, int | None, str]:
    return state.state, state.code, state.reason


def run_to_end(run: Run, code: int | None = None, **more: Any) -> int:
    """Claim, run and end one attempt as the batch script does; its number."""
    attempt = run.claimed(**more)
    done = run.node(attempt, **more)
    run.end(attempt, done.returncode if code is None else code)
    return attempt


# Before a job


def test_a_rendered_run_is_prepared(make: MakeRun, slurm: Slurm) -> None:
    run = make("true")
    state = read_state(run.folder)
    assert told(state) == ("PREPARED", None, "rendered, not submitted")
    assert (state.experiment, state.profile, state.attempt, state.attempts) == ("ring", "h200:8", None, 0)
    assert (state.job_id, state.nodes, state.folder) == ("", [], str(run.path))
    assert not state.is_final


def test_a_job_that_waits_and_that_nobody_noted_is_found_by_its_folder(make: MakeRun, slurm: Slurm) -> None:
    """sbatch by hand, or a submit whose terminal was closed between sbatch and its note."""
    run = make("true")
    slurm.queue_all(f"4343|PENDING||Resources\x1f{run.path}", "4344|PENDING||Priority\x1f/somewhere/else")
    state = read_state(run.folder)
    assert (state.state, state.job_id) == ("PENDING", "4343")


def test_a_run_that_slurm_refused_says_so_in_slurms_words(make: MakeRun, slurm: Slurm) -> None:
    run = make("true")
    run.folder.submit_error.write_bytes(b"sbatch refused: error: invalid partition\n caf\xe9\n")
    state = read_state(run.folder)
    assert told(state) == ("NOT_SUBMITTED", None, "sbatch refused: error: invalid partition caf\ufffd")
    assert state.is_final


# While it waits and runs


def test_a_waiting_run_has_slurms_reason_and_no_node(make: MakeRun, slurm: Slurm) -> None:
    run = make("true")
    record_submission(run.folder, "4242", "tp")
    slurm.queue("4242|PENDING||Resources")
    state = read_state(run.folder)
    assert told(state) == ("PENDING", None, "Resources")
    assert state.job_id == "4242" and state.submitted_at and abs(state.submitted_at - time.time()) < 60
    assert (state.started_at, state.ended_at, state.nodes) == (None, None, [])


@pytest.mark.contract("C46")
@pytest.mark.parametrize("squeue", ["4242|RUNNING|n1|None", "", "silent", "gone"])
def test_a_running_run_is_known_by_slurm_or_by_its_heartbeat(
    make: MakeRun, slurm: Slurm, squeue: str
) -> None:
    run = make("echo begun; sleep 60")
    record_submission(run.folder, "4242", "tp")
    attempt = run.claimed()
    agent = run.start_node(attempt)
    run.wait_for_line("begun")
    wait_until(lambda: run.record().get("state") == "running", "running")
    if squeue == "silent":
        slurm.queue(refuses="slurm_load_jobs error: Unable to contact slurm controller")
    elif squeue == "gone":
        slurm.gone()
    elif squeue:
        slurm.queue(squeue)
    state = read_state(run.folder)
    assert state.state == "RUNNING"
    assert ("Unable to contact" in state.reason) == (squeue == "silent")
    (node,) = state.nodes
    assert (node.rank, node.host, node.state, node.code) == (0, "n1", "running", None)
    assert node.beat_age_s is not None and node.beat_age_s < 30
    assert state.started_at and state.ended_at is None
    agent.terminate()
    run.finish(agent)


def test_a_job_of_that_number_in_another_folder_is_another_job(make: MakeRun, slurm: Slurm) -> None:
    run = make("true")
    record_submission(run.folder, "4242", "tp")
    run_to_end(run)
    slurm.queue("4242|PENDING||Resources\x1f/home/somebody/else")
    assert told(read_state(run.folder))[:2] == ("COMPLETED", 0)
    slurm.queue(f"4242|PENDING||Resources\x1f{run.path}")
    assert read_state(run.folder).state == "PENDING"


# Ends by our own records


@pytest.mark.contract("C46")
@pytest.mark.parametrize("accounting", [True, False])
def test_a_completed_run_is_told_long_after_slurm_forgot_it(
    make: MakeRun, slurm: Slurm, accounting: bool
) -> None:
    run = make("true")
    record_submission(run.folder, "4242", "tp")
    run_to_end(run)
    slurm.books("4242|COMPLETED|0:0|n1|None") if accounting else slurm.books(
        refuses="Slurm accounting storage is disabled"
    )
    state = read_state(run.folder)
    assert told(state) == ("COMPLETED", 0, "")
    assert state.started_at and state.ended_at and state.ended_at >= state.started_at
    assert [call for call in slurm.asked() if call.startswith("sacct")] == [], "our own record is enough"


@pytest.mark.contract("C46")
@pytest.mark.parametrize("accounting", [True, False])
def test_a_failed_run_has_its_exit_code_and_the_node_that_failed(
    make: MakeRun, slurm: Slurm, accounting: bool
) -> None:
    run = make(FAIL)
    record_submission(run.folder, "4242", "tp")
    run_to_end(run)
    slurm.books("4242|FAILED|3:0|n1|None") if accounting else slurm.books(
        refuses="Slurm accounting storage is disabled"
    )
    assert told(read_state(run.folder)) == ("FAILED", 3, "the command ended with exit code 3 on n1")


def test_of_several_nodes_the_first_to_fail_is_told_and_not_the_last(make: MakeRun, slurm: Slurm) -> None:
    run = make('[ "$TUNEPLANE_MACHINE_RANK" = 1 ] && exit 7; sleep 60; exit 9', nodes=2)
    record_submission(run.folder, "4242", "tp")
    attempt = run.claimed()
    victim = run.start_node(attempt, rank=0, nodes=2)
    run.node(attempt, rank=1, nodes=2)
    victim.terminate()
    run.finish(victim)
    run.end(attempt, 143)
    assert told(read_state(run.folder)) == ("FAILED", 7, "the command ended with exit code 7 on n2")


def test_a_run_whose_last_words_are_still_to_be_written_runs(make: MakeRun, slurm: Slurm) -> None:
    """Its node has ended, Slurm has not: between the two the batch script works."""
    run = make("true")
    record_submission(run.folder, "4242", "tp")
    run.node(run.claimed())
    slurm.queue("4242|COMPLETING|n1|None")
    assert read_state(run.folder).state == "COMPLETING"


@pytest.mark.parametrize(("train", "expected"), [("true", ("COMPLETED", 0)), (FAIL, ("FAILED", 3))])
def test_an_end_that_was_never_written_is_told_by_the_nodes(
    make: MakeRun, slurm: Slurm, train: str, expected: tuple[str, int]
) -> None:
    run = make(train)
    record_submission(run.folder, "4242", "tp")
    run.node(run.claimed())
    assert told(read_state(run.folder))[:2] == expected


# Ends from outside


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slurm_state", "reason"),
    [
        ("TIMEOUT", "TimeLimit"),
        ("PREEMPTED", ""),
        ("DEADLINE", ""),
        ("NODE_FAIL", "NodeDown"),
        ("BOOT_FAIL", ""),
    ],
)
def test_what_ended_a_run_from_outside_is_slurms_to_say(
    make: MakeRun, slurm: Slurm, slurm_state: str, reason: str
) -> None:
    run = make("sleep 60")
    record_submission(run.folder, "4242", "tp")
    attempt = run.claimed()
    agent = run.start_node(attempt)
    wait_until(lambda: run.record().get("state") == "running", "running")
    agent.terminate()
    run.end(attempt, run.finish(agent).returncode)
    slurm.queue(f"4242|{slurm_state}|n1|{reason or 'None'}")
    state = read_state(run.folder)
    assert (state.state, state.code) == (slurm_state, 143)
    assert state.is_final
    slurm.queue()
    slurm.books(f"4242|{slurm_state}|0:0|n1|{reason or 'None'}")
    assert told(read_state(run.folder)) == told(state)


def test_a_run_at_its_limit_without_accounting_is_known_to_have_been_asked_to_end(
    make: MakeRun, slurm: Slurm
) -> None:
    run = make("sleep 60")
    record_submission(run.folder, "4242", "tp")
    attempt = run.claimed()
    agent = run.start_node(attempt)
    wait_until(lambda: run.record().get("state") == "running", "running")
    agent.terminate()
    run.end(attempt, run.finish(agent).returncode)
    slurm.books(refuses="Slurm accounting storage is disabled")
    state, code, reason = told(read_state(run.folder))
    assert (state, code) == ("CANCELLED", 143)
    assert reason == "the command was ended by SIGTERM (exit code 143) on n1"


@pytest.mark.slow
def test_a_run_that_saved_as_it_was_asked_is_not_at_its_end(make: MakeRun, slurm: Slurm) -> None:
    run = make('until [ -e "$TUNEPLANE_STOP_FILE" ]; do sleep 0.05; done')
    record_submission(run.folder, "4242", "tp")
    attempt = run.claimed()
    agent = run.start_node(attempt)
    wait_until(lambda: run.record().get("state") == "running", "running")
    run.attempt().stop_marker.touch()
    assert run.finish(agent).returncode == 0
    run.end(attempt, 0)
    slurm.queue("4242|COMPLETED|n1|None")
    state, code, reason = told(read_state(run.folder))
    assert (state, code) == ("CANCELLED", 0)
    assert (
        reason == f"it was asked to save and end, and did: tp job retry {run.folder.run_id} starts it again"
    )


@pytest.mark.slow
def test_a_failure_of_its_own_comes_before_the_cancelling_that_followed(make: MakeRun, slurm: Slurm) -> None:
    run = make(FAIL)
    record_submission(run.folder, "4242", "tp")
    run_to_end(run)
    slurm.queue("4242|CANCELLED|n1|None")
    assert told(read_state(run.folder))[:2] == ("FAILED", 3)


@pytest.mark.slow
def test_memory_is_told_by_slurm_with_the_trainers_own_code(make: MakeRun, slurm: Slurm) -> None:
    run = make("kill -9 $$")
    record_submission(run.folder, "4242", "tp")
    run_to_end(run)
    slurm.queue("4242|OUT_OF_MEMORY|n1|OutOfMemory")
    state, code, reason = told(read_state(run.folder))
    assert (state, code) == ("OUT_OF_MEMORY", 137)
    assert "SIGKILL" in reason


def test_a_run_that_was_cancelled_says_by_whom(make: MakeRun, slurm: Slurm) -> None:
    run = make("sleep 60")
    record_submission(run.folder, "4242", "tp")
    slurm.books(f"4242|CANCELLED by {os.getuid()}|0:15|n1|None")
    state, code, reason = told(read_state(run.folder))
    assert (state, code) == ("CANCELLED", 143)
    assert reason.startswith("by ") and not reason[3:].isdigit()
    run.folder.stopped.write_text("4242\n")
    assert told(read_state(run.folder)) == ("CANCELLED", 143, "stopped by tp job stop")
    slurm.books(refuses="Slurm accounting storage is disabled")
    assert told(read_state(run.folder)) == ("CANCELLED", None, "stopped by tp job stop")


def test_what_an_earlier_start_was_stopped_by_does_not_stop_a_later_one(make: MakeRun, slurm: Slurm) -> None:
    run = make("true")
    record_submission(run.folder, "4242", "tp")
    run.folder.stopped.write_text("4242\n")
    record_submission(run.folder, "4250", "tp")
    slurm.books("4250|FAILED|1:0|n1|None")
    assert told(read_state(run.folder))[:2] == ("FAILED", 1)


# Ends before an attempt


def test_a_script_that_ended_before_its_attempt_is_told_in_its_own_words(make: MakeRun, slurm: Slurm) -> None:
    run = make("true")
    record_submission(run.folder, "4242", "tp")
    (run.folder.slurm / "4242.out").write_text(
        "job.json: FAILED\nsha256sum: WARNING: 1 computed checksum did NOT match\n"
        "tuneplane: the canary file is not there\n  → choose another\n\n"
    )
    slurm.queue("4242|FAILED|n1|NonZeroExitCode")
    slurm.books("4242|FAILED|1:0|n1|None")
    assert told(read_state(run.folder)) == ("FAILED", 1, "the canary file is not there")
    slurm.queue()
    slurm.books()
    assert told(read_state(run.folder)) == ("LOST", None, "the canary file is not there")


def test_words_of_a_script_are_its_last_line_where_the_kernel_said_nothing(
    make: MakeRun, slurm: Slurm
) -> None:
    run = make("true")
    record_submission(run.folder, "4242", "tp")
    (run.folder.slurm / "4242.out").write_bytes(
        b"x" * 9000 + b"\njob.json: FAILED\nsha256sum: \xff mismatch\n\n"
    )
    slurm.queue("4242|FAILED|n1|NonZeroExitCode")
    assert told(read_state(run.folder)) == ("FAILED", None, "sha256sum: \ufffd mismatch")


def test_a_script_that_slurm_could_not_start(make: MakeRun, slurm: Slurm) -> None:
    run = make("true")
    record_submission(run.folder, "4242", "tp")
    slurm.queue("4242|FAILED|n1|JobLaunchFailure")
    slurm.books("4242|FAILED|0:53|n1|None")
    assert told(read_state(run.folder)) == ("FAILED", 53, "")
    slurm.books(refuses="Slurm accounting storage is disabled")
    assert told(read_state(run.folder)) == ("FAILED", None, "JobLaunchFailure")


def test_a_limit_without_any_record_of_ours(make: MakeRun, slurm: Slurm) -> None:
    """The batch script was killed before it could write the end."""
    run = make("sleep 60")
    record_submission(run.folder, "4242", "tp")
    run.claimed()
    slurm.queue("4242|TIMEOUT|n1|TimeLimit")
    assert told(read_state(run.folder)) == ("TIMEOUT", None, "TimeLimit")


def test_a_job_that_completed_without_a_record_of_ours(make: MakeRun, slurm: Slurm) -> None:
    """A full disk, say."""
    run = make("true")
    record_submission(run.folder, "4242", "tp")
    run.claimed()
    slurm.queue("4242|COMPLETED|n1|None")
    assert told(read_state(run.folder)) == ("COMPLETED", 0, "")


def test_a_run_that_saved_onto_a_full_disk_is_told_with_what_goes_on(make: MakeRun, slurm: Slurm) -> None:
    """Its nodes ended well, its end could not be written, and so the script left with 75."""
    run = make("true")
    record_submission(run.folder, "4242", "tp")
    run.node(run.claimed())
    slurm.queue("4242|FAILED|n1|NonZeroExitCode")
    goes_on = f"it saved and ended, which could not be noted; tp job resume {run.folder.run_id} goes on"
    slurm.books("4242|FAILED|75:0|n1|None")
    assert told(read_state(run.folder)) == ("FAILED", 75, goes_on)
    slurm.books(refuses="Slurm accounting storage is disabled")
    assert told(read_state(run.folder)) == ("FAILED", None, goes_on)


def test_a_reason_with_a_remedy_names_its_node_before_it() -> None:
    assert on_node("it is not there\n  → make it", "n1") == "it is not there on n1\n  → make it"
    assert on_node("n1 has been silent", "n1") == "n1 has been silent"


# Nobody knows


def test_a_run_that_left_nothing_and_that_slurm_forgot_is_lost(make: MakeRun, slurm: Slurm) -> None:
    run = make("sleep 60")
    record_submission(run.folder, "4242", "tp")
    attempt = run.claimed()
    agent = run.start_node(attempt)
    wait_until(lambda: run.record().get("state") == "running", "running")
    agent.kill()
    run.finish(agent)
    beat = run.attempt().node_beat(0)
    os.utime(beat, (time.time() - 3600, time.time() - 3600))
    state = read_state(run.folder)
    assert told(state) == ("LOST", None, "it left no record of its end, and Slurm does not know it any more")
    assert state.is_final


@pytest.mark.parametrize(
    ("queue", "books", "reason"),
    [
        (
            "squeue: error: Unable to contact slurm controller",
            "",
            "squeue refused: error: Unable to contact slurm controller",
        ),
        ("", "sacct: error: Connection refused", "sacct refused: error: Connection refused"),
    ],
)
def test_a_slurm_that_does_not_answer_makes_a_run_unknown_and_not_lost(
    make: MakeRun, slurm: Slurm, queue: str, books: str, reason: str
) -> None:
    run = make("true")
    record_submission(run.folder, "4242", "tp")
    if queue:
        slurm.queue(refuses=queue)
    if books:
        slurm.books(refuses=books)
    state = read_state(run.folder)
    assert told(state) == ("UNKNOWN", None, reason)
    assert not state.is_final


def test_accounting_that_was_not_told_of_an_end_makes_no_run_run(make: MakeRun, slurm: Slurm) -> None:
    """Slurm calls them runaway jobs."""
    run = make("true")
    record_submission(run.folder, "4242", "tp")
    slurm.books("4242|RUNNING|0:0|n1|None")
    assert read_state(run.folder).state == "LOST"


# Several starts


@pytest.mark.slow
@pytest.mark.parametrize("waiting", ["PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "CONFIGURING"])
def test_a_requeued_run_waits_whatever_its_former_attempt_left(
    make: MakeRun, slurm: Slurm, waiting: str
) -> None:
    run = make(FAIL)
    record_submission(run.folder, "4242", "tp")
    run_to_end(run)
    slurm.queue(f"4242|{waiting}||BeginTime")
    state = read_state(run.folder)
    assert told(state) == (waiting, None, "BeginTime")
    assert (state.nodes, state.started_at, state.ended_at) == ([], None, None)
    assert (state.attempt, state.attempts) == (0, 1)


@pytest.mark.slow
def test_a_second_attempt_that_waits_while_the_first_has_ended(make: MakeRun, slurm: Slurm) -> None:
    run = make(FAIL)
    record_submission(run.folder, "4242", "tp")
    run_to_end(run)
    record_submission(run.folder, "4250", "tp")
    slurm.queue("4250|PENDING||Priority")
    state = read_state(run.folder)
    assert told(state) == ("PENDING", None, "Priority")
    assert (state.job_id, state.attempts, state.nodes, state.ended_at) == ("4250", 1, [], None)


@pytest.mark.slow
def test_the_last_attempt_speaks_for_the_run(make: MakeRun, slurm: Slurm) -> None:
    run = make('[ "$TUNEPLANE_JOB_ATTEMPT" = 1 ]')
    record_submission(run.folder, "4242", "tp")
    run_to_end(run)
    assert read_state(run.folder).state == "FAILED"
    run.folder.secrets.write_text(f"TUNEPLANE_JOB_TOKEN={'a-token-of-this-run'}\n")
    record_submission(run.folder, "4250", "tp")
    run_to_end(run, job_id=4250)
    state = read_state(run.folder)
    assert told(state) == ("COMPLETED", 0, "")
    assert (state.job_id, state.attempt, state.attempts) == ("4250", 1, 2)


def test_a_second_start_that_was_refused_does_not_hide_the_first(make: MakeRun, slurm: Slurm) -> None:
    run = make("echo begun; sleep 60")
    record_submission(run.folder, "4242", "tp")
    attempt = run.claimed()
    agent = run.start_node(attempt)
    run.wait_for_line("begun")
    run.squeue_says("RUNNING")
    assert run.claim(job_id=4250).returncode == 1
    for by in ("hand", "tp"):
        record_submission(run.folder, "4250", by)
        slurm.queue("4242|RUNNING|n1|None", "4250|FAILED|n1|NonZeroExitCode")
        state = read_state(run.folder)
        assert (state.state, state.job_id, len(state.nodes)) == ("RUNNING", "4242", 1)
    agent.terminate()
    run.finish(agent)


def test_a_start_by_hand_that_was_refused_after_the_end_changes_nothing(make: MakeRun, slurm: Slurm) -> None:
    run = make("true")
    record_submission(run.folder, "4242", "tp")
    run_to_end(run)
    assert run.claim(job_id=4250).returncode == 1, "its secrets are gone"
    record_submission(run.folder, "4250", "hand")
    slurm.queue("4250|FAILED|n1|NonZeroExitCode")
    assert told(read_state(run.folder)) == ("COMPLETED", 0, "")


@pytest.mark.slow
def test_a_retry_that_failed_before_its_attempt_is_told(make: MakeRun, slurm: Slurm) -> None:
    run = make(FAIL)
    record_submission(run.folder, "4242", "tp")
    run_to_end(run)
    record_submission(run.folder, "4250", "tp")
    (run.folder.slurm / "4250.out").write_text("tuneplane: the canary file is not there\n")
    slurm.queue("4250|FAILED|n1|NonZeroExitCode")
    state = read_state(run.folder)
    assert (state.state, state.reason, state.job_id) == ("FAILED", "the canary file is not there", "4250")


def test_a_run_started_by_hand_alone_is_known_by_its_own_note(make: MakeRun, slurm: Slurm) -> None:
    run = make("true")
    run_to_end(run)
    (job,) = read_submissions(run.folder)
    assert (job.job_id, job.by) == ("4242", "hand")
    assert told(read_state(run.folder)) == ("COMPLETED", 0, "")


def test_an_attempt_whose_submission_was_not_noted_is_told_all_the_same(make: MakeRun, slurm: Slurm) -> None:
    run = make(FAIL)
    run_to_end(run)
    for path in run.folder.submissions.iterdir():
        path.unlink()
    state = read_state(run.folder)
    assert (state.state, state.code, state.job_id) == ("FAILED", 3, "4242")


# On this machine


@pytest.fixture
def local(make: MakeRun, slurm: Slurm) -> MakeRun:
    def make_local(train: str, **more: Any) -> Run:
        return make(train, scheduler="local", profile="local:1", path="/usr/bin:/bin", **more)

    return make_local


@pytest.mark.slow
@pytest.mark.contract("C47")
def test_a_local_run_is_known_without_slurm(local: MakeRun, slurm: Slurm) -> None:
    run = local("echo begun; sleep 60")
    slurm.gone()
    script = run.start_script()
    run.wait_for_line("begun")
    state = read_state(run.folder)
    assert (state.state, state.job_id, state.attempt) == ("RUNNING", f"local-{script.pid}", 0)
    assert [(n.rank, n.host) for n in state.nodes] == [(0, HOST)]
    script.terminate()
    assert script.wait(30) == 143
    assert told(read_state(run.folder))[:2] == ("CANCELLED", 143)


def test_a_local_run_that_was_killed_is_lost_at_once(local: MakeRun) -> None:
    run = local("echo begun; sleep 60")
    script = run.start_script()
    run.wait_for_line("begun")
    script.kill()
    script.wait()
    beat = run.attempt().node_beat(0)
    os.utime(beat, (time.time() - 3600, time.time() - 3600))
    state = read_state(run.folder)
    assert told(state) == ("LOST", None, "it left no record of its end, and its process is gone")


def test_a_reused_pid_is_not_taken_for_the_run(local: MakeRun) -> None:
    run = local("true")
    other = subprocess.Popen(["/usr/bin/sleep", "60"])
    try:
        record_submission(run.folder, f"local-{other.pid}", "tp", other.pid)
        assert read_state(run.folder).state == "PENDING"
        path = run.folder.submissions / f"local-{other.pid}.json"
        value = json.loads(path.read_text())
        write_json(path, {**value, "pid_start": value["pid_start"] - 1})
        assert read_state(run.folder).state == "LOST"
    finally:
        other.kill()
        other.wait()


def test_a_local_run_of_another_machine_is_told_as_far_as_this_one_sees(local: MakeRun) -> None:
    run = local("echo begun; sleep 60")
    path = run.folder.submissions / "local-77.json"
    write_json(
        path,
        {"job_id": "local-77", "by": "tp", "at": time.time(), "host": "login9", "pid": 77, "pid_start": 5},
    )
    assert told(read_state(run.folder)) == ("PENDING", None, "waits on login9, as far as this machine sees")


def test_a_former_starts_words_are_not_taken_for_the_present_ones(local: MakeRun) -> None:
    run = local("true")
    output = run.folder.slurm / "local.out"
    output.write_text("tuneplane: an old complaint\n")
    os.utime(output, (time.time() - 600, time.time() - 600))
    gone = subprocess.Popen(["/usr/bin/true"])
    record_submission(run.folder, f"local-{gone.pid}", "tp", gone.pid)
    gone.wait()
    assert "an old complaint" not in read_state(run.folder).reason
    output.write_text("tuneplane: a new complaint\n")
    assert read_state(run.folder).reason == "a new complaint"


# Many runs, and damaged ones


def test_slurm_is_asked_once_for_any_number_of_runs(make: MakeRun, slurm: Slurm) -> None:
    runs = [make("true") for _ in range(6)]
    for number, run in enumerate(runs[:5]):
        record_submission(run.folder, str(5000 + number), "tp")
    slurm.queue("5000|RUNNING|n1|None", "5001|PENDING||Priority")
    slurm.books("5002|TIMEOUT|0:0|n1|None", "5003|FAILED|2:0|n1|None")
    states = read_states(run.folder for run in runs)
    assert [s.state for s in states] == ["RUNNING", "PENDING", "TIMEOUT", "FAILED", "LOST", "PREPARED"]
    assert [s.run_id for s in states] == [run.folder.run_id for run in runs]
    calls = slurm.asked()
    assert [call.split()[0] for call in calls if "--jobs=" in call] == ["squeue", "sacct"]
    assert any("--jobs=5000,5001,5002,5003,5004" in call for call in calls)
    assert "--jobs=5002,5003,5004" in calls[-1]


DAMAGE: dict[str, dict[str, bytes]] = {
    "empty end": {"attempts/0/end.json": b""},
    "end is a list": {"attempts/0/end.json": b"[1]"},
    "code is text": {"attempts/0/end.json": b'{"code": "x", "for_good": true}'},
    "code is null": {"attempts/0/end.json": b'{"code": null}'},
    "start is torn": {"attempts/0/start.json": b'{"job_id": "42'},
    "start is odd": {"attempts/0/start.json": b'{"job_id": 4242, "started_at": "then"}'},
    "rank is text": {"attempts/0/node-0.json": b'{"rank": "x", "code": {}}'},
    "node is no utf-8": {"attempts/0/node-0.json": b"\xff"},
    "deep": {"attempts/0/node-0.json": b"[" * 100_000},
    "job.json is a list": {"job.json": b'{"spec": [1]}'},
    "job.json is empty": {"job.json": b""},
    "odd submissions": {
        "submissions/1.json": b"",
        "submissions/2.json": b"[]",
        "submissions/3.json": b'{"job_id": "3"}',
        "submissions/4.json": b'{"job_id": "4", "at": "x"}',
        "submissions/5.json": b'{"at": 1}',
    },
    "odd attempts": {f"attempts/{name}/x": b"" for name in ("01", "²", "x", ".0.tmp", "-1")},
    "stopped is no text": {"stopped": b"\xff\xfe"},
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_never_an_error_of_tp(make: MakeRun, slurm: Slurm, damage: str) -> None:
    run = make(FAIL)
    record_submission(run.folder, "4242", "tp")
    run_to_end(run)
    for name, data in DAMAGE[damage].items():
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).write_bytes(data)
    slurm.books("4242|FAILED|3:0|n1|None")
    state = read_state(run.folder)
    assert state.state in FINAL
    json.dumps(state.as_dict())


def test_a_folder_that_cannot_be_read_is_told_and_hides_no_other(make: MakeRun, slurm: Slurm) -> None:
    good, bad = make("true"), make("true")
    bad.folder.attempts_folder.rmdir()
    bad.folder.attempts_folder.write_text("no folder")
    states = read_states([bad.folder, RunFolder(good.path.parent / "gone"), good.folder])
    assert [s.state for s in states] == ["UNKNOWN", "UNKNOWN", "PREPARED"]
    assert states[0].reason.startswith("cannot be read: Not a directory")


@pytest.mark.slow
def test_signals_are_words_in_the_reason(make: MakeRun, slurm: Slurm) -> None:
    run = make(f"kill -{int(signal.SIGSEGV)} $$")
    record_submission(run.folder, "4242", "tp")
    run_to_end(run)
    assert told(read_state(run.folder)) == (
        "FAILED",
        139,
        "the command was ended by SIGSEGV (exit code 139) on n1",
    )
