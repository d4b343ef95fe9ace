"""A run on this machine, started by its own script: agent and records of any other, within its GPUs and CPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from interpreters import pythons
from run_fixture import Run, runs_below, wait_until

from tuneplane.kernel.runfolder import is_hardware_file
from tuneplane.kernel.submission import read_submissions

MakeRun = Callable[..., Run]
CPUS = len(os.sched_getaffinity(0))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRun]:
    with runs_below(tmp_path) as make_one:

        def local(train: str, **more: object) -> Run:
            return make_one(train, **{"scheduler": "local", "profile": "local", "per_node": CPUS, **more})

        yield local


def finish(run: Run, script: subprocess.Popen[str], timeout_s: float = 60) -> int:
    """Wait for a script's end; nothing of its run may be left."""
    code = script.wait(timeout=timeout_s)
    assert run.processes() == []
    assert run.left_in_scratch() == []
    return code


@pytest.mark.contract("C47")
def test_a_local_run_leaves_the_records_of_any_other(make: MakeRun) -> None:
    run = make('echo "rank $TUNEPLANE_MACHINE_RANK of $TUNEPLANE_MACHINE_COUNT"; exit 3')
    script = run.start_script()
    assert finish(run, script) == 3
    assert run.said() == ""
    entry = run.scratch().work / "experiments/ring/train.sh"
    host = os.uname().nodename
    assert run.log() == f"tuneplane: node 0 of 1 ({host}): bash {entry}\nrank 0 of 1\n"
    assert (run.start_of()["pid"], run.start_of()["job_id"]) == (script.pid, f"local-{script.pid}")
    assert run.start_of()["address"] == "127.0.0.1"
    assert (run.record()["code"], run.end_of()["code"], run.end_of()["for_good"]) == (3, 3, True)
    assert not run.folder.secrets.exists()
    assert [s.job_id for s in read_submissions(run.folder)] == [f"local-{script.pid}"]


@pytest.mark.contract("C10")
def test_a_local_run_has_nothing_of_the_shell_that_started_it(make: MakeRun) -> None:
    run = make("env")
    planted = {
        "PYTHONPATH": "/home/ada/lib",
        "HF_TOKEN": "planted",
        "LD_LIBRARY_PATH": "/home/ada/lib",
        "A": "b",
    }
    script = run.start_script(**planted)
    assert finish(run, script) == 0
    names = {line.partition("=")[0] for line in run.log().splitlines()[1:]}
    assert not names & {*planted, "SLURM_JOB_ID"}
    assert f"\nPATH={run.job.spec.node.path}\n" in run.log()


@pytest.mark.slow
def test_a_second_start_is_refused_at_once_while_the_first_runs(make: MakeRun) -> None:
    run = make("echo training; sleep 1000")
    script = run.start_script()
    run.wait_for_line("training")
    began = time.monotonic()
    second = run.start_script()
    assert second.wait(timeout=30) == 1
    assert time.monotonic() - began < 10  # it does not wait for the share that the first holds
    assert " ".join(run.said().split()) == (
        f"tuneplane: {run.path}: attempt 0 of this run has not ended: process {script.pid} runs it"
        f" → wait for it, or end it with: tp job stop {run.job.metadata.run_id}"
    )
    assert [s.job_id for s in read_submissions(run.folder)] == [f"local-{script.pid}"]
    script.send_signal(signal.SIGTERM)
    assert finish(run, script) == 143


def test_a_later_start_is_the_next_attempt(make: MakeRun) -> None:
    run = make("echo attempt $TUNEPLANE_JOB_ATTEMPT; exit 1", reporting=False)
    for number in (0, 1, 2):
        assert finish(run, run.start_script()) == 1
        assert f"attempt {number}\n" in run.log(attempt=number)


@pytest.mark.slow
def test_term_ends_a_local_run_with_its_records(make: MakeRun) -> None:
    run = make("trap 'echo saved; exit 0' TERM; echo training; while :; do sleep 0.05; done")
    script = run.start_script()
    run.wait_for_line("training")
    script.send_signal(signal.SIGTERM)
    assert finish(run, script) == 0
    assert "saved\n" in run.log()
    assert (run.end_of()["stop_requested"], run.end_of()["for_good"]) == (True, False)


@pytest.mark.slow
def test_runs_share_the_machine_and_queue_for_it(make: MakeRun, tmp_path: Path) -> None:
    """The first holds all; two that fit together then run at once, the last one after them."""
    one, wait = max(1, CPUS // 2), "until [ -e {0} ]; do sleep 0.02; done"
    first = make(f"echo up; {wait.format(tmp_path / 'go')}")
    small = [make(f"echo up; {wait.format(tmp_path / 'go2')}", per_node=one) for _ in range(CPUS // one)]
    last = make("echo up", per_node=CPUS)
    scripts = {}
    for run in (first, *small, last):
        scripts[run] = run.start_script()
        if run is first:
            run.wait_for_line("up")
        else:
            wait_until(lambda r=run: "waits for" in r.said(), "it says that it waits")
            time.sleep(0.3)  # the order in which they came
    assert [run.folder.attempts() for run in (*small, last)] == [[]] * (len(small) + 1)
    (tmp_path / "go").touch()
    for run in small:
        run.wait_for_line("up")
    assert last.folder.attempts() == []
    (tmp_path / "go2").touch()
    for run, script in scripts.items():
        assert script.wait(timeout=60) == 0, run.said()
    assert last.start_of()["started_at"] > max(run.end_of()["ended_at"] for run in small)
    assert last.said() == f"tuneplane: waits for {CPUS} of this machine's GPUs or CPUs\n"


@pytest.mark.slow
def test_a_run_that_waits_is_known_and_can_be_stopped(make: MakeRun) -> None:
    first, second = make("echo up; sleep 1000"), make("echo up")
    script = first.start_script()
    first.wait_for_line("up")
    waiting = second.start_script()
    wait_until(lambda: "waits for" in second.said(), "it says that it waits")
    assert [s.job_id for s in read_submissions(second.folder)] == [f"local-{waiting.pid}"]
    waiting.send_signal(signal.SIGTERM)
    assert finish(second, waiting) == 143
    assert second.said().splitlines()[-1] == (
        "tuneplane: told to end while it waited for its share of this machine"
    )
    assert second.folder.attempts() == []
    script.send_signal(signal.SIGTERM)
    finish(first, script)


@pytest.mark.slow
def test_a_killed_run_frees_its_share_and_its_processes_do_not_outlive_the_next_attempt(
    make: MakeRun,
) -> None:
    run = make("trap '' TERM HUP; echo training; (setsid sleep 1000 &); sleep 1000")
    script = run.start_script()
    run.wait_for_line("training")
    wait_until(lambda: len(run.processes()) >= 3, "the trainer's processes have started")
    orphans = run.processes()
    script.kill()
    script.wait()
    assert set(run.processes()) == set(orphans)  # no Slurm here to end them
    assert run.left_in_scratch() == [run.scratch().path.name]
    other = make("echo up")
    assert other.start_script().wait(timeout=30) == 0  # the share is free
    script = run.start_script()
    run.wait_for_line("training", attempt=1)
    assert not set(orphans) & set(run.processes())
    assert run.left_in_scratch() == [run.scratch(1).path.name]
    script.kill()


@pytest.mark.slow
def test_a_shell_from_which_the_next_attempt_is_started_is_spared(make: MakeRun) -> None:
    """`tp job shell`, opened beside a trainer that was killed, has the environment of that attempt."""
    run = make("echo training; sleep 1000")
    script = run.start_script()
    run.wait_for_line("training")
    environment = Path(f"/proc/{run.processes()[0]}/environ").read_bytes().decode().split("\0")
    script.kill()
    script.wait()
    shell = subprocess.Popen(
        ["/bin/bash", "-c", f"/bin/bash '{run.folder.script}'; echo spared"],
        env=dict(word.split("=", 1) for word in environment if word),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    run.wait_for_line("training", attempt=1)
    os.kill(run.start_of(1)["pid"], signal.SIGTERM)
    out, err = shell.communicate(timeout=30)
    assert (out, err) == ("spared\n", "")


@pytest.mark.slow
@pytest.mark.contract("C47")
def test_gpus_of_this_machine_are_those_that_the_environment_names(make: MakeRun) -> None:
    names = "GPU-aaaa,GPU-bbbb,GPU-cccc"
    show = "echo gpus $CUDA_VISIBLE_DEVICES of $TUNEPLANE_CLUSTER_GPUS_PER_NODE; sleep 1000"
    first, second = (make(show, device="gpu", per_node=n, profile=f"local:{n}") for n in (2, 1))
    third = make(show, device="gpu", per_node=1)
    scripts = [first.start_script(CUDA_VISIBLE_DEVICES=names)]
    first.wait_for_line("gpus GPU-aaaa,GPU-bbbb of 2")
    scripts.append(second.start_script(CUDA_VISIBLE_DEVICES=names))
    second.wait_for_line("gpus GPU-cccc of 1")
    scripts.append(third.start_script(CUDA_VISIBLE_DEVICES=names))
    wait_until(lambda: "waits for 1 of" in third.said(), "the third waits")
    scripts[0].kill()
    third.wait_for_line("gpus GPU-aaaa of 1")
    for run, script in zip((second, third), scripts[1:], strict=True):
        script.send_signal(signal.SIGTERM)
        script.wait(timeout=30)
        assert run.processes() == []


def test_more_gpus_than_there_are_is_one_sentence_and_no_endless_wait(make: MakeRun) -> None:
    run = make("echo up", device="gpu", per_node=4, profile="local:4")
    for visible, count in (("0,1", 2), ("", 0)):
        assert run.start_script(CUDA_VISIBLE_DEVICES=visible).wait(timeout=30) == 1
        what = f"CUDA_VISIBLE_DEVICES={visible} has {count} GPUs, the run asks for 4"
        assert f"tuneplane: profile local:4: {what}\n" in run.said()
    assert run.folder.attempts() == []


def test_more_processes_than_cpus_run_alone(make: MakeRun) -> None:
    run = make("echo $TUNEPLANE_CLUSTER_GPUS_PER_NODE processes", per_node=CPUS + 3)
    assert finish(run, run.start_script()) == 0
    assert f"{CPUS + 3} processes\n" in run.log()


def test_shares_are_of_this_machine_not_of_the_storage(make: MakeRun) -> None:
    """Two login hosts with one home must not wait for each other."""
    run = make("ls")
    assert finish(run, run.start_script()) == 0
    assert (run.scratch().path.parent / "shares").is_dir()
    assert sorted(p.name for p in (run.path.parents[3]).iterdir()) == ["runs"]


def python_of(version: str) -> str:
    """This machine's Python of a version."""
    found = pythons((3, 6)).get(version)
    if found is None:
        pytest.skip(f"there is no Python {version} here")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.9", "3.10", "3.11", "3.12", "3.13", "3.14"])
def test_the_kernel_runs_a_whole_run_under_any_python(make: MakeRun, version: str) -> None:
    python = python_of(version)
    trainer = (
        "import os, sys, tuneplane.report as report\n"
        "report.init(hparams={'lr': 0.1})\n"
        "for step in range(3): report.log({'loss': 1 / (step + 1)}, step=step)\n"
        "report.finish(); print('python', '.'.join(map(str, sys.version_info[:2])))\n"
    )
    run = make(
        f"{python} experiments/ring/t.py; sleep 1000 & disown",
        files={"t.py": trainer},
        python=python,
        observability="platform",
        url=None,
    )
    script = run.start_script()
    assert finish(run, script) == 0, run.said() + run.log()
    assert run.said() == ""
    assert run.log().endswith(f"python {version}\n")
    assert run.record()["python"].startswith(f"{version}.")
    (points,) = (path for path in run.folder.ingest.glob("*.jsonl") if not is_hardware_file(path.name))
    assert points.read_text().count("loss") == 3
    assert finish(run, run.start_script()) == 1
    assert "secrets.env is gone" in run.said()


@pytest.mark.parametrize("version", ["3.6", "3.7", "3.8"])
def test_an_older_python_is_told_to_be_too_old(make: MakeRun, version: str) -> None:
    found = python_of(version)
    run = make("echo up", python=found)
    assert finish(run, run.start_script()) == 1
    assert run.said().startswith(f"tuneplane needs Python 3.9 or newer on a node; {found} is {version}.")
