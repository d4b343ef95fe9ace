"""How an attempt ended: the culprit's code, not its victims', and when its secrets go."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_fixture import Run, runs_below

from tuneplane.node.outcome import NO_RECORD, Outcome, judge


def node(rank: int, code: int | None, at: float = 0.0, told: bool = False) -> dict[str, Any]:
    reason = f"the command ended with exit code {code}"
    if code is None:
        return {"rank": rank, "host": f"n{rank + 1}", "state": "running"}
    return {
        "rank": rank,
        "host": f"n{rank + 1}",
        "state": "ended",
        "code": code,
        "reason": reason,
        "told_to_stop": told,
        "ended_at": at,
    }


Verdict = tuple[int, "int | None", bool, bool]
"""Code, rank of the node that failed first, stop requested, ended for good."""


def verdict(nodes: list[dict[str, Any]], srun_code: int, marked: bool = False) -> Verdict:
    found: Outcome = judge(nodes, srun_code, marked)
    return found.code, found.node["rank"] if found.node else None, found.stop_requested, found.for_good


def victim(rank: int, at: float) -> dict[str, Any]:
    return {**node(rank, 1, at), "failure": {"rank": rank, "victim": True}}


CASES: dict[str, tuple[list[dict[str, Any]], int, Verdict]] = {
    "all is well": ([node(0, 0), node(1, 0)], 0, (0, None, False, True)),
    "one failed, the other was ended by srun": (
        [node(0, 137, 11, told=True), node(1, 1, 10)],
        137,
        (1, 1, False, True),
    ),
    "the victim's clock is ahead": ([node(0, 143, 5, told=True), node(1, 3, 10)], 143, (3, 1, False, True)),
    "two failed by themselves": ([node(0, 2, 12), node(1, 1, 11)], 2, (1, 1, False, True)),
    "killed by the kernel, the other hit an error of its network": (
        [node(0, 1, 12), node(1, 137, 11)],
        137,
        (137, 1, False, True),
    ),
    "ranks only lost the culprit's, which failed later by another clock": (
        [victim(0, 5), node(1, 1, 12)],
        1,
        (1, 1, False, True),
    ),
    "ranks lost those of a node that is gone": ([victim(0, 5), node(1, None)], 137, (137, 1, False, False)),
    "ranks lost each other": ([victim(0, 6), victim(1, 5)], 1, (1, 1, False, True)),
    "stopped from outside": ([node(0, 143, 2, True), node(1, 143, 1, True)], 143, (143, 1, True, False)),
    "saved and ended when told": ([node(0, 0, 1, True), node(1, 0, 1, True)], 0, (0, None, True, False)),
    "an agent was killed, the others were ended": (
        [node(0, 143, 3, True), node(1, None)],
        137,
        (137, 1, False, False),
    ),
    "a node is gone, another failed by itself": ([node(0, 1, 3), node(1, None)], 137, (1, 0, False, True)),
    "no record could be written, and srun knows of no failure": ([node(0, None)], 0, (0, None, False, True)),
    "no agent ever started": ([], 1, (1, None, False, False)),
    "srun failed, no node did": ([node(0, 0), node(1, 0)], 9, (9, None, False, False)),
    "a broken time": ([{**node(0, 4), "ended_at": None}, node(1, 5, 3)], 5, (4, 0, False, True)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_failing_nodes_code_wins(case: str) -> None:
    nodes, srun_code, expected = CASES[case]
    assert verdict(nodes, srun_code) == expected
    assert verdict(nodes[::-1], srun_code) == expected


def test_an_exit_0_after_the_stop_marker_is_not_the_end_of_the_run() -> None:
    assert verdict([node(0, 0)], 0, marked=True) == (0, None, True, False)
    assert verdict([node(0, 1)], 1, marked=True) == (1, 0, True, True)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with runs_below(tmp_path) as make:
        made = make("exit 3", nodes=2)
        made.claimed()
        yield made


def write(run: Run, *nodes: dict[str, Any], attempt: int = 0) -> None:
    for record in nodes:
        run.attempt(attempt).node_record(record["rank"]).write_text(json.dumps(record))


def test_the_batch_script_reads_one_number(run: Run) -> None:
    write(run, node(0, 143, 9, True), node(1, 3, 8))
    done = run.end(code=143)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")
    end = run.end_of()
    assert end.pop("ended_at") > 0
    assert end == {
        "code": 3,
        "srun_code": 143,
        "first_failing_node": "n2",
        "first_failing_rank": 1,
        "reason": "the command ended with exit code 3",
        "stop_requested": False,
        "for_good": True,
        "cause": "",
        "to_be_continued": False,
        "not_restarted": "",
    }


def test_a_node_without_a_word_is_named(run: Run) -> None:
    write(run, node(0, 143, 9, True), node(1, None))
    assert run.end(code=137).stdout == "137\n"
    assert (run.end_of()["first_failing_node"], run.end_of()["reason"]) == ("n2", NO_RECORD)


def test_an_attempt_of_which_nothing_started_has_a_reason(run: Run) -> None:
    assert run.end(code=1).stdout == "1\n"
    assert (run.end_of()["first_failing_node"], run.end_of()["reason"]) == (os.uname().nodename, NO_RECORD)


def test_a_node_whose_agent_never_began_is_named_and_not_its_victim(run: Run) -> None:
    """Node 1 has no Python or no storage: srun ends with 127 and node 0 is told to stop."""
    start = run.attempt().start
    start.write_text(json.dumps({**json.loads(start.read_text()), "hosts": ["n1", "n2"]}))
    write(run, node(0, 143, 9, True))
    assert run.end(code=127).stdout == "127\n"
    end = run.end_of()
    assert (end["first_failing_node"], end["first_failing_rank"], end["reason"]) == ("n2", 1, NO_RECORD)


@pytest.mark.contract("C11")
@pytest.mark.parametrize(
    ("records", "code", "kept"),
    [
        ([node(0, 0), node(1, 0)], 0, False),
        ([node(0, 1), node(1, 143, 1, True)], 1, False),
        ([node(0, 143, 0, True), node(1, 143, 0, True)], 143, True),
        ([node(0, 0, 0, True), node(1, 0, 0, True)], 0, True),
        ([node(0, None), node(1, None)], 137, True),
    ],
)
def test_secrets_go_when_the_run_has_ended_for_good(
    run: Run, records: list[dict[str, Any]], code: int, kept: bool
) -> None:
    write(run, *records)
    run.end(code=code)
    assert run.folder.secrets.exists() is kept


def test_an_old_attempt_that_ends_late_takes_no_secrets_from_its_successor(run: Run) -> None:
    """Its node was cut off, Slurm started the run elsewhere, and the old one succeeds after all."""
    run.attempt().start.write_text("{}")
    then = 1_000_000_000
    os.utime(run.attempt().start, (then, then))
    assert run.claimed(job_id=2) == 1
    write(run, node(0, 0), node(1, 0))
    assert run.end(attempt=0).stdout == "0\n"
    assert run.folder.secrets.exists()
    write(run, node(0, 0), node(1, 0), attempt=1)
    run.end(attempt=1)
    assert not run.folder.secrets.exists()


def test_broken_records_are_passed_over(run: Run) -> None:
    run.attempt().node_record(0).write_text("{")
    run.attempt().node_record(7).write_text("[]")
    write(run, node(1, 5))
    assert run.end(code=5).stdout == "5\n"


def test_an_attempt_folder_that_is_gone_changes_no_code(run: Run) -> None:
    done = run.end(attempt=9, code=4)
    assert (done.returncode, done.stdout) == (0, "4\n")
    assert done.stderr == f"tuneplane: {run.attempt(9).end} not written: No such file or directory\n"
