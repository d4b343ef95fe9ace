"""Claiming an attempt, as the batch script does: one at a time, the next one once the last is surely over."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from run_fixture import PYTHON, Run, make_run, wait_until
from small_disk import run_on_small_disk

from tuneplane.kernel.process import start_ticks
from tuneplane.node.silence import fenced_after_s
from tuneplane.spec import Restart, dump

HERE = os.uname().nodename
STARTS_AT_ONCE = 6


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = make_run(
        tmp_path, "echo hello", heartbeat_s=20.0
    )  # silent after a minute, however slow the machine
    made.squeue_says("RUNNING")
    yield made
    made.kill_all()


@pytest.fixture
def brisk(tmp_path: Path) -> Iterator[Run]:
    """Its agents beat twice a second, so that a claim that looks for life need not look long."""
    made = make_run(tmp_path, "echo hello", heartbeat_s=0.5)
    yield made
    made.kill_all()


@contextmanager
def beating(run: Run) -> Iterator[None]:
    """A node of attempt 0 gives signs of life meanwhile."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.1):
            run.attempt().node_beat(0).touch()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """What a refused start was told, on one line."""
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("tuneplane: ")
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def change_start(run: Run, **changes: Any) -> None:
    """As if another process, host or job had claimed attempt 0."""
    start = {**run.start_of(0), **changes}
    run.attempt().start.write_text(json.dumps({k: v for k, v in start.items() if v is not None}))


def still_running(run: Run, why: str) -> str:
    name = run.job.metadata.run_id
    return (
        f"tuneplane: {run.path}: attempt 0 of this run has not ended: {why}"
        f" → wait for it, or end it with: tp job stop {name}"
    )


def silence(run: Run, seconds: float) -> None:
    """As if the attempt had given no sign of life for so long."""
    then = time.time() - seconds
    for path in [run.attempt().start, *run.attempt().path.glob("*.beat")]:
        os.utime(path, (then, then))


def test_the_first_claim_says_what_the_batch_script_reads(run: Run) -> None:
    done = run.claim()
    start = run.start_of(0)
    assert done.stdout == f"0 127.0.0.1 {start['port']}\n"
    assert done.stderr == ""
    assert start["slurm_job_id"] == "4242"
    assert (start["host"], start["hosts"]) == (HERE, [HERE])
    assert sorted(p.name for p in run.attempt().path.iterdir()) == ["params.json", "start.json"]
    assert [p.name for p in run.folder.submissions.iterdir()] == ["4242.json"]


def test_of_starts_at_once_one_wins_and_the_others_are_told_why(run: Run) -> None:
    started = [
        run.start("claim", str(run.path), HERE, environment=run.environment(job_id=5000 + n))
        for n in range(STARTS_AT_ONCE)
    ]
    done = [run.finish(process) for process in started]
    won = [d for d in done if d.returncode == 0]
    assert len(won) == 1, [d.stderr for d in done]
    assert won[0].stdout.startswith("0 ")
    why = {refusal(d).partition(" not ended: ")[2].partition(" →")[0] for d in done if d is not won[0]}
    winner = run.start_of(0)["slurm_job_id"]
    assert why <= {
        "another start of this run came first",
        f"Slurm job {winner} is RUNNING",
        f"Slurm job {winner} runs it",
    }
    assert [p.name for p in run.folder.attempts_folder.iterdir()] == ["0"]
    # A refused start is no start of this run: its state stays that of the one that runs.
    assert winner in {p.stem for p in run.folder.submissions.iterdir()}


def test_the_loser_of_a_race_leaves_nothing(run: Run) -> None:
    """The folder appears between the look and the rename: made by hand, as no test can time it."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from tuneplane.node import attempt as a;"
        "from tuneplane.kernel.runfolder import RunFolder; from pathlib import Path;"
        "run = RunFolder(Path(sys.argv[2])); first = run.attempt(0);"
        "a._claim_folder(run, first, {'claim': 'one'}, {});"
        "a._claim_folder(run, first, {'claim': 'two'}, {})"
    )
    done = subprocess.run(
        [PYTHON, "-I", "-S", "-c", script, str(run.folder.kernel), str(run.path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert "another start of this run came first" in done.stderr
    assert run.start_of(0) == {"claim": "one"}
    assert [p.name for p in run.folder.attempts_folder.iterdir()] == ["0"]


@pytest.mark.contract("C42")
def test_a_second_start_by_hand_is_refused_while_slurm_says_that_the_first_runs(run: Run) -> None:
    run.claimed(job_id=1)
    change_start(run, host="another")
    for state in ("RUNNING", "COMPLETING", "SUSPENDED"):
        run.squeue_says(state)
        assert refusal(run.claim(job_id=2)) == still_running(run, f"Slurm job 1 is {state}")
    assert [p.stem for p in run.folder.submissions.iterdir()] == ["1"]


@pytest.mark.contract("C42")
def test_a_later_start_is_the_next_attempt(run: Run) -> None:
    assert run.claimed(job_id=1) == 0
    assert run.end().returncode == 0
    run.folder.secrets.write_text("TUNEPLANE_JOB_TOKEN=again\n")  # as `tp job retry` does
    assert run.claimed(job_id=2) == 1


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "CANCELLED", "PENDING", "TIMEOUT", "PREEMPTED"])
def test_an_attempt_that_left_no_end_is_over_where_slurm_says_so(run: Run, state: str) -> None:
    run.claimed(job_id=1)
    change_start(run, host="another")
    run.squeue_says(state)
    assert run.claimed(job_id=2) == 1


@pytest.mark.parametrize("state", ["NODE_FAIL", ""])
def test_a_node_that_slurm_lost_may_still_run_it_and_its_heartbeat_tells(brisk: Run, state: str) -> None:
    brisk.claimed(job_id=1)
    change_start(brisk, host="another")
    brisk.squeue_says(state)
    with beating(brisk):
        assert "its last sign of life is " in refusal(brisk.claim(job_id=2))
    silence(brisk, 3600)
    assert brisk.claimed(job_id=2) == 1


@pytest.mark.slow
def test_a_start_soon_after_a_lost_attempt_waits_until_that_surely_has_ended(brisk: Run) -> None:
    """By then the nodes that were cut off have ended their ranks themselves."""
    brisk.claimed(job_id=1)
    change_start(brisk, host="another")
    brisk.squeue_says("NODE_FAIL")
    fenced_s = fenced_after_s(0.5)
    silence(brisk, fenced_s - 3)
    done = brisk.claim(job_id=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 ")
    assert "attempt 0 is lost, and its last sign of life is " in done.stderr
    claimed_at = brisk.attempt(1).start.stat().st_mtime
    assert claimed_at - brisk.attempt(0).start.stat().st_mtime > fenced_s


def test_slurm_that_forgot_the_job_says_so_in_its_own_way(run: Run) -> None:
    run.claimed(job_id=1)
    change_start(run, host="another")
    silence(run, 3600)
    run.fake("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert run.claimed(job_id=2) == 1


@pytest.mark.parametrize("missing", [True, False])
def test_where_slurm_cannot_be_asked_the_heartbeat_decides(brisk: Run, missing: bool) -> None:
    brisk.claimed(job_id=1)
    change_start(brisk, host="another")
    if not missing:
        brisk.squeue_fails()
    with beating(brisk):
        assert "last sign of life is " in refusal(brisk.claim(job_id=2))
    silence(brisk, 3600)
    assert brisk.claimed(job_id=2) == 1


def test_the_heartbeat_of_a_node_that_has_ended_is_no_sign_of_life(run: Run) -> None:
    run.claimed(job_id=1)
    change_start(run, host="another")
    run.squeue_fails()
    silence(run, 3600)
    run.attempt().node_beat(0).touch()
    run.attempt().node_record(0).write_text('{"rank": 0, "state": "ended", "code": 1}')
    assert run.claimed(job_id=2) == 1


def test_a_storage_whose_clock_is_far_off_deceives_nobody(brisk: Run) -> None:
    """A heartbeat is compared with the storage's own now: here both are years away from the host's."""
    run = brisk
    run.claimed(job_id=1)
    change_start(run, host="another")
    run.squeue_fails()
    # The host's clock goes wrong instead of the storage's: time.time() as the kernel sees it is moved.
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); real = time.time; time.time = lambda: real() + 1e8;"
        "sys.argv = sys.argv[1:]; from tuneplane.node.main import main; sys.exit(main())"
    )
    with beating(run):
        done = subprocess.run(
            [PYTHON, "-I", "-S", "-c", script, str(run.folder.kernel), "claim", str(run.path), HERE],
            env=run.environment(job_id=2),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert "last sign of life is " in refusal(done)


def test_a_requeue_of_the_same_job_is_the_next_attempt(run: Run) -> None:
    """The process that claimed is there no more, as Slurm ended it; where a node still beat, it is waited for."""
    may_restart(run)
    run.claimed(job_id=1)
    change_start(run, pid=0)
    silence(run, 3600)
    assert run.claimed(job_id=1, SLURM_RESTART_COUNT="1") == 1
    start = run.start_of(1)
    assert (start["restart_count"], start["automatic"], start["follows"]) == (1, True, "")
    (run.attempt(1).start).write_text(json.dumps({**start, "pid": 0, "hosts": [HERE]}))
    run.attempt(1).node_record(0).write_text(json.dumps({"state": "ended"}))
    run.attempt(1).node_beat(0).touch()
    assert run.claimed(job_id=1, SLURM_RESTART_COUNT="2") == 2


def test_a_requeue_goes_on_from_what_a_node_that_was_cut_off_left_in_the_end(brisk: Run) -> None:
    """Until it is fenced, it may save a checkpoint and remove the one that was the last at the claim."""
    may_restart(brisk, launch="torchrun")
    checkpoints = brisk.folder.out / "checkpoints"
    (checkpoints / "step-1").mkdir(parents=True)
    brisk.claimed(job_id=1)
    change_start(brisk, pid=0, hosts=[HERE])
    brisk.attempt().node_beat(0).touch()
    second: list[int] = []
    claim = threading.Thread(target=lambda: second.append(brisk.claimed(job_id=1, SLURM_RESTART_COUNT="1")))
    claim.start()
    wait_until(brisk.attempt(1).start.exists, "the second claim")
    (checkpoints / "step-1").rename(checkpoints / "step-2")
    brisk.attempt().node_record(0).write_text(json.dumps({"state": "ended"}))
    claim.join()
    assert second == [1]
    assert [found["name"] for found in brisk.start_of(1)["checkpoints"]] == ["step-2"]


def test_a_requeue_of_a_run_that_may_not_restart_is_refused(run: Run) -> None:
    run.claimed(job_id=1)
    change_start(run, pid=0)
    silence(run, 3600)
    assert "restarts are off" in refusal(run.claim(job_id=1, SLURM_RESTART_COUNT="1"))


def may_restart(run: Run, **more: Any) -> None:
    spec = dataclasses.replace(run.job.spec, restart=Restart(3), **more)
    run.folder.job.chmod(0o600)
    run.folder.job.write_text(dump(dataclasses.replace(run.job, spec=spec)))


def test_the_script_run_twice_inside_one_job_is_no_requeue(brisk: Run) -> None:
    """`bash job.sbatch` twice in one salloc: the same job id, and Slurm restarted nothing."""
    brisk.claimed(job_id=1)
    assert refusal(brisk.claim(job_id=1)) == still_running(brisk, "Slurm job 1 runs it")
    change_start(brisk, host="another")
    with beating(brisk):
        assert "last sign of life" in refusal(brisk.claim(job_id=1))


def test_elements_of_an_array_are_jobs_of_their_own(run: Run) -> None:
    element = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}
    run.claimed(job_id=73, **element)
    assert run.start_of(0)["slurm_job_id"] == "70_3"
    assert [p.name for p in run.folder.submissions.iterdir()] == ["70_3.json"]


@pytest.mark.slow
def test_a_pid_that_another_process_has_now_is_not_the_former_start(run: Run) -> None:
    run.claimed(job_id=None)
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    change_start(run, pid=os.getpid(), pid_start=ticks)
    assert refusal(run.claim(job_id=None)) == still_running(run, f"process {os.getpid()} runs it")
    change_start(run, pid=os.getpid(), pid_start=ticks - 1)
    assert run.claimed(job_id=None) == 1


def test_a_local_run_of_another_machine_is_judged_by_its_heartbeat(brisk: Run) -> None:
    brisk.claimed(job_id=None)
    change_start(brisk, host="login2", pid=1)
    with beating(brisk):
        assert "last sign of life" in refusal(brisk.claim(job_id=None))
    silence(brisk, 3600)
    assert brisk.claimed(job_id=None) == 1


def test_a_crash_in_the_middle_of_a_claim_blocks_nobody(run: Run) -> None:
    """Killed between making the folder and naming it."""
    half = run.folder.attempts_folder / ".0.deadbeef"
    half.mkdir()
    (half / "start.json").write_text('{"slurm_job_id": "1"')
    assert run.claimed(job_id=2) == 0


@pytest.mark.parametrize("text", ["", "[]", "not json", '{"pid": "x", "slurm_job_id": null}'])
def test_a_broken_note_of_the_last_start_is_no_traceback(brisk: Run, text: str) -> None:
    brisk.claimed(job_id=1)
    brisk.attempt().start.write_text(text)
    with beating(brisk):
        assert "last sign of life" in refusal(brisk.claim(job_id=2))
    silence(brisk, 3600)
    assert brisk.claimed(job_id=2) == 1


def test_an_attempt_folder_that_somebody_emptied_blocks_nobody(run: Run) -> None:
    run.attempt().path.mkdir()
    assert run.claimed(job_id=2) == 1


@pytest.mark.contract("C11")
def test_a_start_without_the_secrets_is_refused_with_the_remedy(run: Run) -> None:
    run.folder.secrets.unlink()
    name = run.job.metadata.run_id
    assert refusal(run.claim()) == (
        f"tuneplane: {run.path}: secrets.env is gone: run {name} has ended for good → tp job retry {name}"
    )
    assert list(run.folder.attempts_folder.iterdir()) == []
    assert list(run.folder.submissions.iterdir()) == []


def test_a_run_without_secrets_needs_no_file(tmp_path: Path) -> None:
    run = make_run(tmp_path, "echo hello", reporting=False)
    assert not run.folder.secrets.exists()
    assert run.claimed() == 0


@pytest.mark.contract("C31")
@pytest.mark.parametrize("content", [None, b"another-run-20261129-120000-0000\n", b"\xff\x00"])
def test_a_start_where_the_canary_is_missing_or_anothers_is_refused(run: Run, content: bytes | None) -> None:
    run.folder.canary.unlink()
    if content is not None:
        run.folder.canary.write_bytes(content)
    assert refusal(run.claim()) == (
        f"tuneplane: node {HERE}: the canary file {run.folder.canary} is not there or not this run's"
        " → the storage root is not shared with this node: choose another, or tell the administrators"
    )


def test_all_that_is_missing_is_told_at_once(run: Run) -> None:
    run.folder.canary.unlink()
    run.folder.secrets.unlink()
    told = refusal(run.claim())
    assert "canary" in told
    assert "tp job retry" in told


def test_a_run_folder_that_is_not_there_is_one_sentence(run: Run, tmp_path: Path) -> None:
    done = run.call("claim", str(tmp_path / "nowhere"), HERE)
    assert refusal(done) == f"tuneplane: {tmp_path}/nowhere: No such file or directory"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["claim"],
        ["node", "RUN", "0"],
        ["node", "RUN", "x", "1.2.3.4", "1"],
        ["end", "RUN", "0"],
        ["rm", "RUN"],
    ],
)
def test_wrong_arguments_show_the_usage(run: Run, arguments: list[str]) -> None:
    done = run.call(*[str(run.path) if a == "RUN" else a for a in arguments])
    assert done.returncode == 2
    assert done.stderr.startswith("usage: kernel.pyz claim RUN HOST...")


def test_an_attempts_folder_that_cannot_be_written_is_one_sentence(run: Run) -> None:
    done = as_nobody(run, "chmod 0555 attempts")
    assert refusal(done) == (
        f"tuneplane: {run.folder.attempts_folder}: attempt 0 could not be claimed: Permission denied"
        " → free space there (disk, quota), or make it writable, and start the run again"
    )


def test_an_attempts_folder_that_cannot_be_read_is_one_sentence(run: Run) -> None:
    done = as_nobody(run, "chmod 0 attempts")
    assert refusal(done) == f"tuneplane: {run.folder.attempts_folder}: Permission denied"


def as_nobody(run: Run, before: str) -> subprocess.CompletedProcess[str]:
    """Claim as a user whom modes bind: root reads everything."""
    assert subprocess.run(["sh", "-c", before], cwd=run.path, check=True).returncode == 0
    prefix = ["setpriv", "--inh-caps=-all", "--bounding-set=-all", "--"] if os.geteuid() == 0 else []
    return subprocess.run(
        [*prefix, *run.kernel("claim", str(run.path), HERE)],
        env=run.environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_full_disk_refuses_the_start_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    copy = tmp_path / "small"
    fill = (
        'cp -a "$1/." "$2" && shift && dd if=/dev/zero of="$1/fill" bs=4k 2>/dev/null;'
        ' "${@:2}"; code=$?; rm -f "$1/fill"; ls -A "$1/attempts"; exit $code'
    )
    command = ["bash", "-c", fill, "bash", str(run.path), str(copy), *run.kernel("claim", str(copy), HERE)]
    done = run_on_small_disk(copy, 2 << 20, command, run.environment())
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert str(copy) in done.stderr
    assert done.stdout == ""  # no attempt, nor half of one


@pytest.mark.slow
def test_an_attempts_folder_is_as_open_as_the_run_folder(tmp_path: Path) -> None:
    for mode in (0o700, 0o750):
        run = make_run(tmp_path, "echo hello", mode=mode, number=mode)
        run.claimed()
        assert stat.S_IMODE(run.attempt().path.stat().st_mode) == mode
        assert run.node().returncode == 0
        assert stat.S_IMODE(run.attempt().node_log(0).stat().st_mode) == mode & 0o666


def test_a_claim_tells_what_slurm_gave_instead(tmp_path: Path) -> None:
    run = make_run(tmp_path, "echo hello", nodes=2)
    done = run.claim(SLURM_JOB_PARTITION="debug")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "tuneplane: warning: the job has 1 node, the run was submitted for 2",
        "tuneplane: warning: the job runs in partition debug, the run was submitted to gpu"
        " (SBATCH_PARTITION in the environment, or an option, overrides the script)",
    ]


def test_nodes_whose_names_nobody_knows_are_no_single_node(run: Run) -> None:
    """scontrol failed: a loopback address would give two silent worlds of one node each."""
    done = run.call("claim", str(run.path), environment=run.environment(nodes=2))
    assert refusal(done) == (
        "tuneplane: SLURM_JOB_NODELIST: the job has 2 nodes, and only 0 of their names are known"
        " → `scontrol show hostnames` must work on the nodes: set `path` of the cluster profile"
    )


def test_the_batch_script_is_known_as_the_process_that_runs_an_attempt(run: Run) -> None:
    """Claimed by a shell that lives on: a second start on this host is refused, whatever Slurm says."""
    run.squeue_fails()
    words = " ".join(run.kernel("claim", str(run.path), HERE))
    shell = subprocess.Popen(
        ["bash", "-c", f"claim=$({words}); echo $claim; sleep 60"],
        env=run.environment(job_id=1),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert shell.stdout is not None
        assert shell.stdout.readline().startswith("0 ")
        silence(run, 3600)
        assert refusal(run.claim(job_id=2)) == still_running(run, "Slurm job 1 runs it")
    finally:
        shell.kill()
        shell.communicate()
    silence(run, 3600)
    wait_until(lambda: start_ticks(shell.pid) is None, "the shell is gone")
    assert run.claimed(job_id=2) == 1
