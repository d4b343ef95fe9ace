"""Ending a run for sure, here and through Slurm; and how a shell beside it is reached."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_fixture import Run, runs_below, wait_until

from tuneplane.kernel.errors import OperationError, UsageError
from tuneplane.kernel.files import write_json
from tuneplane.kernel.submission import read_submissions, record_submission
from tuneplane.launch.local import start_local
from tuneplane.runs import stop as stop_module
from tuneplane.runs.shell import shell_argv
from tuneplane.runs.state import read_state
from tuneplane.runs.stop import stop_run

pytestmark = pytest.mark.timeout(120)

MakeRun = Callable[..., Run]
HOST = os.uname().nodename

SLURM = """#!/usr/bin/python3 -IS
# One job's state in a file; scancel changes it, and it is gone a moment later.
import json, os, sys, time
from pathlib import Path
name, here = Path(sys.argv[0]).name, Path(sys.argv[0]).parent
with (here / "calls").open("a") as calls:
    print(name, *sys.argv[1:], file=calls)
if (here / f"{name}.refuses").exists():
    sys.exit((here / f"{name}.refuses").read_text())
jobs = json.loads((here / "jobs").read_text())
if name == "squeue":
    named = [a.split("=")[1].split(",") for a in sys.argv if a.startswith("--jobs=")]
    asked = named[0] if named else jobs
    for job in asked:
        state, until = jobs.get(job, ["", 0])
        if state == "ENDING":
            state = "COMPLETING" if time.time() < until else "CANCELLED"
        if state:
            print(f"{job}|{state}|n1|None")
elif name == "scancel":
    for job in sys.argv[1:]:
        jobs[job] = ["ENDING", time.time() + 0.7]
    (here / "jobs").write_text(json.dumps(jobs))
"""


class Slurm:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("squeue", "scancel", "sacct"):
            (folder / name).write_text(SLURM)
            (folder / name).chmod(0o755)
        self.jobs()

    def jobs(self, **states: str) -> None:
        """`job4242="RUNNING"`."""
        values = {name.removeprefix("job"): [state, 0] for name, state in states.items()}
        write_json(self.folder / "jobs", values)

    def refuses(self, name: str, words: str) -> None:
        (self.folder / f"{name}.refuses").write_text(words)

    def cancelled(self) -> list[str]:
        calls = (self.folder / "calls").read_text().splitlines() if (self.folder / "calls").exists() else []
        return [call.removeprefix("scancel ") for call in calls if call.startswith("scancel")]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRun]:
    with runs_below(tmp_path) as make_one:
        yield make_one


@pytest.fixture
def local(make: MakeRun) -> MakeRun:
    def make_local(train: str, **more: Any) -> Run:
        return make(train, scheduler="local", profile="local:1", **more)

    return make_local


@pytest.fixture(autouse=True)
def _asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_module, "POLL_S", 0.05)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm(tmp_path / "slurm bin")
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    return made


def started(run: Run) -> subprocess.Popen[str]:
    script = run.start_script()
    run.wait_for_line("begun")
    wait_until(lambda: run.record().get("state") == "running", "running")
    return script


# On this machine


@pytest.mark.contract("C46")
def test_a_local_run_is_told_to_end_and_is_gone_when_stop_returns(local: MakeRun) -> None:
    run = local("trap 'echo saving; exit 0' TERM; echo begun; while :; do sleep 0.05; done")
    started(run)
    assert run.folder.secrets.exists()
    state = stop_run(run.folder)
    assert (state.state, state.code, state.reason) == ("CANCELLED", 0, "stopped by tp job stop")
    assert "saving" in run.log()
    assert run.processes() == []
    assert not run.folder.secrets.exists()
    assert run.folder.stopped.read_text() == f"{state.job_id}\n"


@pytest.mark.slow
def test_a_trainer_that_hears_nothing_is_ended_after_its_grace(local: MakeRun) -> None:
    run = local("trap '' TERM; echo begun; sleep 300 & wait; sleep 300", stop_grace_s=0.5)
    started(run)
    begun = time.monotonic()
    state = stop_run(run.folder)
    assert (state.state, state.reason) == ("CANCELLED", "stopped by tp job stop")
    assert time.monotonic() - begun < 20
    assert run.processes() == []


@pytest.mark.slow
def test_an_agent_that_hears_nothing_is_killed_with_all_that_it_started(
    local: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_module, "AGENT_S", 0.5)
    run = local("echo begun; setsid sleep 300 & sleep 300", stop_grace_s=0.2)
    script = started(run)
    os.kill(script.pid, signal.SIGSTOP)
    state = stop_run(run.folder)
    script.wait(10)
    wait_until(lambda: run.processes() == [], "all gone")
    assert (state.state, state.reason) == ("CANCELLED", "stopped by tp job stop")


@pytest.mark.slow
def test_a_longer_grace_of_the_profile_is_waited_for(local: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_module, "AGENT_S", 0.5)
    run = local(
        "trap 'sleep 2; echo saved; exit 0' TERM; echo begun; while :; do sleep 0.05; done", stop_grace_s=30.0
    )
    started(run)
    assert stop_run(run.folder).code == 0
    assert "saved" in run.log()


@pytest.mark.slow
def test_a_run_that_waits_for_its_share_is_stopped_without_an_attempt(local: MakeRun) -> None:
    cpus = len(os.sched_getaffinity(0))
    first = local("echo begun; sleep 300", per_node=cpus)
    started(first)
    second = local("echo never", per_node=cpus)
    script = second.start_script()
    wait_until(lambda: read_state(second.folder).state == "PENDING", "pending")
    state = stop_run(second.folder)
    assert (state.state, state.attempts) == ("CANCELLED", 0)
    assert script.wait(10) != 0
    assert read_state(first.folder).state == "RUNNING"
    stop_run(first.folder)


def test_a_run_that_has_ended_is_left_as_it_is(local: MakeRun) -> None:
    run = local("exit 3")
    assert run.start_script().wait(30) == 3
    before = sorted(p.name for p in run.path.iterdir())
    state = stop_run(run.folder)
    assert (state.state, state.code) == ("FAILED", 3)
    assert sorted(p.name for p in run.path.iterdir()) == before


def test_a_run_that_was_never_submitted_is_left_ready(local: MakeRun) -> None:
    run = local("true")
    assert stop_run(run.folder).state == "PREPARED"
    assert run.folder.secrets.exists() and not run.folder.stopped.exists()
    assert run.start_script().wait(30) == 0


def test_a_run_of_another_machine_is_not_said_to_be_stopped(local: MakeRun) -> None:
    run = local("true")
    noted = {"job_id": "local-77", "by": "tp", "at": time.time(), "host": "login9", "pid": 77, "pid_start": 5}
    write_json(run.folder.submissions / "local-77.json", noted)
    with pytest.raises(OperationError) as caught:
        stop_run(run.folder)
    (fault,) = caught.value.faults
    assert fault.what == f"{run.folder.run_id} runs on login9"
    assert fault.remedy == f"say tp job stop {run.folder.run_id} there"
    assert not run.folder.stopped.exists()


def test_a_process_that_has_the_pid_of_an_ended_run_is_left_alone(local: MakeRun) -> None:
    run = local("true")
    other = subprocess.Popen(["sleep", "60"])
    try:
        noted = {"job_id": f"local-{other.pid}", "by": "tp", "at": time.time(), "host": HOST}
        write_json(
            run.folder.submissions / f"local-{other.pid}.json", {**noted, "pid": other.pid, "pid_start": 1}
        )
        assert stop_run(run.folder).state == "LOST"
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_stopped_run_can_be_started_again_and_is_judged_anew(local: MakeRun) -> None:
    run = local('echo begun; [ "$TUNEPLANE_JOB_ATTEMPT" = 1 ] || sleep 300')
    secrets = run.folder.secrets.read_text()
    started(run)
    stop_run(run.folder)
    run.folder.secrets.write_text(secrets)
    assert run.start_script().wait(30) == 0
    state = read_state(run.folder)
    assert (state.state, state.attempt) == ("COMPLETED", 1)


# Through Slurm


@pytest.mark.slow
@pytest.mark.contract("C46")
@pytest.mark.parametrize("before", ["PENDING", "RUNNING"])
def test_a_slurm_job_is_cancelled_and_waited_for(make: MakeRun, slurm: Slurm, before: str) -> None:
    run = make("true")
    record_submission(run.folder, "4242", "tp")
    slurm.jobs(job4242=before)
    begun = time.monotonic()
    state = stop_run(run.folder)
    assert (state.state, state.reason) == ("CANCELLED", "stopped by tp job stop")
    assert time.monotonic() - begun > 0.6
    assert slurm.cancelled() == ["4242"]
    assert not run.folder.secrets.exists()


@pytest.mark.slow
def test_every_job_of_a_run_that_slurm_still_has_is_cancelled(make: MakeRun, slurm: Slurm) -> None:
    run = make("true")
    for job in ("4240", "4241", "4242"):
        record_submission(run.folder, job, "tp")
    slurm.jobs(job4240="COMPLETED", job4241="RUNNING", job4242="PENDING")
    assert stop_run(run.folder).state == "CANCELLED"
    assert slurm.cancelled() == ["4241 4242"]
    assert run.folder.stopped.read_text() == "4240\n4241\n4242\n"


@pytest.mark.slow
def test_a_job_that_waits_for_its_lost_node_holds_no_stop_up(make: MakeRun, slurm: Slurm) -> None:
    """Slurm shows it for minutes; its attempt ended when that node had surely fenced itself."""
    run = make("true")
    for number, job in enumerate(("4241", "4242")):
        record_submission(run.folder, job, "tp")
        run.attempt(number).path.mkdir()
        write_json(run.attempt(number).start, {"job_id": job, "hosts": ["n1", "n2"]})
    write_json(run.attempt(0).fence, {"nodes": [{"rank": 1, "host": "n2"}], "by": 0})
    write_json(run.attempt(0).end, {"code": 137, "for_good": False})
    slurm.jobs(job4241="COMPLETING", job4242="RUNNING")
    begun = time.monotonic()
    assert stop_run(run.folder, wait_s=30).state == "CANCELLED"
    assert time.monotonic() - begun < 15
    assert slurm.cancelled() == ["4242"]


def test_a_slurm_that_does_not_answer_stops_nothing_and_says_so(make: MakeRun, slurm: Slurm) -> None:
    run = make("true")
    record_submission(run.folder, "4242", "tp")
    slurm.refuses("squeue", "squeue: error: Unable to contact slurm controller")
    with pytest.raises(OperationError, match="Unable to contact slurm controller"):
        stop_run(run.folder)
    assert not run.folder.stopped.exists()
    assert run.folder.secrets.exists()


def test_a_cancelling_that_slurm_refuses_is_told_in_its_words(make: MakeRun, slurm: Slurm) -> None:
    run = make("true")
    record_submission(run.folder, "4242", "tp")
    slurm.jobs(job4242="RUNNING")
    slurm.refuses("scancel", "scancel: error: Kill job error on job id 4242: Access/permission denied")
    with pytest.raises(OperationError, match="Access/permission denied"):
        stop_run(run.folder)
    assert not run.folder.stopped.exists()
    assert read_state(run.folder).state == "RUNNING"


def test_a_job_that_does_not_end_in_time_is_told_as_it_is(make: MakeRun, slurm: Slurm) -> None:
    run = make("true")
    record_submission(run.folder, "4242", "tp")
    slurm.jobs(job4242="RUNNING")
    state = stop_run(run.folder, wait_s=0.1)
    assert state.state == "COMPLETING" and not state.is_final
    assert run.folder.secrets.exists()


# A shell beside it


@pytest.fixture
def two_nodes(make: MakeRun, slurm: Slurm) -> Iterator[Run]:
    run = make("echo begun; sleep 300", nodes=2)
    record_submission(run.folder, "4242", "tp")
    slurm.jobs(job4242="RUNNING")
    attempt = run.claimed()
    agents = [run.start_node(attempt, rank=rank, nodes=2) for rank in range(2)]
    for rank in range(2):
        run.wait_for_line("begun", rank=rank)
        wait_until(lambda r=rank: run.record(rank=r).get("state") == "running", "running")
    yield run
    for agent in agents:
        agent.terminate()
        run.finish(agent)


@pytest.mark.parametrize("node", ["1", "n2"])
def test_a_shell_on_slurm_is_a_step_beside_the_others(two_nodes: Run, node: str) -> None:
    run = two_nodes
    argv = shell_argv(run.folder, node, ["nvidia-smi", "-L"], terminal=False, environ={"PATH": "/usr/bin"})
    assert argv == [
        *("srun", "--jobid=4242", "--nodelist=n2", "--nodes=1", "--ntasks=1"),
        *("--overlap", "--mem=0", "--export=NONE"),
        *(run.job.spec.node.python, "-I", "-S", str(run.folder.kernel)),
        *("shell", str(run.path), "0", "1", "nvidia-smi", "-L"),
    ]
    assert "--pty" in shell_argv(run.folder, node, [], terminal=True, environ={})


def test_what_of_the_callers_environment_would_change_the_step_is_taken_away(two_nodes: Run) -> None:
    environ = {"PATH": "/usr/bin", "SLURM_JOB_ID": "9", "SBATCH_QOS": "x", "SLURM_CONF": "/etc/slurm.conf"}
    argv = shell_argv(two_nodes.folder, "0", [], terminal=False, environ=environ)
    assert argv[:6] == ["env", "-u", "SBATCH_QOS", "-u", "SLURM_JOB_ID", "srun"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("node", "words"),
    [("2", "has no node 2"), ("n9", "has no node n9"), ("", "has no node "), ("-1", "has no node -1")],
)
def test_a_node_that_there_is_not_is_told_with_those_there_are(two_nodes: Run, node: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        shell_argv(two_nodes.folder, node, [], terminal=False)
    (fault,) = caught.value.faults
    assert fault.what == f"{two_nodes.folder.run_id} {words}"
    assert fault.remedy == "nodes: 0 (n1), 1 (n2)"


def test_a_run_that_does_not_run_has_nothing_to_enter(make: MakeRun, slurm: Slurm) -> None:
    run = make("true")
    with pytest.raises(UsageError, match="is PREPARED, so there is nothing to enter"):
        shell_argv(run.folder, "0", [], terminal=False)
    record_submission(run.folder, "4242", "tp")
    slurm.jobs(job4242="RUNNING")
    with pytest.raises(UsageError, match="has no node yet, so there is nothing to enter"):
        shell_argv(run.folder, "0", [], terminal=False)
    run.node(run.claimed())
    with pytest.raises(UsageError, match=r"node 0 of .* has ended with exit code 0"):
        shell_argv(run.folder, "0", [], terminal=False)


@pytest.mark.contract("C46")
def test_a_local_shell_stands_where_the_trainer_stands(local: MakeRun) -> None:
    run = local("export OWN=1; echo begun; sleep 300")
    started(run)
    argv = shell_argv(run.folder, HOST, ["bash", "-c", "env; pwd"], terminal=False)
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=30, check=True, env={"HF_TOKEN": "leak"}
    )
    values = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert values["NRL_RUN_ID"] == run.folder.run_id
    assert values["TUNEPLANE_OUT_DIR"] == str(run.folder.out)
    assert "HF_TOKEN" not in values and "OWN" not in values
    assert done.stdout.splitlines()[-1] == values["TUNEPLANE_WORK_DIR"]
    assert "TUNEPLANE_JOB_TOKEN" not in shlex.join(argv)
    stop_run(run.folder)


# Started in the background


@pytest.mark.slow
@pytest.mark.contract("C47")
def test_a_local_run_outlives_the_terminal_that_started_it(local: MakeRun, tmp_path: Path) -> None:
    """A terminal's end is a hangup for every process of its session."""
    run = local("echo begun; sleep 1; echo survived")
    code = (
        "import os, sys, time; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from tuneplane.launch.local import start_local; from tuneplane.kernel.runfolder import RunFolder\n"
        "print(start_local(RunFolder(Path(sys.argv[2]))), flush=True); time.sleep(60)\n"
    )
    root = str(Path(__file__).resolve().parents[1])
    terminal = subprocess.Popen(
        ["setsid", "python3", "-c", code, root, str(run.path)], stdout=subprocess.PIPE, text=True
    )
    assert terminal.stdout is not None
    job_id = terminal.stdout.readline().strip()
    run.wait_for_line("begun")
    os.killpg(terminal.pid, signal.SIGHUP)
    terminal.wait(10)
    wait_until(lambda: read_state(run.folder).is_final, "ended")
    state = read_state(run.folder)
    assert (state.state, state.job_id) == ("COMPLETED", job_id)
    assert "survived" in run.log()


@pytest.mark.slow
@pytest.mark.contract("C47")
def test_runs_share_this_machine_and_the_second_waits_for_the_first(local: MakeRun) -> None:
    cpus = len(os.sched_getaffinity(0))
    first = local(
        "echo begun; until [ -e go ] || [ -e $TUNEPLANE_OUT_DIR/go ]; do sleep 0.05; done", per_node=cpus
    )
    second = local("echo begun", per_node=cpus)
    start_local(first.folder)
    first.wait_for_line("begun")
    start_local(second.folder)
    time.sleep(0.7)
    assert read_state(first.folder).state == "RUNNING"
    state = read_state(second.folder)
    assert (state.state, state.reason) == ("PENDING", "waits for its share of this machine")
    (first.folder.out / "go").touch()
    wait_until(lambda: read_state(second.folder).is_final, "the second ended")
    assert {read_state(run.folder).state for run in (first, second)} == {"COMPLETED"}
    assert second.start_of()["started_at"] > first.end_of()["ended_at"] - 0.5


@pytest.mark.slow
def test_a_waiting_run_that_was_killed_leaves_no_lock_behind(local: MakeRun) -> None:
    cpus = len(os.sched_getaffinity(0))
    first = local("echo begun; sleep 300", per_node=cpus)
    start_local(first.folder)
    first.wait_for_line("begun")
    killed = local("echo never", per_node=cpus)
    pid = int(start_local(killed.folder).removeprefix("local-"))
    time.sleep(0.7)
    os.kill(pid, signal.SIGKILL)
    third = local("echo begun", per_node=cpus)
    start_local(third.folder)
    stop_run(first.folder)
    wait_until(lambda: read_state(third.folder).is_final, "the third ended")
    assert read_state(third.folder).state == "COMPLETED"
    assert read_state(killed.folder).state == "LOST"


@pytest.mark.slow
def test_runs_that_fit_beside_each_other_run_at_once(local: MakeRun) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has one CPU")
    runs = [local("echo begun; sleep 300", per_node=1) for _ in range(2)]
    for run in runs:
        start_local(run.folder)
    for run in runs:
        run.wait_for_line("begun")
    assert [read_state(run.folder).state for run in runs] == ["RUNNING", "RUNNING"]
    for run in runs:
        stop_run(run.folder)


def test_a_run_that_tp_started_is_noted_as_tps_although_it_notes_itself(local: MakeRun) -> None:
    run = local("true")
    job_id = start_local(run.folder)
    wait_until(lambda: read_state(run.folder).is_final, "ended")
    (noted,) = read_submissions(run.folder)
    assert (noted.job_id, noted.by, noted.host) == (job_id, "tp", HOST)
