"""What follows an attempt, told from records of the shape that agents and batch scripts write.

The records here are made, not recorded: each test writes the files itself.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tuneplane.diagnose.evidence import (
    End,
    Evidence,
    Fence,
    Job,
    Log,
    Node,
    Restart,
    Silent,
    Slurm,
    Step,
    Waiting,
)
from tuneplane.diagnose.finding import Finding
from tuneplane.diagnose.followed import read_end, read_ending, read_fence, read_paused, read_restart
from tuneplane.diagnose.verdict import diagnose
from tuneplane.kernel.runfolder import AttemptFolder, RunFolder

RUN = "mlp-20261129-120000-ab12"
NO_PROGRESS = "no progress since attempt 2: no new checkpoint in out/checkpoints and no new step"
LIMIT = {"TimeLimit": "01:00:00"}
JOB = Job(
    *("slurm", "h200:16", "gpu", 2, 8, "custom/custom", "external", "experiments/mlp/train.sh", "none"),
    python="/usr/bin/python3",
    scratch="/tmp",
    signal_before_end_s=120,
)


def run_of(state: str, **more: Any) -> Evidence:
    """A run of two nodes in its third attempt."""
    nodes = (
        Node(0, "n1", "ended", 0, command_started_at=10.0, ended_at=90.0),
        Node(1, "n2", "ended", 0, command_started_at=10.0, ended_at=90.0),
    )
    known: dict[str, Any] = {
        "job_id": "7",
        "attempt": 2,
        "attempts": 3,
        "job": JOB,
        "nodes": nodes,
        "hosts": ("n1", "n2"),
        "slurm": Slurm("7", state, fields=LIMIT),
    }
    return Evidence(RUN, "mlp", "/data/runs/alice/mlp/" + RUN, state, 100.0, **{**known, **more})


def waiting(reason: str = "Priority", **more: Any) -> Evidence:
    """Its third attempt has ended, and its job waits."""
    queued = Slurm("8", "PENDING", reason, fields=LIMIT, waiting=Waiting(reason, "2026-11-29T20:00:00"))
    return run_of("PENDING", **{"job_id": "8", "slurm": queued, **more})


def first(evidence: Evidence) -> Finding:
    return diagnose(evidence)[0]


def test_a_run_that_met_its_time_limit_and_saved_is_told_with_what_its_next_attempt_waits_for() -> None:
    ended = End(0, "walltime", to_be_continued=True)
    restart = Restart("walltime", "requeue", age_s=30.0, carried_out=True, job_id="8")
    findings = diagnose(waiting(end=ended, restart=restart, stop_marker=True))
    assert [f.cause for f in findings] == ["walltime"]
    assert findings[0].sentence == (
        "attempt 2 reached its time limit of 01:00:00 and saved before it; attempt 3 starts by itself, and waits"
        " in the queue: jobs of higher priority are before it; Slurm expects it to start at 2026-11-29T20:00:00"
    )
    assert findings[0].remedy.startswith(
        "nothing is to be done: the next attempt goes on from the last checkpoint"
    )


def test_an_attempt_that_waits_in_a_hold_is_not_said_to_start_by_itself() -> None:
    found = first(
        waiting("JobHeldAdmin", end=End(0, "walltime"), restart=Restart("walltime", carried_out=True))
    )
    assert found.sentence.endswith("; attempt 3 waits in the queue: it is held by an administrator")
    assert found.remedy == "ask the administrators"


def test_a_time_limit_after_which_nothing_restarts_says_why() -> None:
    ended = End(
        137, "walltime", not_restarted="restarts are off for this run (max_restarts 0 would be told so)"
    )
    found = first(run_of("TIMEOUT", end=dataclasses.replace(ended, not_restarted="it was stopped"), code=137))
    assert found.cause == "walltime"
    assert "and Slurm ended it; it is not started again: it was stopped" in found.sentence
    assert f"tp job retry {RUN}" in found.remedy
    assert "should_stop()" in found.remedy


def test_a_preempted_attempt_that_saved_is_told_with_its_successor() -> None:
    found = first(waiting(end=End(0, "preemption", True), restart=Restart("preemption", carried_out=True)))
    assert found.cause == "preempted"
    assert found.sentence.startswith(
        "attempt 2 was preempted by a job of higher priority; attempt 3 starts by itself"
    )


def test_a_node_that_was_given_up_is_named_with_its_rank_and_avoided() -> None:
    found = first(
        waiting(
            fence=Fence((Silent("n2", 1, 42.0),), 0),
            end=End(137, "node_failure"),
            restart=Restart("node_failure", "successor", ("n2",), 20.0, True, "8"),
        )
    )
    assert found.cause == "node-failure"
    assert (found.node, found.host) == (1, "n2")
    assert found.sentence.startswith(
        "node 1 (n2) gave no sign of life for 42 s, so the others ended attempt 2; attempt 3 starts by itself"
    )
    assert "the next attempt avoids n2" in found.remedy
    assert "fence.json: written by node 0" in found.evidence


def test_a_node_that_is_being_given_up_is_told_while_the_attempt_still_ends() -> None:
    nodes = (Node(0, "n1", "running", beat_age_s=1.0, command_started_at=10.0), Node(1, "n2", "running"))
    found = first(run_of("RUNNING", nodes=nodes, fence=Fence((Silent("n2", 1, 42.0),), 0)))
    assert found.sentence == (
        "node 1 (n2) gave no sign of life for 42 s, so the others ended attempt 2; that is being done now"
    )


FENCED = "n1 has been silent for 30 s: it is dead or cut off"


def test_a_node_that_ended_its_own_ranks_is_told_with_why_where_nobody_says_more() -> None:
    nodes = (Node(0, "n1", "running"), Node(1, "n2", "ended", 137, FENCED, told_to_stop=True, ended_at=90.0))
    found = diagnose(run_of("LOST", nodes=nodes, code=None))
    assert found[0].cause == "agent-fenced"
    assert found[0].sentence == f"node 1 (n2) ended its own ranks: {FENCED}"
    assert found[0].node == 1
    known = first(run_of("NODE_FAIL", nodes=nodes, code=None))
    assert known.cause == "node-failure"
    assert f"node 1 (n2) ended its ranks: {FENCED}" in known.evidence


def test_a_run_of_which_a_node_fenced_itself_is_not_called_well_while_the_others_run() -> None:
    nodes = (
        Node(0, "n1", "running", beat_age_s=1.0, command_started_at=10.0),
        Node(1, "n2", "ended", 143, FENCED, told_to_stop=True, command_started_at=10.0, ended_at=90.0),
    )
    log = Log(0, "n1", 10, 10, 5.0, tail=("step 1",))
    found = diagnose(run_of("RUNNING", nodes=nodes, logs=(log,)))
    assert [f.cause for f in found] == ["agent-fenced"]
    assert found[0].sentence.endswith("; other nodes still run")


def test_several_nodes_that_were_given_up_are_counted() -> None:
    fence = Fence((Silent("n2", 1, 42.0), Silent("n3", 2, 44.0)), 0)
    assert "node 1 (n2) and 1 more gave no sign of life" in first(run_of("NODE_FAIL", fence=fence)).sentence


def test_a_chain_without_progress_is_told_with_what_would_make_progress() -> None:
    ended = End(143, "walltime", not_restarted=NO_PROGRESS, step=120, checkpoints=("step-100", "step-120"))
    earlier = ("attempt 1: exit code 0: walltime",)
    findings = diagnose(run_of("TIMEOUT", end=ended, code=143, earlier_ends=earlier))
    assert findings[0].cause == "restarts-without-progress"
    assert findings[0].sentence == f"attempt 2 met its walltime, and it is not started again: {NO_PROGRESS}"
    assert "--time" in findings[0].remedy
    assert "attempt 2: step 120, checkpoints: step-100, step-120" in findings[0].evidence
    assert earlier[0] in findings[0].evidence
    assert [f.cause for f in findings] == ["restarts-without-progress"], "not the time limit beside it"


def test_a_chain_that_used_up_its_restarts_is_told() -> None:
    ended = End(0, "preemption", not_restarted="max_restarts (10) is reached")
    findings = diagnose(run_of("PREEMPTED", end=ended, code=0, stop_marker=True))
    assert [f.cause for f in findings] == ["restarts-used-up"]
    assert "attempt 2 was preempted, and it is not started again: max_restarts (10)" in findings[0].sentence
    assert "--max-restarts" in findings[0].remedy


def test_a_restart_that_nobody_carried_out_is_told_with_the_command_that_does() -> None:
    lost = Restart("walltime", "successor", age_s=7300.0)
    found = first(run_of("TIMEOUT", end=End(0, "walltime", True), code=0, stop_marker=True, restart=lost))
    assert found.cause == "restart-lost"
    assert found.sentence == (
        "attempt 2 met its walltime, and the next one was not started: whoever was to start it is gone"
    )
    assert found.remedy == f"tp job resume {RUN} carries the restart out"
    assert found.certainty == "likely"


def test_a_restart_that_slurm_refused_is_told_with_slurms_words() -> None:
    said = "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy"
    found = first(
        run_of("TIMEOUT", end=End(0, "walltime", True), restart=Restart("walltime", error=said, age_s=1.0))
    )
    assert found.cause == "restart-lost"
    assert said in found.sentence
    assert found.certainty == "certain"


@pytest.mark.parametrize(
    ("state", "restart"),
    [
        ("TIMEOUT", Restart("walltime", age_s=3.0)),  # it is being carried out
        ("TIMEOUT", Restart("walltime", age_s=900.0, carried_out=True, job_id="8")),
        ("RUNNING", Restart("walltime", age_s=900.0)),  # it still saves
    ],
)
def test_a_restart_that_may_still_come_is_not_lost(state: str, restart: Restart) -> None:
    assert "restart-lost" not in [f.cause for f in diagnose(run_of(state, restart=restart))]


def test_an_intent_of_a_run_that_was_stopped_meanwhile_is_not_lost() -> None:
    found = diagnose(run_of("CANCELLED", restart=Restart("walltime", age_s=900.0), stopped=("7",)))
    assert [f.cause for f in found] == ["stopped-by-user"]


def test_a_paused_run_is_told_with_resume_and_not_with_what_slurm_calls_it() -> None:
    saved = run_of("CANCELLED", end=End(0, to_be_continued=True), code=0, stop_marker=True, paused=("7",))
    found = diagnose(saved)
    assert [f.sentence for f in found] == ["it was paused by tp job pause: it saved and ended"]
    assert found[0].remedy.startswith(f"tp job resume {RUN}")
    assert first(dataclasses.replace(saved, state="PAUSED")).cause == "paused"
    killed = dataclasses.replace(saved, state="PAUSED", end=End(137), code=137)
    assert first(killed).sentence.endswith("ended with exit code 137: what it had not saved is lost")


def test_a_paused_run_that_waited_is_held_and_not_to_be_released_by_hand() -> None:
    found = diagnose(waiting("JobHeldUser", attempts=0, attempt=None, nodes=(), paused=("8",)))
    assert [f.cause for f in found] == ["paused"]
    assert "Slurm holds its job" in found[0].sentence
    assert "scontrol" not in found[0].remedy


def test_a_run_that_was_resumed_after_a_pause_is_told_as_it_is_now() -> None:
    found = first(waiting(end=End(0), restart=Restart("asked", carried_out=True, job_id="8"), paused=("7",)))
    assert found.cause == "pending"


def test_a_run_that_goes_on_says_as_which_attempt_and_why() -> None:
    nodes = (Node(0, "n1", "running", beat_age_s=1.0, command_started_at=99.0),)
    found = first(
        run_of("RUNNING", nodes=nodes, follows="preemption", earlier_ends=("attempt 1: exit code 0",))
    )
    assert found.cause == "healthy"
    assert "it runs on n1 as attempt 2, since attempt 1 was preempted" in found.sentence
    assert "attempt 1: exit code 0" in found.evidence


def test_a_run_that_was_asked_to_save_is_not_called_healthy() -> None:
    nodes = (Node(0, "n1", "running", beat_age_s=1.0, command_started_at=99.0),)
    found = first(run_of("RUNNING", nodes=nodes, stop_marker=True, restart=Restart("walltime", age_s=5.0)))
    assert found.cause == "saving"
    assert "since its time limit is near, and has not ended yet" in found.sentence
    assert "it goes on by itself with its next attempt" in found.remedy


def test_a_run_of_its_own_failure_is_told_with_that_though_an_earlier_attempt_was_preempted() -> None:
    nodes = (Node(0, "n1", "ended", 3, "exit code 3", ended_at=90.0),)
    steps = (Step("7", "PREEMPTED"), Step("7", "FAILED", "3:0"))
    found = first(run_of("FAILED", nodes=nodes, code=3, end=End(3), slurm=Slurm("7", "FAILED", steps=steps)))
    assert found.cause == "command-failed"


# --- reading the records ---


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    (tmp_path / "attempts" / "2").mkdir(parents=True)
    return AttemptFolder(tmp_path / "attempts" / "2")


def write(attempt: AttemptFolder, name: str, value: object) -> None:
    (attempt.path / name).write_text(json.dumps(value))


def test_the_records_of_an_attempt_are_read(attempt: AttemptFolder) -> None:
    silent = [{"rank": 1, "host": "n2", "silent_s": 42.5}]
    write(attempt, "fence.json", {"nodes": silent, "by": 0, "at": 50.0})
    write(
        attempt, "restart.json", {"cause": "node_failure", "way": "successor", "exclude": ["n2"], "at": 60.0}
    )
    write(attempt, "restarted.json", {"way": "successor", "job_id": "8_3", "at": 61.0})
    write(
        attempt,
        "end.json",
        {"code": 137, "cause": "node_failure", "to_be_continued": True, "not_restarted": "", "reason": "silent",
         "first_failing_node": "n2", "progress": {"step": 7, "checkpoints": ["step-7"]}},
    )  # fmt: skip
    assert read_fence(attempt) == Fence((Silent("n2", 1, 42.5),), 0)
    assert read_restart(attempt, 100.0) == Restart("node_failure", "successor", ("n2",), 40.0, True, "8_3")
    assert read_end(attempt) == End(137, "node_failure", True, "", 7, ("step-7",))
    assert read_ending(attempt) == "attempt 2: exit code 137: node failure: silent on n2"


def test_an_attempt_without_them_has_none(attempt: AttemptFolder, tmp_path: Path) -> None:
    assert read_fence(attempt) is None
    assert read_restart(attempt, 1.0) is None
    assert read_end(attempt) == End()
    assert read_paused(RunFolder(tmp_path)) == ()


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", '{"cause": 5, "exclude": 7, "at": "x", "nodes": [3]}', '{"progress": []}']
)
def test_records_that_are_damaged_do_no_harm(attempt: AttemptFolder, text: str) -> None:
    for name in ("fence.json", "restart.json", "restarted.json", "end.json"):
        (attempt.path / name).write_text(text)
    (attempt.path / "restart-error.txt").write_bytes(b"\xff\xfe sbatch\n error ")
    read_fence(attempt)
    read_restart(attempt, 1.0)
    read_end(attempt)


def test_slurms_words_of_a_restart_that_failed_are_one_line(attempt: AttemptFolder) -> None:
    write(attempt, "restart.json", {"cause": "walltime", "way": "requeue", "exclude": [], "at": 1.0})
    (attempt.path / "restart-error.txt").write_text("sbatch: error:\n  no\n" * 500)
    found = read_restart(attempt, 2.0)
    assert found is not None
    assert found.error.startswith("sbatch: error: no sbatch: error: no")
    assert len(found.error) <= 1000


def test_paused_jobs_are_read_by_their_ids(tmp_path: Path) -> None:
    (tmp_path / "paused").write_text("7\n8_3\n")
    assert read_paused(RunFolder(tmp_path)) == ("7", "8_3")


def killed_script(**more: Any) -> Evidence:
    """The batch script was killed by KILL, whereupon Slurm ended both agents, which said so."""
    nodes = tuple(
        Node(rank, host, "ended", 143, "the command was ended by SIGTERM", True, command_started_at=10.0)
        for rank, host in enumerate(("n1", "n2"))
    )
    fields = {"JobState": "FAILED", "Reason": "JobLaunchFailure", "ExitCode": "0:9", "BatchHost": "n1"}
    steps = (Step("7", "FAILED", "0:9"), Step("7.batch", "CANCELLED", "0:9"), Step("7.0", "FAILED", "15:0"))
    slurm = Slurm("7", "FAILED", fields=fields, steps=steps)
    return run_of("FAILED", **{"nodes": nodes, "slurm": slurm, "code": 137, "stop_marker": True, **more})


def test_a_killed_batch_script_is_told_with_its_signal() -> None:
    (found,) = diagnose(killed_script())
    assert found.cause == "agent-gone"
    assert (
        found.sentence == "its batch script on node 0 (n1) was killed by signal 9, so Slurm ended all nodes"
    )
    assert f"tp job retry {RUN}" in found.remedy


def test_without_accounting_slurms_own_exit_code_tells_it() -> None:
    case = killed_script()
    (found,) = diagnose(dataclasses.replace(case, slurm=dataclasses.replace(case.slurm, steps=())))
    assert "was killed by signal 9" in found.sentence


def test_a_program_that_failed_by_itself_is_told_and_not_its_batch_script() -> None:
    failed = (Node(0, "n1", "ended", 3, "the command ended with exit code 3", command_started_at=10.0),)
    assert first(killed_script(nodes=failed)).cause == "command-failed"
    assert first(killed_script(ended_at=90.0)).cause == "cannot-tell"


LIMIT_MET = {"end": End(0, "walltime"), "code": 0, "stop_marker": True}


@pytest.mark.parametrize(
    ("evidence", "cause"),
    [
        (run_of("CANCELLED", **LIMIT_MET), "walltime"),
        (run_of("CANCELLED", **LIMIT_MET, restart=Restart("walltime", carried_out=True)), "cancelled"),
        (run_of("CANCELLED", **LIMIT_MET, restart=Restart("walltime", error="no")), "restart-lost"),
        (
            run_of("COMPLETING", end=End(0, "walltime", not_restarted=NO_PROGRESS)),
            "restarts-without-progress",
        ),
        (run_of("COMPLETING", paused=("7",)), "paused"),
    ],
)
def test_a_run_that_saved_before_its_limit_has_one_finding(evidence: Evidence, cause: str) -> None:
    log = Log(0, "n1", 100, 100, 5.0, tail=("saved",))
    told = diagnose(dataclasses.replace(evidence, logs=(log,)))
    assert [f.cause for f in told] == [cause]


def test_a_run_that_is_asked_to_save_is_not_said_to_run_well_besides() -> None:
    nodes = (Node(0, "n1", "running", command_started_at=10.0, beat_age_s=1.0),)
    log = Log(0, "n1", 100, 100, 5.0, tail=("step 7",))
    evidence = run_of("RUNNING", nodes=nodes, logs=(log,))
    assert [f.cause for f in diagnose(evidence)] == ["no-log-call"]
    assert [f.cause for f in diagnose(dataclasses.replace(evidence, stop_marker=True))] == ["saving"]


def test_a_run_that_was_cleared_says_that_its_records_are_gone() -> None:
    evidence = run_of("FAILED", nodes=(), code=3, reason="tp job gc left its outputs alone; out of luck")
    assert "its records were cleared by tp job gc: it is FAILED" in first(evidence).sentence
