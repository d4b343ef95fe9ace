"""What is left of runs on their nodes is seen: without this the check of other modules would prove nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from node_leftovers import left_by, left_now, marks_of
from slurm_lab import WAIT_FOR_GO, Run, SlurmLab, unique
from testbed_client import Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def run(testbed: Testbed) -> Iterator[Run]:
    """A run in a container that waits for `release`."""
    lab = SlurmLab(testbed, experiment=unique("leaves"))
    lab.train_sh(f"echo begun\n{WAIT_FOR_GO}")
    lab.commit()
    run = lab.submit("h200:1", "--nodelist", "n2")
    run.wait("RUNNING")
    run.wait_for(lambda: "begun" in run.log(), "it did not begin")
    yield run
    run.tp("stop", check=False)


def test_a_run_in_a_container_is_seen_whole_while_it_runs(testbed: Testbed, run: Run) -> None:
    seen = "\n".join(sorted(left_now(testbed, [run])))
    scratch = marks_of(run)[1]
    assert all(line.startswith(f"n2: {run.run_id}: ") for line in seen.splitlines()), seen
    for part in ("kernel.pyz node", "Apptainer runtime parent", "squashfuse_ll", "train.sh"):
        assert part in seen
    assert f"file: /tmp/tuneplane-64101/{scratch}.0.0" in seen
    assert left_by(testbed, [run]) == []  # it may be there
    run.release()
    run.wait("COMPLETED")
    assert left_by(testbed, [run]) == []


@pytest.mark.parametrize("what", ["process", "mount", "file"])
def test_what_a_run_that_has_ended_left_is_told(testbed: Testbed, run: Run, what: str) -> None:
    run.wait("COMPLETED")
    folder = f"/tmp/tuneplane-64101/{marks_of(run)[1]}.0.0"
    make, remove = {
        "process": (
            f"NRL_RUN_ID={run.run_id} setsid sleep 3141592 >/dev/null 2>&1 &",
            "pkill -f '[s]leep 3141592'",
        ),
        "mount": (f"mount -t tmpfs {folder} /mnt", "umount /mnt"),
        "file": (f"mkdir -p {folder}", f"rmdir {folder}"),
    }[what]
    user = "root" if what == "mount" else "alice"
    testbed.node_exec("n3", ["sh", "-c", make], user=user)
    try:
        told = left_by(testbed, [run], settles_s=0.5)
    finally:
        testbed.node_exec("n3", ["sh", "-c", remove], user=user)
    assert told, "it was not seen"
    assert all(line.startswith("n3: ") for line in told)
    assert any(f"{run.run_id}: {what}" in line for line in told)
    assert left_by(testbed, [run]) == []
