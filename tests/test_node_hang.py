"""A run that says nothing for longer than its limit is ended, with its processes' stacks; others are spared."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_fixture import Run, runs_below

from tuneplane.node.hang import Growth, has_begun, read_sizes

pytestmark = pytest.mark.timeout(60)

HANGS = """\
import faulthandler, os, signal, time
faulthandler.register(signal.SIGQUIT)
def waits_for_ever():
    while True: time.sleep(1)
print("training", flush=True)
waits_for_ever()
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    with runs_below(tmp_path) as make_one:
        yield make_one


def claimed_for_two(run: Run) -> None:
    """As a claim on two hosts, which this one machine stands for: a real one takes no loopback address."""
    run.claimed()
    start = run.start_of()
    run.attempt().start.write_text(json.dumps({**start, "hosts": ["n1", "n2"], "address": "127.0.0.1"}))


PROGRAM = 'exec python3 "$TUNEPLANE_EXP_DIR/t.py"'


@pytest.mark.slow
def test_a_hang_on_two_nodes_ends_both_with_its_reason_and_their_stacks(make: Callable[..., Run]) -> None:
    run = make(PROGRAM, files={"t.py": HANGS}, nodes=2, hang_limit_s=1.0, heartbeat_s=5.0)
    claimed_for_two(run)
    begun = time.monotonic()
    agents = [run.start_node(rank=rank, nodes=2) for rank in (0, 1)]
    assert [run.finish(agent).returncode for agent in agents] == [124, 124]
    assert time.monotonic() - begun < 20  # 1 s, the stacks' 5 s, and a start
    for rank in (0, 1):
        record = run.record(rank)
        assert record["reason"] == "no output and no point for 1 s: it was taken to hang"
        assert (record["code"], record["told_to_stop"], record["fenced"]) == (124, False, False)
        assert "in waits_for_ever" in run.log(rank)
    assert run.end(code=124).stdout == "124\n"
    end = run.end_of()
    assert (end["for_good"], end["to_be_continued"], end["stop_requested"]) == (True, False, False)
    assert run.processes() == []


@pytest.mark.slow
def test_a_node_that_hangs_after_node_0_has_ended_is_ended_too(make: Callable[..., Run]) -> None:
    run = make(
        f'echo begun; if [ "$TUNEPLANE_MACHINE_RANK" = 0 ]; then exit 0; fi; {PROGRAM}',
        files={"t.py": HANGS},
        nodes=2,
        hang_limit_s=1.0,
        heartbeat_s=5.0,
    )
    claimed_for_two(run)
    agents = [run.start_node(rank=rank, nodes=2) for rank in (0, 1)]
    assert [run.finish(agent).returncode for agent in agents] == [0, 124]
    assert run.record(1)["reason"] == "no output and no point for 1 s: it was taken to hang"
    assert "in waits_for_ever" in run.log(1)
    assert run.processes() == []


@pytest.mark.slow
def test_it_is_killed_where_it_ignores_term_and_no_stack_is_asked_of_who_would_die_of_it(
    make: Callable[..., Run],
) -> None:
    run = make("trap '' TERM; echo training; while :; do sleep 0.1; done", hang_limit_s=0.5)
    begun = time.monotonic()
    assert run.run_once().returncode == 124
    assert (
        time.monotonic() - begun > 10
    )  # TERM and its grace: it was not killed by a signal that it does not know
    assert run.processes() == []


@pytest.mark.slow
def test_a_slow_start_and_a_program_that_goes_on_printing_are_spared(make: Callable[..., Run]) -> None:
    run = make("sleep 3; for i in 1 2 3 4 5 6; do echo $i; sleep 0.4; done", hang_limit_s=1.5)
    assert run.run_once().returncode == 0
    assert not run.attempt().hang.exists()


@pytest.mark.slow
def test_points_alone_are_progress_and_hardware_samples_are_none(make: Callable[..., Run]) -> None:
    run = make(
        "echo training; for i in 1 2 3 4 5 6 7 8; do"
        ' echo "{}" >>"$(echo "$TUNEPLANE_JOB_ENDPOINT" | cut -c8-)/0-n1-0-1.jsonl"; sleep 0.4; done',
        hang_limit_s=1.5,
    )
    assert run.run_once().returncode == 0
    run = make(
        "echo training; for i in $(seq 100); do"
        ' echo "{}" >>"$(echo "$TUNEPLANE_JOB_ENDPOINT" | cut -c8-)/0-n1-hardware0-1.jsonl"; sleep 0.1; done',
        hang_limit_s=1.5,
    )
    assert run.run_once().returncode == 124


@pytest.mark.slow
def test_a_run_that_was_asked_to_stop_is_not_called_hung(make: Callable[..., Run]) -> None:
    run = make("trap '' USR2; echo training; sleep 4; exit 0", hang_limit_s=2.0, save_s=30.0)
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    run.attempt().stop_marker.touch()
    assert run.finish(agent).returncode == 0
    assert not run.attempt().hang.exists()


def test_without_a_limit_nothing_is_watched(make: Callable[..., Run]) -> None:
    run = make("echo training; sleep 1")
    assert run.run_once().returncode == 0


def test_the_clock_starts_with_the_programs_own_first_word() -> None:
    growth = Growth(1.0)
    assert growth.silent_s({"node-0.log": 80}, False, 10.0) is None
    assert growth.silent_s({"node-0.log": 90}, False, 11.0) is None  # TunePlane's own lines
    assert growth.silent_s({"node-0.log": 120}, True, 12.0) is not None
    found = [growth.silent_s({"node-0.log": 120}, True, at) for at in (13.0, 14.0, 15.0)]
    assert found in ([2.0, 3.0, 4.0], [1.0, 2.0, 3.0])
    assert growth.silent_s({"node-0.log": 121}, True, 16.0) == 1.0


def test_an_agent_that_was_itself_stopped_blames_nobody() -> None:
    growth = Growth(1.0)
    growth.silent_s({"a": 1}, True, 1.0)
    assert growth.silent_s({"a": 1}, True, 1000.0) == pytest.approx(1.5, abs=1.0)


def test_own_lines_are_no_output(make: Callable[..., Run]) -> None:
    run = make("exit 0")
    run.claimed()
    attempt = run.attempt()
    attempt.node_log(0).write_text(
        "tuneplane: node 0 of 1 (n1): bash train.sh\n[rank0]: tuneplane: preflight: x\n"
    )
    assert not has_begun(run.folder, attempt)
    with attempt.node_log(0).open("a") as log:
        log.write("x\n")
    assert has_begun(run.folder, attempt)
    assert list(read_sizes(run.folder, attempt)) == ["node-0.log"]


def test_what_stands_in_its_way_is_passed_over(make: Callable[..., Run]) -> None:
    run = make("exit 0")
    run.claimed()
    os.mkfifo(run.folder.ingest / "0-n1-0-9.jsonl")
    (run.folder.ingest / "0-n1-0-8.jsonl").symlink_to("/etc/passwd")
    assert set(read_sizes(run.folder, run.attempt())) <= {"0-n1-0-9.jsonl"}
