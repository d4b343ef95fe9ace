"""A node that is told to end, or to save and end: the whole tree hears it, has its grace, and is gone after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from interpreters import pythons
from run_fixture import PYTHON, Run, runs_below, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MakeRun = Callable[..., Run]

SAVING = """
import os, signal, sys, time
out = os.environ["TUNEPLANE_OUT_DIR"]

def save(number, frame):
    time.sleep(float(sys.argv[1]))
    open(out + "/saved", "w").write("checkpoint\\n")
    sys.exit(int(sys.argv[2]))

signal.signal(signal.SIGTERM, save)
print("training", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRun]:
    with runs_below(tmp_path) as make_one:
        yield make_one


def tell(
    run: Run, agent: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM
) -> subprocess.CompletedProcess[str]:
    """Signal the agent alone and wait for its end; nothing may be left."""
    agent.send_signal(number)
    done = run.finish(agent)
    assert run.processes() == []
    assert run.left_in_scratch() == []
    return done


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_node_that_is_told_to_end_ends_its_trainer_and_says_so(
    make: MakeRun, number: signal.Signals
) -> None:
    run = make("echo training; sleep 1000")
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    began = time.monotonic()
    assert tell(run, agent, number).returncode == 143
    assert time.monotonic() - began < 3
    record = run.record()
    assert (record["state"], record["code"], record["told_to_stop"]) == ("ended", 143, True)
    assert record["reason"] == "the command was ended by SIGTERM (exit code 143)"


def test_the_trainer_has_the_whole_grace_though_its_shell_dies_at_once(make: MakeRun) -> None:
    """`bash train.sh` has no trap: TERM ends it while the python that it started still saves."""
    run = make(
        f"{PYTHON} experiments/ring/t.py 3 0; echo not reached", files={"t.py": SAVING}, stop_grace_s=20
    )
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    began = time.monotonic()
    assert tell(run, agent).returncode == 143
    assert 3 < time.monotonic() - began < 15
    assert (run.folder.out / "saved").read_text() == "checkpoint\n"
    assert "not reached" not in run.log()


def test_the_oldest_python_of_a_node_gives_that_grace_too(make: MakeRun) -> None:
    oldest = pythons((3, 9)).get("3.9")
    if oldest is None:
        pytest.skip("there is no Python 3.9 here")
    run = make(f"{PYTHON} experiments/ring/t.py 3 0", files={"t.py": SAVING}, python=oldest, stop_grace_s=20)
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    assert tell(run, agent).returncode == 143
    assert (run.folder.out / "saved").exists()
    assert run.record()["python"].startswith("3.9.")


def test_a_trainer_that_saves_and_exits_0_was_told_all_the_same(make: MakeRun) -> None:
    run = make(f"exec {PYTHON} experiments/ring/t.py 0.3 0", files={"t.py": SAVING})
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    assert tell(run, agent).returncode == 0
    assert (run.record()["code"], run.record()["told_to_stop"]) == (0, True)
    assert (run.folder.out / "saved").exists()


def test_a_trainer_that_ignores_term_is_killed_after_its_grace(make: MakeRun) -> None:
    run = make("trap '' TERM; echo training; sleep 1000 & sleep 1000", stop_grace_s=1.5)
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    began = time.monotonic()
    assert tell(run, agent).returncode == 137
    assert 1.5 < time.monotonic() - began < 5
    assert run.record()["reason"] == "the command was ended by SIGKILL (exit code 137)"


def test_a_trainer_that_still_saves_at_the_end_of_its_grace_is_killed(make: MakeRun) -> None:
    run = make(f"{PYTHON} experiments/ring/t.py 1000 0", files={"t.py": SAVING}, stop_grace_s=1)
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    began = time.monotonic()
    tell(run, agent)
    assert 1 < time.monotonic() - began < 5
    assert not (run.folder.out / "saved").exists()


def test_every_process_of_the_tree_is_told_those_too_that_left_it(make: MakeRun) -> None:
    heard = (
        "#!/bin/bash\n"
        "trap 'echo $1 >>$TUNEPLANE_OUT_DIR/heard; exit' TERM\n"
        "echo $1 is up\n"
        "while :; do sleep 0.05; done\n"
    )
    run = make(
        "cd experiments/ring; (setsid bash heard.sh daemon &); bash heard.sh child & exec bash heard.sh shell",
        files={"heard.sh": heard},
    )
    agent = run.start_node(run.claimed())
    for name in ("daemon", "child", "shell"):
        run.wait_for_line(f"{name} is up")
    assert tell(run, agent).returncode == 0
    assert sorted((run.folder.out / "heard").read_text().split()) == ["child", "daemon", "shell"]


def test_a_tree_that_forks_while_it_is_killed_is_gone(make: MakeRun) -> None:
    run = make(
        "trap 'for n in 1 2 3; do sleep 1000 & done' TERM\necho training\nwhile :; do sleep 0.02; done",
        stop_grace_s=1,
    )
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    for _ in range(3):
        agent.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert tell(run, agent).returncode == 137


def test_a_second_word_neither_hurries_nor_prolongs_the_end(make: MakeRun) -> None:
    run = make(f"{PYTHON} experiments/ring/t.py 1.5 0", files={"t.py": SAVING})
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    began = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        agent.send_signal(number)
        time.sleep(0.1)
    tell(run, agent)
    assert time.monotonic() - began < 6
    assert (run.folder.out / "saved").exists()


def test_a_step_whose_processes_are_all_signalled_at_once_was_told(make: MakeRun) -> None:
    """Slurm's scancel: the trainer's TERM may come before the agent's own."""
    run = make("echo training; sleep 1000")
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    for pid in run.processes():
        os.kill(pid, signal.SIGTERM)
    assert tell(run, agent).returncode == 143
    assert run.record()["told_to_stop"] is True


def test_a_trainer_killed_by_somebody_else_was_not_told(make: MakeRun) -> None:
    run = make("echo training; exec sleep 1000")
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    wait_until(lambda: "command_pid" in run.record(), "the record says which process it is")
    os.kill(run.record()["command_pid"], signal.SIGTERM)
    assert run.finish(agent).returncode == 143
    assert run.record()["told_to_stop"] is False


@pytest.mark.contract("C9")
def test_usr2_leaves_the_stop_marker_and_no_signal_reaches_the_trainer(make: MakeRun) -> None:
    run = make(
        'trap "echo signalled" USR2; echo training\n'
        'until [ -e "$TUNEPLANE_STOP_FILE" ]; do sleep 0.05; done; sleep 0.5; echo saved; exit 0'
    )
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    assert not run.attempt().stop_marker.exists()
    agent.send_signal(signal.SIGUSR2)
    assert run.finish(agent).returncode == 0
    assert run.log().splitlines()[1:] == ["training", "saved"]
    assert run.attempt().stop_marker.exists()
    assert run.record()["told_to_stop"] is False


def test_usr1_is_the_trainers_and_ends_no_agent(make: MakeRun) -> None:
    """`scancel --signal=USR1` reaches every process of the step; who asked for it handles it."""
    run = make("trap 'echo heard' USR1; echo training; while :; do sleep 0.05; done")
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    agent.send_signal(signal.SIGUSR1)
    time.sleep(0.5)
    assert agent.poll() is None
    assert "heard" not in run.log()
    wait_until(lambda: "command_pid" in run.record(), "the record says which process it is")
    os.kill(run.record()["command_pid"], signal.SIGUSR1)
    run.wait_for_line("heard")
    assert tell(run, agent).returncode == 143


def test_should_stop_says_so_to_a_real_trainer(make: MakeRun) -> None:
    trainer = """
import time
from tuneplane.report import should_stop
print("training", flush=True)
while not should_stop():
    time.sleep(0.05)
print("saved")
"""
    run = make(f"{PYTHON} experiments/ring/t.py", files={"t.py": trainer}, observability="platform", url=None)
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    agent.send_signal(signal.SIGUSR2)
    assert run.finish(agent).returncode == 0
    assert run.log().endswith("training\nsaved\n")


def test_a_word_to_end_before_the_start_starts_nothing(make: MakeRun) -> None:
    """The log as a pipe that nobody reads yet holds the agent where it prepares."""
    run = make("touch $TUNEPLANE_OUT_DIR/started")
    run.claimed()
    os.mkfifo(run.attempt().node_log(0))
    agent = run.start_node()
    wait_until(lambda: run.record().get("state") == "starting", "the agent prepares")
    agent.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    log = os.open(run.attempt().node_log(0), os.O_RDWR)
    try:
        done = run.finish(agent)
    finally:
        os.close(log)
    assert done.returncode == 125
    assert done.stderr == "tuneplane: asked to end before the command was started\n"
    assert (run.record()["code"], run.record()["told_to_stop"]) == (125, True)
    assert not (run.folder.out / "started").exists()
    assert run.left_in_scratch() == []


def test_what_serves_the_image_is_told_after_the_trainer_has_ended(make: MakeRun) -> None:
    """A stand-in for Apptainer's squashfuse, known by its name: without it no file of the image can be read."""
    server = (
        "#!/bin/bash\n"
        "trap 'ls $TUNEPLANE_OUT_DIR >$TUNEPLANE_OUT_DIR/order; exit' TERM\n"
        "mkfifo $TMPDIR/wait; exec 3<>$TMPDIR/wait\n"  # it waits by itself: a sleep has another name
        "while :; do read -rt 0.05 <&3; done\n"
    )
    run = make(
        "server=$TMPDIR/squashfuse_ll; cp experiments/ring/server $server; chmod +x $server; $server &\n"
        f"{PYTHON} experiments/ring/t.py 1 0",
        files={"t.py": SAVING, "server": server},
    )
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    tell(run, agent)
    assert (run.folder.out / "order").read_text().split() == ["order", "saved"]


def test_a_killed_agent_blocks_no_later_attempt_and_leaves_no_folder_for_long(make: MakeRun) -> None:
    run = make("echo training; sleep 1000")
    agent = run.start_node(run.claimed(job_id=1), job_id=1)
    run.wait_for_line("training")
    wait_until(lambda: run.record().get("state") == "running", "it is recorded as running")
    agent.kill()
    run.finish(agent)
    for pid in run.processes():  # Slurm ends what is left of a step
        os.kill(pid, signal.SIGKILL)
    assert run.left_in_scratch() == [run.scratch().path.name]
    assert run.record()["state"] == "running"
    run.squeue_says("CANCELLED")
    later = make("echo another run").run_once(job_id=3)
    assert later.returncode == 0
    assert run.left_in_scratch() == []
    start = run.start_of(0)
    run.attempt().start.write_text(json.dumps({**start, "pid": 0}))
    assert run.claimed(job_id=2) == 1
    second = run.start_node(1, job_id=2)
    run.wait_for_line("training", attempt=1)
    tell(run, second)
