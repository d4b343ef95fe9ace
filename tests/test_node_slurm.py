"""Node agents started by a real Slurm, as an ordinary user, with and without a container."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_fixture import SYSTEM_PATH, Run, make_run, wait_until
from test_node_environment import OF_BASH, promised
from testbed_client import Testbed

from tuneplane.kernel.digests import sha256_file
from tuneplane.node.scratch import Scratch
from tuneplane.spec import Container, Image

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(150)]

SAVES = """\
import os, signal, subprocess, sys, time
def save(*_):
    time.sleep(3)
    # A program of the image, started only now: whoever serves the image must still be there.
    subprocess.run(["sha256sum", "/usr/bin/perl"], check=True, stdout=subprocess.DEVNULL)
    open(os.environ["TUNEPLANE_OUT_DIR"] + "/saved-" + os.environ["TUNEPLANE_MACHINE_RANK"], "w").close()
    print("saved"); sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("training")
while True: time.sleep(0.05)
"""


class Job:
    """A run submitted by alice."""

    def __init__(self, testbed: Testbed, run: Run, scratch: Path) -> None:
        self.testbed, self.run = testbed, run
        self.base = scratch / f"tuneplane-{testbed.home().stat().st_uid}"
        self.id = testbed.exec(["sbatch", str(run.folder.script)], cwd="/").stdout.split()[-1]

    def wait(self) -> str:
        state = self.testbed.wait_job(self.id)
        assert self.left() == []
        return state

    def left(self) -> list[str]:
        """What its attempts left in alice's scratch folder."""
        name = self.run.scratch().path.name.split(".")[0]
        return sorted(p.name for p in self.base.glob(f"{name}.*"))

    def said(self) -> str:
        return (self.run.folder.slurm / f"{self.id}.out").read_text()

    def scratch(self, rank: int) -> Scratch:
        return Scratch(self.base / self.run.scratch(0, rank).path.name)

    def host(self, rank: int) -> str:
        """Which of the testbed's hosts Slurm took for it."""
        return str(self.run.record(rank)["host"])

    def training(self, attempt: int = 0) -> None:
        for rank in range(self.run.job.spec.resources.nodes):
            self.run.wait_for_line("training", rank, attempt)


@pytest.fixture
def submit(testbed: Testbed) -> Iterator[Any]:
    folder = testbed.shared / f"node-{secrets.token_hex(4)}"
    folder.mkdir()
    jobs: list[Job] = []

    def one(train: str, sif: Path | None = None, **more: Any) -> Job:
        if sif is not None:
            image = Image(str(sif), "--image", str(sif), sha256_file(sif))
            more["container"] = Container("apptainer", image=image)
        usual = {"nodes": 2, "device": "gpu", "per_node": 2, "profile": "h200:4", "user": "alice"}
        usual |= {"python": "/usr/bin/python3", "path": SYSTEM_PATH, "stop_grace_s": 10.0, "max_restarts": 3}
        run = make_run(folder, train, number=len(jobs), **{**usual, **more})
        testbed.give(folder)
        jobs.append(Job(testbed, run, folder / "scratch"))
        return jobs[-1]

    yield one
    for job in jobs:
        testbed.exec(["scancel", job.id], check=False)
        testbed.wait_job(job.id)
    shutil.rmtree(folder, ignore_errors=True)


def test_the_culprits_code_is_the_jobs_and_its_victims_are_told_to_end(submit: Any) -> None:
    job = submit(
        'echo training; until [ -e "$TUNEPLANE_OUT_DIR/go" ]; do sleep 0.05; done\n'
        '[ "$TUNEPLANE_MACHINE_RANK" = 1 ] && exit 3\n'
        "trap 'echo told; exit 0' TERM; while :; do sleep 0.05; done"
    )
    job.training()
    (job.run.folder.out / "go").touch()
    assert job.wait() == "FAILED"
    assert job.testbed.job(job.id)["ExitCode"] == "3:0"
    end = job.run.end_of()
    assert (end["code"], end["first_failing_node"], end["stop_requested"]) == (3, job.host(1), False)
    assert job.run.record(0)["told_to_stop"] is True
    assert "told\n" in job.run.log(0)
    assert not job.run.folder.secrets.exists()


def test_a_cancelled_job_has_its_whole_grace_on_every_node(submit: Any) -> None:
    job = submit("/usr/bin/python3 experiments/ring/t.py; echo not reached", files={"t.py": SAVES})
    job.training()
    job.testbed.exec(["scancel", job.id])
    assert job.wait() == "CANCELLED"
    assert sorted(p.name for p in job.run.folder.out.iterdir()) == ["saved-0", "saved-1"]
    for rank in (0, 1):
        record = job.run.record(rank)
        assert (record["state"], record["code"], record["told_to_stop"]) == ("ended", 143, True)
    assert job.run.end_of()["for_good"] is False


def test_a_requeued_job_is_the_next_attempt_of_the_same_run(submit: Any) -> None:
    job = submit("/usr/bin/python3 experiments/ring/t.py; echo not reached", files={"t.py": SAVES})
    job.training()
    job.testbed.exec(["scontrol", "requeue", job.id])
    wait_until(job.run.attempt(1).path.exists, "the next attempt was claimed", 90)
    job.training(attempt=1)
    assert job.run.end_of(0)["stop_requested"] is True
    assert (job.run.start_of(1)["restart_count"], job.run.start_of(1)["slurm_job_id"]) == (1, job.id)
    assert sorted(p.name for p in job.run.folder.out.iterdir()) == ["saved-0", "saved-1"]
    job.testbed.exec(["scancel", job.id])
    assert job.wait() == "CANCELLED"


def agent_of(job: Job, node: str) -> int:
    """The pid of a node's agent on this machine; hosts of the testbed may count their own."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words, values = ((entry / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
        except OSError:
            continue
        if {b"node", str(job.run.path).encode()} <= set(
            words
        ) and f"SLURMD_NODENAME={node}".encode() in values:
            return int(entry.name)
    raise AssertionError(f"no agent of {node}")


def test_an_agent_that_is_killed_is_named_and_nothing_of_its_node_runs_on(submit: Any) -> None:
    job = submit("/usr/bin/python3 experiments/ring/t.py; echo not reached", files={"t.py": SAVES})
    job.training()
    os.kill(agent_of(job, job.host(1)), signal.SIGKILL)
    assert job.testbed.wait_job(job.id) == "FAILED"
    end = job.run.end_of()
    assert (end["code"], end["first_failing_node"], end["for_good"]) == (137, job.host(1), False)
    assert job.run.processes() == []
    assert job.left() == [job.scratch(1).path.name]  # until the next agent on that node finds it


def test_a_container_has_the_tables_variables_and_the_images_path(submit: Any, testbed: Testbed) -> None:
    job = submit('env -0 >"$TUNEPLANE_OUT_DIR/env-$TUNEPLANE_MACHINE_RANK"', testbed.image)
    assert job.wait() == "COMPLETED", job.said() + job.run.log()
    for rank in (0, 1):
        values = environment((job.run.folder.out / f"env-{rank}").read_text().split("\0"))
        of_runtime = {n for n in values if n.startswith(("APPTAINER_", "SINGULARITY_"))} | {"LD_LIBRARY_PATH"}
        added = {"PATH", "PROMPT_COMMAND", "PS1"} | OF_BASH | of_runtime
        assert promised(job.run.job) <= set(values)
        assert set(values) - promised(job.run.job) <= added
        assert values["PATH"] != job.run.job.spec.node.path
        assert values["TUNEPLANE_MAIN_PROCESS_IP"] == f"10.77.0.1{job.host(0)[1:]}"
        assert values["HOME"] == str(job.scratch(rank).home)


@pytest.mark.parametrize("end", ["scancel", "success"])
def test_a_container_saves_within_its_grace_and_leaves_nothing(
    submit: Any, testbed: Testbed, end: str
) -> None:
    waits = "until [ -e $TUNEPLANE_OUT_DIR/go ]; do sleep 0.05; done"
    train = f"echo training; {waits}" if end == "success" else "exec python3 experiments/ring/t.py"
    job = submit(train, testbed.image, files={"t.py": SAVES})
    job.training()
    if end == "success":
        (job.run.folder.out / "go").touch()
        assert job.wait() == "COMPLETED"
    else:
        job.testbed.exec(["scancel", job.id])
        assert job.wait() == "CANCELLED"
        assert sorted(p.name for p in job.run.folder.out.iterdir()) == ["saved-0", "saved-1"]
        assert "saved\n" in job.run.log(0)
    assert job.run.processes() == []  # nor those of the runtime, which have the same variables


def environment(lines: list[str]) -> dict[str, str]:
    return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.mark.parametrize("contained", [True, False])
def test_a_shell_beside_the_trainer_has_its_environment(
    submit: Any, testbed: Testbed, contained: bool
) -> None:
    train = 'env >"$TUNEPLANE_OUT_DIR/env-$TUNEPLANE_MACHINE_RANK"; echo training; sleep 1000'
    job = submit(train, testbed.image if contained else None)
    job.training()
    step = [
        "srun",
        f"--jobid={job.id}",
        f"--nodelist={job.host(1)}",
        "--nodes=1",
        "--ntasks=1",
        "--overlap",
        "--mem=0",
    ]
    step += ["--gres=none", "--export=NONE", *job.run.kernel("shell", str(job.run.path), "0")]
    said = testbed.exec(
        [*step, "1", "bash", "-c", 'pwd; echo "$@"; env', "x", "a b", "$c"]
    ).stdout.splitlines()
    assert said[:2] == [str(job.scratch(1).work), "a b $c"]
    trainer = environment((job.run.folder.out / "env-1").read_text().splitlines())
    shell = environment(said[2:])
    for name in promised(job.run.job) - {"PATH"}:
        assert shell[name] == trainer[name], name
    assert testbed.exec([*step, "1", "false"], check=False).returncode == 1
    wrong = testbed.exec([*step, "7", "true"], check=False)
    assert f"attempt 0 of {job.run.job.metadata.run_id} does not run on this node (rank 7)" in wrong.stderr
    job.testbed.exec(["scancel", job.id])
    assert job.wait() == "CANCELLED"
