"""`tp doctor` on a real Slurm: a one-minute job tells what only a node knows, and leaves nothing behind."""

from __future__ import annotations

import json
from typing import Any

import pytest
from slurm_lab import SlurmLab, unique
from testbed_client import Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(180)]


@pytest.fixture
def lab(testbed: Testbed) -> SlurmLab:
    return SlurmLab(testbed, experiment=unique("doctor"))


def doctor(lab: SlurmLab, *words: str, code: int = 0) -> dict[str, dict[str, Any]]:
    done = lab.sh(["tp", "doctor", *words, "--json"], check=False, timeout=150)
    assert done.returncode == code, done.stdout + done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)}


def left_behind(lab: SlurmLab) -> str:
    root = lab.bed.home(lab.user) / "tuneplane"
    return lab.sh(["sh", "-c", 'ls -d "$1/doctor" 2>/dev/null; true', "sh", str(root)]).stdout


def test_a_profile_that_works_is_well_on_the_login_host_and_on_a_node(lab: SlurmLab) -> None:
    checks = doctor(lab, "--profile", "h200", "--deep", "--image", str(lab.bed.image))
    assert [name for name, check in checks.items() if check["level"] == "fail"] == []
    assert "sees" in checks["storage on node"]["said"]
    assert "apptainer version" in checks["runtime on node"]["said"]
    assert checks["image on node"]["said"] == "it starts there"
    assert checks["interpreter on node"]["said"].startswith("/usr/bin/python3, 3.")
    assert checks["clocks"]["level"] == "ok"
    assert "yours: research" in checks["account"]["said"]
    assert "QOS debug: 00:30:00 for a job" in checks["limits"]["said"]
    assert "to start at" in checks["job of 2 nodes × 8 GPUs"]["said"]
    assert left_behind(lab) == ""
    assert lab.sh(["squeue", "--me", "-h", "-n", "tp-doctor"]).stdout == ""


@pytest.mark.contract("J")
def test_a_storage_root_that_nodes_do_not_see_fails(lab: SlurmLab) -> None:
    lab.own_user_config("defaults.yaml", "cluster:\n  shared: []\n  storage_root: /tmp/only-here-of-alice\n")
    checks = doctor(lab, "--profile", "h200-bare", "--deep", code=1)
    assert "left no report in /tmp/only-here-of-alice" in checks["storage on node"]["said"]
    assert "choose another `storage_root`" in checks["storage on node"]["remedy"]


def test_an_interpreter_that_nodes_do_not_have_fails(lab: SlurmLab) -> None:
    lab.own_user_config("defaults.yaml", "cluster:\n  python: /opt/python-3.13/bin/python3\n")
    checks = doctor(lab, "--profile", "h200-bare", "--deep", code=1)
    assert checks["interpreter"]["level"] == "warn"
    assert "cannot be run on n" in checks["interpreter on node"]["said"]


def test_modules_on_nodes_that_have_none_fail(lab: SlurmLab) -> None:
    lab.own_user_config("defaults.yaml", "cluster:\n  slurm:\n    modules: [cuda/13]\n")
    checks = doctor(lab, "--profile", "h200-bare", "--deep", code=1)
    assert checks["modules on node"]["said"] == "the login profile there sets up no modules"
    assert "module avail" in checks["modules on node"]["remedy"]


def test_an_account_and_a_partition_that_are_not_the_users_fail_with_slurms_words(lab: SlurmLab) -> None:
    lab.own_user_config("defaults.yaml", "cluster:\n  slurm:\n    account: physics\n    qos: urgent\n")
    checks = doctor(lab, "--profile", "h200-bare", code=1)
    assert "the profile says physics; yours: research" in checks["account"]["said"]
    assert "set slurm.account to one of research" in checks["account"]["remedy"]
    assert checks["QOS"]["level"] == "fail"
    assert "Invalid" in checks["job of 1 node × 8 GPUs"]["said"]


def test_a_job_that_does_not_start_in_time_is_cancelled_and_only_a_warning(testbed_alone: Testbed) -> None:
    lab = SlurmLab(testbed_alone, experiment=unique("doctor"))
    argv = ["sbatch", "--parsable", "--nodes=4", "--exclusive", "--wrap", "sleep 600"]
    job = testbed_alone.exec(argv, user="bob").stdout.strip()
    for _ in range(100):
        if testbed_alone.job(job).get("JobState") == "RUNNING":
            break
    checks = doctor(lab, "--profile", "h200-bare", "--deep", "--wait", "5")
    assert checks["node job"]["level"] == "warn"
    assert "did not start within 5 s" in checks["node job"]["said"]
    assert lab.sh(["squeue", "--me", "-h", "-n", "tp-doctor"]).stdout == ""
    assert left_behind(lab) == ""


def test_a_site_without_accounting_is_well(testbed_alone: Testbed) -> None:
    testbed_alone.accounting(on=False)
    lab = SlurmLab(testbed_alone, experiment=unique("doctor"))
    checks = doctor(lab, "--profile", "h200-bare", "--deep")
    assert "keeps no accounts" in checks["accounting"]["said"]
    assert checks["storage on node"]["level"] == "ok"
