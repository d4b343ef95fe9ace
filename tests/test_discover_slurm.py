"""A profile that nobody wrote, on a real Slurm: it is proved, and a submit with it works unedited."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_lab import URL, SlurmLab, unique
from testbed_client import Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(180)]


@pytest.fixture
def lab(testbed: Testbed) -> Iterator[SlurmLab]:
    """A lab of a user on a site without any configuration."""
    made = SlurmLab(testbed, experiment=unique("found"))
    made.env["XDG_CONFIG_HOME"] = str(made.base / "user-config")
    made.env["TUNEPLANE_CONFIG_DIR"] = str(made.base / "no-site")
    made.sh(["mkdir", str(made.base / "no-site")])
    made.train_sh('echo "ran on $(uname -n) with $CUDA_VISIBLE_DEVICES"')
    made.commit()
    yield made


def profile(lab: SlurmLab) -> Path:
    return lab.base / "user-config" / "tuneplane" / "cluster" / "found.yaml"


def test_what_discover_writes_is_taken_by_slurm_and_a_submit_with_it_runs_unedited(lab: SlurmLab) -> None:
    said = lab.tp("cluster", "discover", "found")
    assert f"profile found in {profile(lab)}" in said
    text = lab.sh(["cat", str(profile(lab))]).stdout
    assert "gpus_per_node: 8 # scontrol show node n1: Gres" in text
    checked = lab.tp("cluster", "check", "found")
    assert checked.count("ok ") == 3
    assert "using 128 processors" in checked
    words = ["--profile", "found:16", "--observability-url", URL, "--image", str(lab.bed.image)]
    run = lab.submit_words(*words)
    assert run.wait("COMPLETED")["code"] == 0
    assert (
        sorted(line.rpartition("with ")[2] for line in run.log().splitlines() if "ran on" in line)
        == ["0,1,2,3,4,5,6,7"] * 2
    )


def test_discover_prints_without_writing_and_writes_only_once(lab: SlurmLab) -> None:
    printed = lab.sh(["tp", "cluster", "discover", "found", "--partition", "preempt", "--print"]).stdout
    assert "partition: preempt # --partition" in printed
    assert "jobs of other partitions may preempt those of this one" in printed
    assert lab.sh(["ls", str(profile(lab))], check=False).returncode != 0
    lab.tp("cluster", "discover", "found")
    assert "is there already" in lab.tp("cluster", "discover", "found", code=2)


def test_a_profile_that_slurm_would_not_take_fails_the_check_with_slurms_words(lab: SlurmLab) -> None:
    lab.tp("cluster", "discover", "found")
    lab.sh(["sed", "-i", "s/partition: gpu/partition: h100/", str(profile(lab))])
    said = lab.tp("cluster", "check", "found", code=1)
    assert "FAIL" in said
    assert "invalid partition" in said
    found = json.loads(lab.sh(["tp", "cluster", "check", "found", "--json"], check=False).stdout)
    assert [result["ok"] for result in found] == [False] * 3


def test_nothing_is_queued_by_a_check(lab: SlurmLab) -> None:
    lab.tp("cluster", "discover", "found")
    queued = ["squeue", "--me", "--noheader", "--format=%Z"]  # other tests have jobs of their own, elsewhere
    lab.tp("cluster", "check", "found")
    assert str(lab.base) not in lab.sh(queued).stdout
    assert "check" not in lab.sh(["squeue", "--me", "--noheader", "--format=%j"]).stdout
    state = lab.bed.home(lab.user) / ".local" / "state" / "tuneplane"
    assert "check-" not in lab.sh(["ls", str(state)]).stdout
