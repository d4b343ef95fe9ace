"""A queued job is what was submitted, whatever becomes of the files that it was made from (C41)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_lab import Run, SlurmLab, unique
from testbed_client import Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(150)]


@pytest.fixture
def blocker(testbed: Testbed) -> Iterator[str]:
    """A job of alice's that waits until it is released, for others to depend on."""
    job = testbed.exec(["sbatch", "--parsable", "--hold", "-o", "/dev/null", "--wrap", "true"]).stdout.strip()
    yield job
    testbed.exec(["scancel", job])


@pytest.mark.contract("C41")
def test_nothing_that_happens_after_submit_changes_the_queued_job(testbed: Testbed, blocker: str) -> None:
    """Lab, git, the site's and the user's configuration, the tuneplane that submitted: edited, then gone."""
    lab = SlurmLab(testbed, experiment=unique("frozen"))
    lab.own_site()
    lab.own_user_config("defaults.yaml", "cluster:\n  environment: {GREETING: as submitted}\n")
    lab.write("common/words.txt", "as committed")
    lab.train_sh(
        'echo "GREETING=$GREETING words=$(cat common/words.txt)"; ls .tuneplane/kernel/tuneplane/report'
    )
    lab.commit()
    venv = lab.base / "venv"
    testbed.exec(["cp", "-a", "--link", str(testbed.shared / "venv"), str(venv)], user="root")
    tp = [str(venv / "bin" / "python"), "-m", "tuneplane.cli.main"]
    submit = [*tp, "submit", lab.experiment, *lab.flags("h200:2"), "--dependency", f"afterany:{blocker}"]
    said = json.loads(lab.sh([*submit, "--json"]).stdout)
    run = Run(lab, said["run_id"], Path(said["folder"]), said["job_id"], said["notices"])
    assert run.status()["state"] == "PENDING"

    edited = "cluster:\n  environment: {GREETING: edited}\n"
    lab.own_user_config("defaults.yaml", edited)
    lab.write("common/words.txt", "edited")
    lab.train_sh("exit 9")
    lab.commit()
    testbed.exec(["rm", "-rf", str(venv)], user="root")
    lab.sh(["rm", "-rf", str(lab.root), str(lab.base)], cwd="/")
    gone = SlurmLab(testbed, experiment="mlp")  # somewhere for `tp job` to stand
    run.lab = gone
    assert not lab.base.exists()

    gone.sh(["scontrol", "release", blocker])
    run.wait("COMPLETED")
    log = run.log()
    assert "GREETING=as submitted words=as committed" in log
    assert "session.py" in log
    assert f"{run.run_id}: as submitted" in run.tp("verify").stdout


@pytest.fixture(scope="module")
def rendered(testbed: Testbed) -> Run:
    """A prepared run, for copies to be tampered with."""
    lab = SlurmLab(testbed, experiment=unique("tampered"))
    lab.train_sh("echo trained")
    lab.commit()
    return lab.render("h200-bare:1")


FLIP = """
import os, sys
path, text = sys.argv[1:]
os.chmod(path, 0o600)
data = bytearray(open(path, "rb").read())
place = data.index(text.encode())
data[place] ^= 1
open(path, "wb").write(data)
"""

TAMPERED = {
    "job.json": '"heartbeat_s"',
    "capsule.tar": "echo trained",
    "job.sbatch": "srun",
    "kernel.pyz": "PK",
    "SHA256SUMS": "kernel.pyz",
}


@pytest.mark.parametrize("name", TAMPERED)
def test_one_changed_byte_of_a_run_is_found_and_named(rendered: Run, name: str) -> None:
    lab = rendered.lab
    copy = lab.base / "copies" / name / rendered.run_id
    lab.sh(["mkdir", "-p", str(copy.parent)])
    lab.sh(["cp", "-a", str(rendered.folder), str(copy)])
    assert "as submitted" in lab.tp("job", "verify", copy)
    lab.sh(["/usr/bin/python3", "-c", FLIP, str(copy / name), TAMPERED[name]])
    said = lab.tp("job", "verify", copy, code=1)
    assert f"{copy}/{name}" in said
    assert "differs from what was submitted" in said


def test_a_run_that_was_tampered_with_does_not_start(testbed: Testbed) -> None:
    lab = SlurmLab(testbed, experiment=unique("tampered"))
    lab.train_sh("echo trained")
    lab.commit()
    run = lab.render("h200-bare:1")
    lab.sh(["/usr/bin/python3", "-c", FLIP, str(run.folder / "job.json"), "tracker.example.org"])
    said = lab.refused("submit", "--run", run.run_id)
    assert f"{run.folder}/job.json" in said
    testbed.wait_job(run.sbatch())
    assert "job.json: FAILED" in run.slurm_output()
    other = lab.render("h200-bare:1")
    lab.sh(["/usr/bin/python3", "-c", FLIP, str(other.folder / "capsule.tar"), "echo trained"])
    lab.tp("submit", "--run", other.run_id)
    status = other.wait("FAILED")
    assert "capsule" in status["reason"]
    assert "trained" not in other.log().splitlines()
