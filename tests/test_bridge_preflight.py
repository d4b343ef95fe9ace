"""The check before training names the node that does not come, stops answering or is slow, and else lets train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_runs import rank_run, run_nodes, start_nodes
from run_fixture import Run, runs_below

from tuneplane.bridge.preflight import Place, absent, judge, pairs, read_place, slow_node
from tuneplane.diagnose.gather import gather
from tuneplane.diagnose.verdict import diagnose

pytestmark = pytest.mark.timeout(150)

TRAINS = """\
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
print("trained", dist.get_rank(), int(x.item()), flush=True)
"""

CHECKS = """\
import os, signal, time
import tuneplane.bridge.preflight as preflight
import torch
torch.set_num_threads(1)
pid, last = os.getpid(), os.environ["RANK"] == "1"
measure = preflight._Check._measure
def stops(check):
    os.kill(pid, signal.SIGSTOP)
def is_slow(check):
    if os.fork() == 0:
        while os.getppid() == pid:
            for number, for_s in ((signal.SIGSTOP, 0.2), (signal.SIGCONT, 0.002)):
                os.kill(pid, number)
                time.sleep(for_s)
        os._exit(0)
    return measure(check)
"""
"""A program that checks by itself, as the bridge does, with a last rank that can be made to misbehave."""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    with runs_below(tmp_path) as make_one:
        yield make_one


@pytest.mark.slow
def test_ranks_that_are_well_train_afterwards_in_the_same_processes(make: Callable[..., Run]) -> None:
    run = rank_run(make, TRAINS, nodes=2, preflight=True)
    assert run_nodes(run) == [0, 0]
    log = run.log(0) + run.log(1)
    told = [line for line in log.splitlines() if "tuneplane: preflight: " in line]
    assert len(told) == 1
    assert told[0].startswith("[rank0]: tuneplane: preflight: 4 ranks on 2 nodes met after ")
    assert "between n1 and n2" in told[0]
    assert all(f"[rank{rank}]: trained {rank} 4\n" in log for rank in range(4))
    assert [run.record(node)["preflight"]["ok"] for node in (0, 1)] == [True, True]
    assert run.record(0)["preflight"]["told"] in told[0]


def ended(run: Run) -> dict[str, Any]:
    """The end record of a run that was refused; nothing of it is left."""
    run.end(code=1)
    end = run.end_of()
    assert end["for_good"] is True
    assert run.processes() == []
    return end


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_with_its_node(make: Callable[..., Run]) -> None:
    program = CHECKS + "if last: time.sleep(600)\npreflight.run_preflight(meet_s=4, answer_s=4)\n"
    run = rank_run(make, program, nodes=2, ranks=1)
    agents = start_nodes(run)
    assert run.finish(agents[0]).returncode == 1
    agents[1].terminate()  # as Slurm does, once a node has ended
    run.finish(agents[1])
    said = "rank 1 on n2 (node 1) did not come within 4 s"
    assert ended(run)["reason"] == f"preflight: {said}"
    assert run.log(0).count(f"tuneplane: preflight: {said}") == 1
    first = diagnose(gather(run.folder))[0]
    assert (first.cause, first.node) == ("preflight-failed", 1)
    assert said in first.sentence
    assert "--exclude n2" in first.remedy


@pytest.mark.slow
def test_a_rank_that_stops_answering_is_named_though_all_others_wait_as_it_does(
    make: Callable[..., Run],
) -> None:
    run = rank_run(
        make,
        CHECKS + "if last: preflight._Check._measure = stops\npreflight.run_preflight(answer_s=4)\n",
        nodes=2,
        ranks=1,
    )
    agents = start_nodes(run)
    assert run.finish(agents[0], 90).returncode == 1
    agents[1].terminate()  # as Slurm does, once a node has ended
    run.finish(agents[1])
    assert ended(run)["reason"] == "preflight: rank 1 on n2 (node 1) stopped answering within 4 s"


@pytest.mark.slow
def test_a_rank_that_computes_slowly_is_named(make: Callable[..., Run]) -> None:
    run = rank_run(
        make,
        CHECKS + "if last: preflight._Check._measure = is_slow\npreflight.run_preflight()\n",
        nodes=2,
        ranks=1,
    )
    assert run_nodes(run) == [1, 1]
    assert "preflight: rank 1 on n2 (node 1) computes " in ended(run)["reason"]


FOUR = Place(0, 8, 0, 2, 0, 4, ("n1", "n2", "n3", "n4"), (0, 0, 1, 1, 2, 2, 3, 3))


def reports(links: dict[str, float] | None = None, **changed: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"compute_s": 0.1, "reduce_s": 0.01, "links": {}} for _ in range(8)]
    found[0]["links"] = {"0-1": 0.1, "2-3": 0.1, "1-2": 0.1, "3-0": 0.1, **(links or {})}
    for rank, values in changed.items():
        found[int(rank[1:])] = values
    return found


def test_the_node_whose_links_are_all_slow_is_named_and_not_its_neighbours() -> None:
    verdict = judge(FOUR, reports({"1-2": 1.0, "2-3": 0.9}), 1.0)
    assert (verdict.ok, verdict.node) == (False, 2)
    assert verdict.told == "the links of n3 (node 2) are 9 times slower than the median"
    assert slow_node({(0, 1): 1.0}, 2) is None  # of two, either may be it


def test_one_slow_link_of_a_node_and_small_differences_are_no_fault() -> None:
    assert judge(FOUR, reports({"1-2": 1.0}), 1.0).ok
    assert judge(
        FOUR, [{**r, "compute_s": 0.001 * (1 + 9 * (i == 3))} for i, r in enumerate(reports())], 1.0
    ).ok


def test_ranks_that_answer_and_reach_nobody_are_told_with_their_error() -> None:
    broken = {"error": "RuntimeError: connection refused", "stage": "connecting"}
    waits = {"error": "", "stage": "all-reduce"}
    verdict = judge(FOUR, reports(r5=broken, r1=waits), 1.0)
    assert verdict.told == "rank 5 of 8 on n3 failed while connecting: RuntimeError: connection refused"
    assert verdict.node == 2
    verdict = judge(FOUR, reports(r0=waits, r7=waits), 1.0)
    assert (verdict.ok, verdict.node) == (False, None)
    assert verdict.told == "ranks 0, 7 of 8 on n1, n4 failed while all-reduce did not end in time"


def test_a_whole_node_is_told_as_one_also_where_nodes_differ_in_ranks() -> None:
    uneven = Place(0, 4, 0, 3, 0, 2, ("n1", "n2"), (0, 0, 0, 1))
    assert uneven.leaders() == [0, 3]
    assert absent(uneven, [3], "did not come", 5).told == "rank 3 on n2 (node 1) did not come within 5 s"
    assert (
        absent(FOUR, [2, 3], "did not come", 5).told == "all its ranks on n2 (node 1) did not come within 5 s"
    )
    assert absent(FOUR, [2, 5], "did not come", 5).node is None


def test_each_node_is_in_two_exchanges_of_a_ring() -> None:
    for nodes in range(3, 9):
        found = pairs(nodes)
        assert all(sum(node in pair for pair in found) == 2 for node in range(nodes))
    assert pairs(2) == [(0, 1)]
    assert pairs(1) == []


def test_a_process_that_torchrun_did_not_start_checks_nothing() -> None:
    assert read_place({}) is None
    assert read_place({"RANK": "x"}) is None
