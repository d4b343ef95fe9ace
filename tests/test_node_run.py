"""One node's agent from the capsule to the exit record, with real shells and trainers."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_fixture import PYTHON, Run, runs_below, wait_until

from tuneplane.spec import Container, Image, Mount

MakeRun = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRun]:
    with runs_below(tmp_path) as make_one:
        yield make_one


def command_line(run: Run, rank: int = 0, nodes: int = 1, attempt: int = 0) -> str:
    entry = run.scratch(attempt, rank).work / "experiments/ring/train.sh"
    return f"tuneplane: node {rank} of {nodes} (n{rank + 1}): bash {entry}\n"


@pytest.mark.contract("C8")
def test_the_log_shows_the_command_and_then_what_it_prints(make: MakeRun) -> None:
    run = make("echo one; echo two >&2; echo three")
    done = run.run_once()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert run.log() == command_line(run) + "one\ntwo\nthree\n"


@pytest.mark.contract("C6")
def test_the_command_is_bash_with_the_absolute_path_and_nothing_else(make: MakeRun) -> None:
    run = make(
        "echo $#; tr '\\0' '\\n' </proc/$$/cmdline; pwd; ls -A; ls -A experiments/ring; wc -c </dev/stdin"
    )
    assert run.run_once().returncode == 0
    work = run.scratch().work
    expected = ["0", "bash", f"{work}/experiments/ring/train.sh", str(work)]
    assert run.log().splitlines()[1:] == [
        *expected,
        ".tuneplane",
        "experiments",
        "tuneplane.yaml",
        "train.sh",
        "0",
    ]


def test_the_work_folder_cannot_be_changed(make: MakeRun) -> None:
    run = make(
        "umask; stat -c %a . experiments experiments/ring tuneplane.yaml; setpriv --version >/dev/null || exit 9\n"
        'as="setpriv --inh-caps=-all --bounding-set=-all --"; [ "$(id -u)" = 0 ] || as=\n'
        "$as bash -c 'echo x >>tuneplane.yaml'; $as touch new experiments/ring/new; $as rm -f tuneplane.yaml"
    )
    run.run_once()
    lines = run.log().splitlines()[1:]
    assert lines[:5] == ["0077", "500", "555", "555", "444"]
    assert [line for line in lines[5:] if "Permission denied" not in line] == []
    assert len(lines) == 9


def test_the_output_folder_is_there_even_where_it_was_removed(make: MakeRun) -> None:
    run = make('echo kept >"$TUNEPLANE_OUT_DIR/checkpoint"')
    run.folder.out.rmdir()
    assert run.run_once().returncode == 0
    assert (run.folder.out / "checkpoint").read_text() == "kept\n"


@pytest.mark.contract("C8")
def test_what_a_python_trainer_prints_is_in_the_log_at_once_without_a_flush(make: MakeRun) -> None:
    trainer = "import time\nprint('step 1')\nwhile True: time.sleep(1)\n"
    run = make(f"{PYTHON} experiments/ring/train.py", files={"train.py": trainer})
    agent = run.start_node(run.claimed())
    run.wait_for_line("step 1\n")
    assert agent.poll() is None


@pytest.mark.contract("C8")
def test_standard_error_and_output_keep_their_order(make: MakeRun) -> None:
    trainer = "import sys\nfor n in range(200):\n    print(n, file=sys.stderr if n % 2 else sys.stdout)\n"
    run = make(f"{PYTHON} experiments/ring/train.py; echo end", files={"train.py": trainer})
    assert run.run_once().returncode == 0
    assert run.log().splitlines()[1:] == [*map(str, range(200)), "end"]


def test_output_of_any_bytes_and_size_arrives_as_it_was(make: MakeRun) -> None:
    run = make("head -c 3000000 /dev/zero | tr '\\0' x; printf '\\xff\\xfe\\r\\n'")
    assert run.run_once().returncode == 0
    text = run.attempt().node_log(0).read_bytes()
    assert text == command_line(run).encode() + b"x" * 3_000_000 + b"\xff\xfe\r\n"


@pytest.mark.parametrize(
    ("train", "code", "reason"),
    [
        ("exit 0", 0, "the command ended with exit code 0"),
        ("exit 1", 1, "the command ended with exit code 1"),
        ("exit 42", 42, "the command ended with exit code 42"),
        ("exit 255", 255, "the command ended with exit code 255"),
        ("no-such-program", 127, "the command ended with exit code 127"),
        ("kill -KILL $$", 137, "the command was ended by SIGKILL (exit code 137)"),
        ("kill -SEGV $$", 139, "the command was ended by SIGSEGV (exit code 139)"),
        ("bash -c 'kill -KILL $$'", 137, "the command was ended by SIGKILL (exit code 137)"),
        ("exec bash -c 'kill -TERM $$'", 143, "the command was ended by SIGTERM (exit code 143)"),
        ("set -u; echo $UNSET", 1, "the command ended with exit code 1"),
    ],
)
def test_the_exit_code_is_kept_and_said_in_words(make: MakeRun, train: str, code: int, reason: str) -> None:
    run = make(train)
    assert run.run_once().returncode == code
    record = run.record()
    assert (record["state"], record["code"], record["reason"]) == ("ended", code, reason)
    assert record["told_to_stop"] is False
    assert run.left_in_scratch() == []


def test_the_record_says_where_and_what(make: MakeRun) -> None:
    run = make("sleep 0.1", device="gpu", per_node=8, nodes=2)
    before = time.time()
    run.claimed()
    run.node(nodes=2, rank=1, CUDA_VISIBLE_DEVICES="2,3")
    record = run.record(rank=1)
    assert record["rank"] == 1
    assert (record["host"], record["slurm_job_id"], record["nodes"]) == ("n2", "4242", 2)
    assert (record["gpus"], record["visible_devices"]) == (2, "2,3")
    assert record["differences"] == ["this node gives 2 GPUs, the run was submitted for 8 per node"]
    assert record["command"] == ["bash", f"{run.scratch(0, 1).work}/experiments/ring/train.sh"]
    assert before < record["started_at"] < record["command_started_at"] < record["ended_at"] < time.time()


@pytest.mark.contract("C12")
def test_a_different_allocation_is_told_in_the_log_before_the_command(make: MakeRun) -> None:
    run = make("echo hello", device="gpu", per_node=4)
    run.run_once(CUDA_VISIBLE_DEVICES="0", SLURM_JOB_PARTITION="debug")
    assert run.log().splitlines()[:2] == [
        "tuneplane: warning: the job runs in partition debug, the run was submitted to gpu"
        " (SBATCH_PARTITION in the environment, or an option, overrides the script)",
        "tuneplane: warning: this node gives 1 GPU, the run was submitted for 4 per node",
    ]
    assert run.log().endswith(command_line(run) + "hello\n")


def test_two_nodes_on_one_machine_do_not_collide(make: MakeRun) -> None:
    """Ranks 0 and 1 of one attempt, as on a test cluster, with one scratch folder."""
    run = make(
        'echo "$TUNEPLANE_MACHINE_RANK of $TUNEPLANE_MACHINE_COUNT at $TUNEPLANE_WORK_DIR"; ls "$TMPDIR" | wc -l\n'
        'touch "$TMPDIR/mine" "$TUNEPLANE_OUT_DIR/here-$TUNEPLANE_MACHINE_RANK"\n'
        'until [ -e "$TUNEPLANE_OUT_DIR/here-0" -a -e "$TUNEPLANE_OUT_DIR/here-1" ]; do sleep 0.01; done',
        nodes=2,
    )
    run.claimed()
    agents = [run.start_node(nodes=2, rank=rank) for rank in (0, 1)]
    assert [run.finish(agent).returncode for agent in agents] == [0, 0]
    for rank in (0, 1):
        said = f"{rank} of 2 at {run.scratch(0, rank).work}\n0\n"
        assert run.log(rank) == command_line(run, rank, 2) + said
        assert run.record(rank)["code"] == 0
    assert run.left_in_scratch() == []


def cannot_start(run: Run, done: subprocess.CompletedProcess[str], code: int, reason: str) -> None:
    """The agent stopped before the command: said to people, in the log and in the record; nothing is left."""
    assert done.returncode == code
    assert done.stdout == ""
    said = done.stderr.removeprefix("tuneplane: ").rstrip("\n")
    assert said.startswith(reason)
    assert "Traceback" not in said
    assert run.log().endswith(f"tuneplane: {said}\n")
    record = run.record()
    assert (record["state"], record["code"], record["reason"]) == ("ended", code, said)
    assert run.left_in_scratch() == []
    assert run.processes() == []


def test_a_damaged_capsule_is_not_unpacked(make: MakeRun) -> None:
    run = make("echo hello")
    content = bytearray(run.folder.capsule.read_bytes())
    content[content.index(b"echo hello")] ^= 1
    run.folder.capsule.chmod(0o644)
    run.folder.capsule.write_bytes(content)
    done = run.run_once()
    cannot_start(run, done, 125, f"{run.folder.capsule}: the capsule's digest is sha256:")
    assert "hello" not in run.log()


def test_a_capsule_that_is_gone_is_told(make: MakeRun) -> None:
    run = make("echo hello")
    run.folder.capsule.unlink()
    cannot_start(run, run.run_once(), 125, f"{run.folder.capsule}: the capsule cannot be read (No such file")


def test_a_node_that_does_not_see_the_storage_is_told(make: MakeRun) -> None:
    run = make("echo hello")
    run.claimed()
    run.folder.canary.unlink()
    done = run.node()
    cannot_start(
        run, done, 125, f"node {os.uname().nodename}: the canary file {run.folder.canary} is not there"
    )


@pytest.mark.contract("C11")
def test_a_node_without_the_secrets_is_told_the_remedy(make: MakeRun) -> None:
    run = make("echo hello", secrets={"HF_TOKEN": "hf_planted"})
    run.claimed()
    run.folder.secrets.write_text("TUNEPLANE_JOB_TOKEN=x\n")
    done = run.node()
    cannot_start(run, done, 125, f"HF_TOKEN not in secrets.env\n  → tp job retry {run.job.metadata.run_id}")


def test_a_profile_whose_path_has_no_bash_is_told(make: MakeRun) -> None:
    run = make("echo hello", path="/nowhere")
    start = (
        "node agent: bash cannot be started: No such file or directory\n  → PATH is /nowhere; it comes from"
    )
    cannot_start(run, run.run_once(), 127, start)


def test_an_image_and_a_mount_that_this_node_does_not_see_are_told_at_once(
    make: MakeRun, tmp_path: Path
) -> None:
    image = Image("/images/train.sif", "--image", f"{tmp_path}/train.sif", "2" * 64)
    mount = Mount(f"{tmp_path}/data", "/data", read_only=True)
    run = make("echo hello", container=Container("apptainer", image=image, mounts=[mount]))
    done = run.run_once()
    cannot_start(
        run, done, 125, f"node {os.uname().nodename}: {tmp_path}/data is to be mounted and is not on"
    )
    assert f"the image {tmp_path}/train.sif is not on this node" in done.stderr


def test_an_attempt_that_was_never_claimed_is_told(make: MakeRun) -> None:
    run = make("echo hello")
    done = run.call("node", str(run.path), "7", "127.0.0.1", "20000", timeout_s=90)
    assert done.returncode == 125
    assert (
        done.stderr.splitlines()[0] == f"tuneplane: {run.attempt(7).node_log(0)}: No such file or directory"
    )
    assert "Traceback" not in done.stderr
    assert run.left_in_scratch() == []


def test_whatever_fails_in_the_agent_is_recorded(make: MakeRun) -> None:
    """A JobSpec of an adapter that this kernel does not have: written by another version."""
    run = make("echo hello")
    run.folder.job.chmod(0o644)
    run.folder.job.write_text(
        run.folder.job.read_text().replace('"adapter": "custom"', '"adapter": "none-such"')
    )
    cannot_start(run, run.run_once(), 125, "there is no adapter none-such")


SURVIVORS = {
    "in the background": "sleep 1000 & disown",
    "in a session of its own": "setsid sleep 1000 &",
    "forked twice": "(setsid bash -c 'sleep 1000 & sleep 1000 &' &) &",
    "deaf to TERM and forked twice": "(setsid bash -c 'trap \"\" TERM; sleep 1000 & wait' &) &",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SURVIVORS)
@pytest.mark.parametrize("code", [0, 3])
def test_what_the_command_left_running_ends_with_it(make: MakeRun, kind: str, code: int) -> None:
    run = make(f"{SURVIVORS[kind]}\nsleep 0.3; exit {code}")
    agent = run.start_node(run.claimed())
    wait_until(lambda: len(run.processes()) >= 2, "the processes have started")
    assert run.finish(agent).returncode == code
    assert run.processes() == []
    assert run.left_in_scratch() == []


@pytest.mark.slow
def test_what_was_left_running_may_still_finish_its_work(make: MakeRun) -> None:
    """An upload in the background that ends properly on TERM."""
    run = make(
        '(trap "sleep 0.5; echo done >$TUNEPLANE_OUT_DIR/upload; exit" TERM; while :; do sleep 0.05; done) &\n'
        "sleep 0.3"
    )
    assert run.run_once().returncode == 0
    assert (run.folder.out / "upload").read_text() == "done\n"


def test_orphans_that_end_during_the_run_are_no_zombies(make: MakeRun) -> None:
    run = make("for n in $(seq 30); do (sleep 0.01 &); done; sleep 0.5; echo started; sleep 1000")
    agent = run.start_node(run.claimed())
    run.wait_for_line("started")

    def zombies() -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if fields[0] == "Z" and fields[1] == str(agent.pid):
                    found.append(entry.name)
        return found

    wait_until(lambda: not zombies(), "no zombie below the agent", 5)


def test_what_a_trainer_made_unremovable_is_removed(make: MakeRun) -> None:
    run = make(
        'mkdir -p "$TMPDIR/a/b/c"; touch "$TMPDIR/a/b/c/d"; chmod -R 0 "$TMPDIR/a"; ln -s / "$TMPDIR/root"'
    )
    assert run.run_once().returncode == 0
    assert run.left_in_scratch() == []
    assert Path("/etc").exists()


def test_what_cannot_be_removed_changes_no_exit_code(make: MakeRun, tmp_path: Path) -> None:
    """A mount that the trainer left below its TMPDIR."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    run = make('mkdir "$TMPDIR/m"; mount -t tmpfs none "$TMPDIR/m"; exit 5')
    done = run.run_once()
    subprocess.run(["umount", str(run.scratch().temporary / "m")], check=True)
    assert done.returncode == 5
    assert "not removed: Device or resource busy" in done.stderr
    assert run.record()["code"] == 5


def test_logs_and_records_are_nobody_elses(make: MakeRun) -> None:
    run = make('touch "$TUNEPLANE_OUT_DIR/model"; touch "$TMPDIR/x"; ls -la "$TMPDIR/.."; sleep 0.3')
    agent = run.start_node(run.claimed())
    wait_until(run.scratch().launch.exists, "the command was started")
    assert stat.S_IMODE(run.scratch().launch.stat().st_mode) == 0o600
    assert stat.S_IMODE(run.scratch().path.stat().st_mode) == 0o700
    assert run.finish(agent).returncode == 0
    for path in (run.attempt().node_log(0), run.folder.out / "model"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(run.attempt().path.stat().st_mode) == 0o700


@pytest.mark.contract("C11")
def test_a_secret_stands_in_no_argument_list_and_no_log(make: MakeRun) -> None:
    run = make("echo started; sleep 1000", secrets={"HF_TOKEN": "hf_planted_secret"})
    agent = run.start_node(run.claimed())
    run.wait_for_line("started")
    seen = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert not [line for line in seen if b"hf_planted_secret" in line]
    agent.send_signal(signal.SIGTERM)
    run.finish(agent)
    files = [p for p in run.path.rglob("*") if p.is_file() and p != run.folder.secrets]
    assert not [p for p in files if b"hf_planted_secret" in p.read_bytes()]
