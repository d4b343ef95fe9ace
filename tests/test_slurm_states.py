"""How a run is told to be on a real Slurm: stopped, refused, at once with others, and after Slurm forgot it."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from slurm_lab import Run, SlurmLab, unique
from testbed_client import Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(150)]


def lab_with(testbed: Testbed, train_sh: str, user: str = "alice", experiment: str = "") -> SlurmLab:
    lab = SlurmLab(testbed, user=user, experiment=experiment or unique("state"))
    lab.train_sh(train_sh)
    lab.commit()
    return lab


@pytest.mark.contract("C46")
def test_submit_shows_slurms_estimate_and_follows_to_the_jobs_own_end(testbed: Testbed) -> None:
    lab = lab_with(testbed, "echo from the trainer; exit 4")
    said = lab.tp("submit", lab.experiment, *lab.flags("h200-bare:1"), "--follow", code=3)
    assert re.search(
        r"^estimate +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d on n\d, partition gpu$", said, re.MULTILINE
    ), said
    assert "from the trainer" in said.splitlines()
    assert re.search(r"FAILED.*exit code 4", said)


def processes_of(testbed: Testbed, run: Run) -> list[str]:
    """Argument lists, on all hosts, of processes that have the run's id in them or in their environment."""
    look = """
import os, sys
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        line, environ = (open(f"/proc/{pid}/{name}", "rb").read() for name in ("cmdline", "environ"))
    except OSError:
        continue
    if sys.argv[1].encode() in line + environ and int(pid) != os.getpid():
        print(line.replace(b"\\0", b" ").decode("utf-8", "replace"))
"""
    found = testbed.exec(["/usr/bin/python3", "-I", "-c", look, run.run_id], user="root").stdout.splitlines()
    return [line for line in found if " node-exec " not in line and " exec " not in line.split("--")[0]]


@pytest.mark.contract("C46")
def test_stop_ends_containers_and_all_that_the_trainer_left_behind(testbed: Testbed) -> None:
    lab = lab_with(testbed, "setsid --fork setsid --fork sleep 4242\necho started in $PWD\nsleep 4243")
    run = lab.submit("h200", "--nodes", "2", "--gpus-per-node", "1")
    run.wait_for(lambda: run.log().count("started") == 2, "the trainers did not start")
    assert len([line for line in processes_of(testbed, run) if line.startswith("sleep 4242")]) == 2
    assert f"{run.run_id}: CANCELLED" in run.tp("stop").stdout
    assert run.status()["state"] == "CANCELLED"
    assert testbed.wait_job(run.job_id) == "CANCELLED"
    assert processes_of(testbed, run) == []
    for node in run.status()["nodes"]:
        (work,) = re.findall(r"started in (\S+)", run.log("--node", str(node["rank"])))
        assert testbed.node_exec(node["host"], ["ls", str(Path(work).parent)], check=False).returncode == 2
        assert testbed.node_exec(node["host"], ["ls", str(Path(work).parent.parent)]).returncode == 0
    assert "had ended already: CANCELLED" in run.tp("stop").stdout


@pytest.mark.contract("C46")
def test_stop_of_a_waiting_run_takes_it_from_the_queue(testbed: Testbed) -> None:
    lab = lab_with(testbed, "echo started")
    blocker = testbed.exec(
        ["sbatch", "--parsable", "--hold", "-o", "/dev/null", "--wrap", "true"]
    ).stdout.strip()
    try:
        run = lab.submit("h200-bare:1", "--dependency", f"afterok:{blocker}")
        status = run.status()
        assert (status["state"], status["reason"]) == ("PENDING", "Dependency")
        assert f"{run.run_id}: CANCELLED" in run.tp("stop").stdout
        status = run.status()
        assert (status["state"], status["attempts"]) == ("CANCELLED", 0)
        assert lab.sh(["squeue", "-h", "-n", lab.experiment]).stdout == ""
        assert not (run.folder / "secrets.env").exists()
    finally:
        testbed.exec(["scancel", blocker])


@pytest.mark.contract("C46")
@pytest.mark.parametrize(
    ("flag", "words"),
    [("--partition", "invalid partition specified: nosuch"), ("--account", "Invalid account")],
)
def test_what_sbatch_refuses_is_told_in_its_words_and_marked(testbed: Testbed, flag: str, words: str) -> None:
    lab = lab_with(testbed, "echo started")
    said = lab.tp("submit", lab.experiment, *lab.flags("h200-bare:1"), flag, "nosuch", code=1)
    assert words in said
    (run,) = json.loads(lab.sh(["tp", "job", "ls", "--experiment", lab.experiment, "--json"]).stdout)
    assert run["state"] == "NOT_SUBMITTED"
    assert words in run["reason"]
    assert run["run_id"] in said
    assert lab.sh(["squeue", "-h", "-n", lab.experiment]).stdout == ""


@pytest.mark.contract("C42")
def test_submits_at_once_by_two_users_and_by_one_never_collide(testbed: Testbed) -> None:
    experiment = unique("atonce")
    alice = lab_with(testbed, 'echo "$NRL_RUN_ID of $USER"', experiment=experiment)
    bob = lab_with(testbed, 'echo "$NRL_RUN_ID of $USER"', user="bob", experiment=experiment)
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda lab: lab.submit("h200-bare:1"), [alice, alice, bob]))
    assert len({run.run_id for run in runs}) == 3
    assert len({run.folder for run in runs}) == 3
    for run in runs:
        run.wait("COMPLETED")
        assert f"{run.run_id} of {run.lab.user}" in run.log().splitlines()


@dataclass
class Pool:
    """A storage root that users share, as a site would make it."""

    root: Path
    alice: SlurmLab
    bob: SlurmLab


@pytest.fixture
def pool(testbed: Testbed) -> Pool:
    root = testbed.shared / unique("pool")
    testbed.exec(["mkdir", "-m", "1777", str(root), str(root / "runs")], user="root")
    labs = [lab_with(testbed, "echo started", user=user) for user in ("alice", "bob")]
    for lab in labs:
        lab.own_user_config("defaults.yaml", f"cluster:\n  storage_root: {root}\n")
    return Pool(root, *labs)


def test_nobody_reads_anothers_run_or_squats_a_folder(testbed: Testbed, pool: Pool) -> None:
    run = pool.alice.submit("h200-bare:1")
    run.wait("COMPLETED")
    for path in (run.folder, run.folder.parent, run.folder / "job.json"):
        done = pool.bob.sh(["sh", "-c", 'ls "$1" && cat "$1"', "sh", str(path)], check=False)
        assert "Permission denied" in done.stderr
    other = pool.bob.submit("h200-bare:1")
    assert other.folder.is_relative_to(pool.root / "runs" / "bob")
    other.wait("COMPLETED")
    assert run.run_id not in pool.bob.sh(["tp", "job", "ls", "--json"]).stdout
    refused = pool.bob.sh(["tp", "job", "status", run.run_id], check=False)
    assert (refused.returncode, "no run" in refused.stderr) == (2, True)

    squatted = str(pool.root / "runs" / "carol")
    pool.bob.sh(["mkdir", "-m", "0777", squatted])
    carol = lab_with(testbed, "echo started", user="carol")
    carol.own_user_config("defaults.yaml", f"cluster:\n  storage_root: {pool.root}\n")
    for command in ("validate", "submit"):
        said = carol.tp(command, carol.experiment, *carol.flags("h200-bare:1"), code=2)
        assert f"{squatted}: belongs to user id" in said
    assert pool.bob.sh(["find", squatted]).stdout == f"{squatted}\n"


@pytest.mark.slow
def test_the_walltime_ends_a_run_as_timeout(testbed: Testbed) -> None:
    """A limit of a minute is Slurm's least; it is brought forward here, and looked at twice a minute."""
    lab = lab_with(testbed, "echo started; sleep 600")
    run = lab.submit("h200-bare:1", "--time", "1")
    run.wait_for(lambda: "started" in run.log(), "the trainer did not start")
    lab.sh(["scontrol", "update", f"JobId={run.job_id}", "EndTime=now+1seconds"])
    status = run.wait("TIMEOUT")
    assert status["attempts"] == 1
    assert "TIMEOUT" in lab.tp("job", "status", run.run_id)


@pytest.mark.slow
@pytest.mark.timeout(300)  # others' tests end first
@pytest.mark.contract("C46")
def test_without_accounting_and_after_slurm_forgot_a_run_its_end_is_known(testbed_alone: Testbed) -> None:
    testbed = testbed_alone
    lab = lab_with(testbed, 'exit "$(tr -dc 07 <"$TUNEPLANE_PARAMS_FILE")"')
    before = {code: lab.submit("h200-bare:1", "--set", f"code={code}") for code in (0, 7)}
    for run in before.values():
        testbed.wait_job(run.job_id)
    testbed.accounting(False)
    testbed.set(MinJobAge=2)
    after = {code: lab.submit("h200-bare:1", "--set", f"code={code}") for code in (0, 7)}
    for run in after.values():
        run.wait("COMPLETED", "FAILED")
    assert lab.sh(["sacct", "-j", after[0].job_id], check=False).returncode != 0

    def ends() -> list[tuple[str, str, int]]:
        listed = json.loads(lab.sh(["tp", "job", "ls", "--experiment", lab.experiment, "--json"]).stdout)
        return sorted((run["run_id"], run["state"], run["code"]) for run in listed)

    wanted = [
        (run.run_id, "FAILED" if code else "COMPLETED", code)
        for code, run in (*before.items(), *after.items())
    ]
    assert ends() == sorted(wanted)
    deadline = time.monotonic() + 90
    while any(testbed.job(run.job_id) for run in (*before.values(), *after.values())):
        assert time.monotonic() < deadline, "Slurm did not forget the jobs"
        time.sleep(0.5)
    assert ends() == sorted(wanted)
    status = after[7].status()
    assert (status["state"], status["code"], status["attempts"]) == ("FAILED", 7, 1)
