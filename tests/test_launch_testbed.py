"""What only a real Slurm tells: how sbatch reads directives, what squeue and sacct print, when signals come."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_jobs import bare_slurm_job, changed, complete_job
from slurm_lab import SlurmLab
from testbed_client import WEIRD_NAME, Testbed

from tuneplane.launch.inflight import FORMAT, gpus_in_flight
from tuneplane.launch.slurm import SlurmLauncher
from tuneplane.launch.slurm_commands import parse_sacct, parse_squeue
from tuneplane.spec import JobSpec

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(240)]


@pytest.fixture
def folder(testbed: Testbed) -> Iterator[Path]:
    """A folder of alice on the shared storage; her jobs of the test are cancelled."""
    path = testbed.home() / f"launch-{secrets.token_hex(4)}"
    testbed.exec(["mkdir", path])
    yield path
    testbed.exec(["scancel", "--user=alice", "--name=launch-test"], check=False)


def sbatch(testbed: Testbed, script: str, *options: str, folder: Path) -> str:
    """Submit a text as a script; the job's id."""
    path = folder / f"{secrets.token_hex(4)}.sbatch"
    testbed.exec(["sh", "-c", 'cat >"$1"', "sh", path], input=script)
    return testbed.exec(["sbatch", "--parsable", *options, path]).stdout.strip()


def wrapped(testbed: Testbed, folder: Path, command: str, *options: str) -> str:
    words = [
        "sbatch",
        "--parsable",
        "--job-name=launch-test",
        f"--chdir={folder}",
        "-o",
        "/dev/null",
        *options,
    ]
    return testbed.exec([*words, "--wrap", command]).stdout.strip()


# Directives


@pytest.mark.parametrize(
    "text",
    [
        WEIRD_NAME,
        "a\\b",
        "a\\\\b\\",
        "# no comment",
        " a  b ",
        "-x=y",
        "`id`",
        "$(id)",
        "a!b",
        "x,y;z",
        "'\"'",
        "~/é",
    ],
)
def test_sbatch_reads_a_text_back_as_it_was(testbed: Testbed, folder: Path, text: str) -> None:
    job = bare_slurm_job(job_name=text, extra_directives={"comment": text})
    where = folder / (WEIRD_NAME if "\\" in text or "/" in text else text)
    testbed.exec(["mkdir", "-p", where / "slurm"])
    script = SlurmLauncher(changed(job, {"metadata.folder": str(where)})).render()
    job_id = sbatch(testbed, script, folder=folder)
    assert testbed.wait_job(job_id) == "FAILED"  # the folder holds no run
    said = testbed.exec(["scontrol", "show", "job", job_id]).stdout
    assert f"JobName={text}\n" in said
    assert f"Comment={text} \n" in said or f"Comment={text}\n" in said
    assert f"WorkDir={where}\n" in said
    assert "SHA256SUMS" in testbed.exec(["cat", where / "slurm" / f"{job_id}.out"]).stdout


@pytest.mark.contract("C43")
def test_sbatch_takes_every_directive_of_the_complete_jobspec(testbed: Testbed, folder: Path) -> None:
    """Those that this cluster has a meaning for; the others would be refused for their values."""
    job: JobSpec = changed(
        complete_job(),
        {
            "metadata.folder": str(folder),
            "spec.resources.nodes": 2,
            "spec.resources.cpus_per_node": 16,
            "spec.resources.memory_per_node": "20G",
            "spec.slurm.account": None,
            "spec.slurm.qos": None,
            "spec.slurm.reservation": None,
            "spec.slurm.constraint": None,
            "spec.slurm.dependency": None,
            "spec.slurm.exclude": "n4",
            "spec.slurm.nodelist": "n[1-2]",
        },
    )
    job_id = sbatch(testbed, SlurmLauncher(job).render(), "--hold", folder=folder)
    fields = testbed.job(job_id)
    said = testbed.exec(["scontrol", "show", "job", job_id]).stdout
    testbed.exec(["scancel", job_id])
    assert fields["Partition"] == "gpu"
    assert fields["TimeLimit"] == "1-00:00:00"
    assert (fields["NumNodes"], fields["NumCPUs"], fields["CPUs/Task"]) == ("2-2", "32", "16")
    assert fields["MinMemoryNode"] == "20G"
    assert fields["TresPerNode"] == "gres:gpu:h200:8"
    assert (fields["ReqNodeList"], fields["ExcNodeList"]) == ("n[1-2]", "n4")
    assert fields["Requeue"] == "1"
    assert fields["OverSubscribe"] == "NO"  # --exclusive
    assert fields["MailUser"] == "alice@example.org"
    assert "Comment=a note" in said
    assert fields["StdErr"] == fields["StdOut"] == f"{folder}/slurm/{job_id}.out"


# Signals


def test_a_limit_shorter_than_the_warning_still_lets_the_trainer_save(testbed: Testbed) -> None:
    """Slurm warns such a job as it begins, perhaps while its script is still claiming the attempt."""
    lab = SlurmLab(testbed)
    lab.train_sh(
        'until [ -e "$TUNEPLANE_STOP_FILE" ]; do sleep 0.2; done\necho saved >"$TUNEPLANE_OUT_DIR/logs"'
    )
    lab.commit()
    run = lab.submit("h200-bare:1", "--time", "1")
    status = run.wait("TIMEOUT", timeout_s=150)
    assert status["code"] == 0
    assert status["not_restarted"].startswith("no progress")
    assert run.read("out/logs") == "saved\n"


# squeue and sacct


def test_what_squeue_and_sacct_print_is_read_as_meant(testbed: Testbed, folder: Path) -> None:
    failed = wrapped(testbed, folder, "exit 3")
    killed = wrapped(testbed, folder, "kill -9 $$")
    unopened = wrapped(testbed, folder, "true", "--output=/nonexistent/x/y")
    array = wrapped(testbed, folder, "sleep 60", "--array=0-3%1")
    running = wrapped(testbed, folder, "sleep 60")
    held = wrapped(testbed, folder, "true", "--hold")
    for job in (failed, killed, unopened):
        assert testbed.wait_job(job) == "FAILED"
    ids = [failed, killed, unopened, f"{array}_0", f"{array}_2", running, held]

    def squeue(asked: list[str]) -> str:
        words = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(asked)}"]
        return testbed.exec([*words, "--format=%i|%T|%N|%r"]).stdout

    deadline = 40
    while "RUNNING" not in squeue([running]) or "RUNNING" not in squeue([f"{array}_0"]):
        testbed.exec(["sleep", "0.5"])
        deadline -= 1
        assert deadline, squeue(ids)
    found = parse_squeue(squeue([*ids, "987654", "987655_3"]))  # unknown ids among known ones are no error
    assert set(found) == set(ids)
    assert (found[failed].state, found[failed].reason) == ("FAILED", "NonZeroExitCode")
    assert found[f"{array}_0"].state == found[running].state == "RUNNING"
    assert (found[f"{array}_2"].state, found[f"{array}_2"].reason) == ("PENDING", "JobArrayTaskLimit")
    assert (found[held].state, found[held].reason) == ("PENDING", "JobHeldUser")
    assert found[running].nodes in testbed.nodes and found[running].reason == ""

    alone = testbed.exec(["squeue", "--noheader", "--states=all", "--jobs=987654"], check=False)
    assert alone.returncode == 1 and "Invalid job id" in alone.stderr

    testbed.exec(["scancel", running, held, array])
    for job in (running, held):
        assert testbed.wait_job(job) == "CANCELLED"
    assert parse_squeue(squeue([held]))[held].reason == "", "it was cancelled, not held"

    words = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(ids)}"]

    def sacct() -> str:
        return testbed.exec([*words, "--format=JobID,State,ExitCode,NodeList,Reason"]).stdout

    while len(re.findall("CANCELLED by", sacct())) < 3:  # slurmdbd is told a moment later
        testbed.exec(["sleep", "0.5"])
        deadline -= 1
        assert deadline, sacct()
    booked = parse_sacct(sacct())
    assert {(booked[job].state, booked[job].code) for job in (failed, killed, unopened)} == {
        ("FAILED", 3),
        ("FAILED", 137),
        ("FAILED", 53),
    }
    assert (booked[running].state, booked[held].state) == ("CANCELLED", "CANCELLED")
    assert booked[running].reason.startswith("by ")
    assert (booked[running].nodes, booked[held].nodes) == (found[running].nodes, "")


def test_gpus_in_flight_are_counted_however_they_were_asked_for(testbed_alone: Testbed, folder: Path) -> None:
    testbed, user = testbed_alone, "carol"  # alone: another test's jobs of hers would be counted too
    home = testbed.home(user)

    def counted() -> int:
        words = ["squeue", "--me", "--noheader", "--array", f"--Format={FORMAT}"]
        return gpus_in_flight(testbed.exec(words, user=user).stdout)

    before = counted()
    jobs = []
    for options, gpus in (
        (["--nodes=2", "--gpus-per-node=h200:4"], 8),
        (["--gres=gpu:2"], 2),
        (["--nodes=2", "--gres=gpu:h200:1"], 2),
        (["--gres=gpu"], 1),
        (["--gpus=4", "--nodes=2"], 4),
        (["--ntasks=3", "--gpus-per-task=1"], 3),
        (["--array=0-4", "--gpus-per-node=1"], 5),
        ([], 0),
    ):
        words = [
            "sbatch",
            "--parsable",
            "--hold",
            f"--chdir={home}",
            "-o",
            "/dev/null",
            *options,
            "--wrap",
            "true",
        ]
        jobs.append(testbed.exec(words, user=user).stdout.strip())
        assert counted() == before + gpus, options
        before += gpus
    testbed.exec(["scancel", *jobs], user=user)
