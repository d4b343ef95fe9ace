"""Looking at a run on two nodes, in containers, while it runs and until one node fails (C46)."""

from __future__ import annotations

import fcntl
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from conftest import hold
from slurm_lab import WAIT_FOR_GO, Run, SlurmLab, unique
from testbed_client import Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(150)]

ENVIRONMENT = "python3 -c 'import json, os; print(\"ENVIRONMENT \" + json.dumps(dict(os.environ)))'"

PAIR = f"""
echo "first line of rank $TUNEPLANE_MACHINE_RANK"
{ENVIRONMENT}
{WAIT_FOR_GO}
echo "last line of rank $TUNEPLANE_MACHINE_RANK"
[ "$TUNEPLANE_MACHINE_RANK" = 0 ] || exit 5
sleep 600
"""


@pytest.fixture(scope="module")
def running(testbed: Testbed) -> Iterator[Run]:
    """A run on two nodes, in containers, that goes on until it is released; then node 1 fails with 5."""
    with hold(fcntl.LOCK_SH):
        lab = SlurmLab(testbed, experiment=unique("running"))
        lab.train_sh(PAIR)
        lab.commit()
        run = lab.submit("h200", "--nodes", "2", "--gpus-per-node", "1", env={"HF_TOKEN": "hf_of_the_pair"})
        run.wait_for(lambda: run.log().count("ENVIRONMENT {") == 2, "the pair did not start")
        yield run
        run.tp("stop", check=False)


@dataclass
class Ended:
    run: Run
    followed: str  # what `tp job logs -f` in another terminal showed
    code: int  # and left with
    took_s: float  # from the failure of one node to the end of the run


@pytest.fixture(scope="module")
def ended(running: Run) -> Ended:
    """The same run, released, with another terminal following it."""
    with ThreadPoolExecutor() as pool:
        follow = ["tp", "job", "logs", running.run_id, "-f"]
        follower = pool.submit(running.lab.sh, follow, check=False, timeout=60)
        time.sleep(1)
        running.release()
        released_at = time.monotonic()
        running.wait("FAILED")
        took_s = time.monotonic() - released_at
        done = follower.result()
    return Ended(running, done.stdout, done.returncode, took_s)


@pytest.mark.contract("C46")
def test_a_run_is_found_by_experiment_prefix_slurm_id_and_folder(running: Run) -> None:
    lab = running.lab
    for text in (running.run_id[:-3], running.job_id, lab.experiment, str(running.folder)):
        said = json.loads(lab.sh(["tp", "job", "status", text, "--json"]).stdout)
        assert (said["run_id"], said["state"]) == (running.run_id, "RUNNING")
    listed = json.loads(lab.sh(["tp", "job", "ls", "--experiment", lab.experiment, "--json"]).stdout)
    assert [(r["run_id"], r["job_id"], r["state"]) for r in listed] == [
        (running.run_id, running.job_id, "RUNNING")
    ]
    table = lab.tp("job", "ls", "--experiment", lab.experiment)
    assert re.search(rf"^{running.run_id} +RUNNING +{running.job_id} ", table, re.MULTILINE), table


@pytest.mark.contract("C46")
def test_status_shows_each_node_with_its_sign_of_life(running: Run) -> None:
    nodes = running.status()["nodes"]
    assert [node["rank"] for node in nodes] == [0, 1]
    assert len({node["host"] for node in nodes}) == 2
    assert all(node["state"] == "running" and node["beat_age_s"] < 20 for node in nodes)
    assert "ago" in running.tp("status").stdout


@pytest.mark.contract("C46")
def test_a_shell_in_the_container_has_the_jobs_environment(running: Run) -> None:
    (line,) = [line for line in running.log("--node", "1").splitlines() if line.startswith("ENVIRONMENT ")]
    trainer = json.loads(line.replace("ENVIRONMENT ", "", 1))
    shell = ["--node", "1", "--", "bash", "-c", f"pwd; ls -d /.singularity.d; {ENVIRONMENT}"]
    pwd, container, inside = running.tp("shell", *shell).stdout.splitlines()
    assert pwd == trainer["TUNEPLANE_WORK_DIR"]
    assert container == "/.singularity.d"
    values = json.loads(inside.replace("ENVIRONMENT ", "", 1))
    assert values["HF_TOKEN"] == "hf_of_the_pair"
    for name in set(trainer) - {"_", "SHLVL", "HF_TOKEN", "TUNEPLANE_JOB_TOKEN"}:  # tokens are masked in logs
        assert values.get(name) == trainer[name], name
    assert set(values) - set(trainer) <= {"TERM", "OLDPWD"}
    host = running.status()["nodes"][0]["host"]
    for node in ("0", host):
        assert running.tp("shell", "--node", node, "hostname").stdout.strip() == host
    assert running.tp("shell", "--", "bash", "-c", "exit 7", check=False).returncode == 7


@pytest.mark.contract("C46")
def test_logs_of_one_node_by_number_and_by_host(running: Run) -> None:
    second = running.status()["nodes"][1]["host"]
    for node in ("1", second):
        lines = running.log("--node", node).splitlines()
        assert "first line of rank 1" in lines
        assert "first line of rank 0" not in lines
    done = running.tp("logs", "--node", "n9", check=False)
    assert done.returncode == 2
    assert f"1 ({second})" in done.stderr


@pytest.mark.contract("C46")
def test_another_terminal_follows_a_run_to_its_end(ended: Ended) -> None:
    lines = ended.followed.splitlines()
    for rank in (0, 1):
        host = ended.run.status()["nodes"][rank]["host"]
        assert lines.count(f"{host} | first line of rank {rank}") == 1
        assert lines.count(f"{host} | last line of rank {rank}") == 1
    assert ended.code == 3


@pytest.mark.contract("C46")
def test_the_first_failing_nodes_code_is_the_runs(ended: Ended) -> None:
    """Node 0, which was ended because of it, has another code."""
    status = ended.run.status()
    first, second = status["nodes"]
    assert (status["state"], status["code"]) == ("FAILED", 5)
    assert second["code"] == 5
    assert first["code"] not in (0, 5)
    assert second["host"] in status["reason"]
    assert ended.took_s < 20
    assert ended.run.lab.bed.job(ended.run.job_id)["ExitCode"] == "5:0"


def test_a_shell_of_an_ended_run_is_refused(ended: Ended) -> None:
    done = ended.run.tp("shell", "--", "true", check=False)
    assert done.returncode == 2
    assert "is FAILED, so there is nothing to enter" in done.stderr
