"""What killed agents left is removed as an attempt ends; what cannot be said on a full disk fails nothing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_fixture import PYTHON, Run, runs_below

from tuneplane.node.clear import killed
from tuneplane.node.scratch import Scratch, make_user_folder
from tuneplane.spec import read


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with runs_below(tmp_path) as make:
        yield make("true")


def test_an_agent_that_began_and_left_no_exit_record_was_killed() -> None:
    nodes = [
        {"rank": 0, "host": "n1", "pid": 7, "code": 1},
        {"rank": 1, "host": "n2", "pid": 7, "state": "running"},
        {"rank": 2, "host": "n3"},  # it never began, so there is nothing of it
    ]
    assert killed(nodes) == ["n2"]


def test_standard_error_on_a_full_disk_is_no_reason_to_fail(run: Run) -> None:
    argv = [PYTHON, "-I", "-S", str(run.folder.kernel), "clear", str(run.path)]
    base = make_user_folder(read(run.folder.job))
    left = Scratch(base / "20200101-000000-01234567.0.0")
    for full in (False, True):
        left.path.mkdir()
        left.lock.write_text(os.uname().nodename)
        with Path("/dev/full" if full else "/dev/null").open("w") as sink:
            done = subprocess.run(argv, env=run.environment(), stderr=sink, timeout=30, check=False)
        assert done.returncode == 0
        assert not left.path.exists()


@pytest.mark.parametrize("words", [["clear"], ["clear", "/x", "y"]])
def test_clear_takes_a_run_and_nothing_else(run: Run, words: list[str]) -> None:
    argv = [PYTHON, "-I", "-S", str(run.folder.kernel), *words]
    assert subprocess.run(argv, stderr=subprocess.DEVNULL, timeout=30, check=False).returncode == 2
