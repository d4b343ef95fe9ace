"""When a node ends its own ranks, on one machine: nodes that are silent, and a storage that gives no answer."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tuneplane.kernel.files import write_json
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.node import fence as fences
from tuneplane.node.fence import FENCE_GRACE_S, Fence, fenced_after_s
from tuneplane.node.signals import Signals

BEAT_S = 0.05


def make_fence(folder: Path, nodes: int) -> Fence:
    """Node 0's, of an attempt of so many nodes, each of which was alive a moment ago."""
    run = RunFolder(folder)
    attempt = run.attempt(0)
    attempt.path.mkdir(parents=True)
    for rank in range(1, nodes):
        attempt.node_beat(rank).write_text("1\n")
    start = {"job_id": "1", "hosts": [f"n{n}" for n in range(nodes)], "address": "127.0.0.1", "port": 9}
    return Fence(run, attempt, 0, start, BEAT_S, Signals(), os.environ)


def wait_for_verdict(fence: Fence, deadline_s: float) -> float:
    """Seconds until the fence cut its node off."""
    begun = time.monotonic()
    while not fence._signals.cut:
        assert time.monotonic() - begun < deadline_s, "no verdict"
        time.sleep(0.01)
    return time.monotonic() - begun


@pytest.mark.timeout(30)
def test_a_storage_that_stalls_holds_a_verdict_up_once_and_not_for_every_silent_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others start the run again once this node must have fenced itself: it has no time for each of them."""
    monkeypatch.setattr(fences, "ANSWER_S", 0.5)
    fence = make_fence(tmp_path, nodes=17)
    monkeypatch.setattr(fence, "_has_ended", lambda other: time.sleep(3600))
    fence.start()
    try:
        assert wait_for_verdict(fence, 20) < 3
        assert len(fence.dead) == 16
    finally:
        fence.stop()


@pytest.mark.timeout(30)
def test_nodes_that_ended_by_themselves_are_not_taken_for_dead(tmp_path: Path) -> None:
    fence = make_fence(tmp_path, nodes=4)
    for rank in (1, 3):
        write_json(
            RunFolder(tmp_path).attempt(0).node_record(rank), {"rank": rank, "state": "ended", "code": 0}
        )
    fence.start()
    try:
        wait_for_verdict(fence, 20)
        assert list(fence.dead) == [2]
    finally:
        fence.stop()


def test_a_node_is_given_the_time_that_its_own_verdict_may_take() -> None:
    worst_s = 3 * 10.0 + fences.ANSWER_S + FENCE_GRACE_S
    assert fenced_after_s(10.0) >= worst_s + 2
