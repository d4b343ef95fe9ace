"""Who counts as dead, when ranks are told to end, and what of it needs no Slurm to be tried."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_fixture import wait_until

from tuneplane.kernel.files import create_once, write_json
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.node import fence as fences
from tuneplane.node.ending import Ending
from tuneplane.node.fence import PULSES_A_BEAT, Fence
from tuneplane.node.process import catches
from tuneplane.node.pulse import Pulse, Silence
from tuneplane.node.signals import Signals
from tuneplane.node.silence import FENCE_GRACE_S, fenced_after_s, silence_sentence, silent


@pytest.mark.parametrize(
    ("network_s", "storage_s", "dead"),
    [
        (31.0, 0.0, True),  # cut off, and the storage still in sight
        (1.0, 500.0, False),  # its storage stalls, it lives
        (None, 31.0, True),  # the network lets nothing through: files decide
        (None, 29.0, False),
        (None, None, False),  # never seen: it has not started yet
        (29.0, None, False),
    ],
)
def test_the_network_decides_where_it_ever_told(
    network_s: float | None, storage_s: float | None, dead: bool
) -> None:
    assert silent(network_s, storage_s, 30.0) is dead


def test_silence_is_counted_in_the_listeners_own_ticks() -> None:
    """A job that was suspended for an hour finds nobody silent when it goes on."""
    silence = Silence(3.0)
    assert silence.tick(10.0) is None
    silence.hear()
    assert silence.tick(12.0) == 2.0
    assert silence.tick(3612.0) == 5.0
    silence.hear()
    assert silence.tick(3614.0) == 2.0


def test_a_dead_node_ends_its_attempt_within_a_minute_by_the_default_heartbeat() -> None:
    assert fenced_after_s(10.0) < 60


def test_silent_nodes_are_told_in_one_sentence() -> None:
    assert silence_sentence(["n3"], 30.4) == "n3 has been silent for 30 s: it is dead or cut off"
    assert silence_sentence(["n3", "n4"], 31) == "n3, n4 have been silent for 31 s: they are dead or cut off"


@pytest.fixture
def port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_nodes_hear_each_other_and_nobody_else(port: int) -> None:
    """A node of another attempt, which has another key, counts for nothing."""
    head = Pulse(0, [1, 2], "127.0.0.1", port, "key", 0.05)
    peer = Pulse(1, [0], "127.0.0.1", port, "key", 0.05)
    stranger = Pulse(2, [0], "127.0.0.1", port, "another", 0.05)
    for pulse in (peer, stranger, head):  # the first two speak before anybody listens
        pulse.start()
        time.sleep(0.1)
    wait_until(lambda: head.silences_s()[1] is not None, "the head hears its peer")
    wait_until(lambda: peer.silences_s()[0] is not None, "the peer hears its head")
    assert head.silences_s()[2] is None
    assert stranger.silences_s()[0] is None
    assert not peer.told_ending
    head.ending = True
    wait_until(lambda: peer.told_ending, "the peer is told")


def test_a_node_that_ends_by_itself_says_so(port: int) -> None:
    """Its silence from then on is no death, whatever the storage says or does not say."""
    head = Pulse(0, [1], "127.0.0.1", port, "key", 0.05)
    peer = Pulse(1, [0], "127.0.0.1", port, "key", 0.05)
    for pulse in (head, peer):
        pulse.start()
    wait_until(lambda: head.silences_s()[1] is not None, "the head hears its peer")
    peer.say_ended()
    wait_until(lambda: head.ended == {1}, "the head knows")
    head.say_ended()
    wait_until(lambda: peer.ended == {0}, "the peer knows")


def test_a_network_that_loses_most_datagrams_brings_enough(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of five are lost, each way: neither is ever silent for as long as three heartbeats."""
    rng, hear = random.Random(4), Pulse._hear
    monkeypatch.setattr(Pulse, "_hear", lambda p, m: hear(p, m) if rng.random() < 0.4 else None)
    head = Pulse(0, [1], "127.0.0.1", port, "key", 0.02)
    peer = Pulse(1, [0], "127.0.0.1", port, "key", 0.02)
    for pulse in (head, peer):
        pulse.start()
    wait_until(lambda: head.silences_s()[1] is not None, "the head hears its peer")
    wait_until(lambda: peer.silences_s()[0] is not None, "the peer hears its head")
    longest = 0.0
    for _ in range(150):
        time.sleep(0.02)
        longest = max(longest, head.silences_s()[1] or 0.0, peer.silences_s()[0] or 0.0)
    assert longest < 3 * PULSES_A_BEAT * 0.02


def test_a_host_is_reached_where_it_answers_and_not_where_it_does_not() -> None:
    """It refuses the connection, which is an answer; one whose queue is full answers nothing at all."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = listener.getsockname()
        peer = Pulse(1, [0], *address, "key", 0.05)
        assert peer.reach([0], 1.0) == {0}
        listener.listen(0)
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        begun = time.monotonic()
        assert peer.reach([0], 0.3) == set()
        assert time.monotonic() - begun < 1.0
        for one in waiting:
            one.close()


def test_where_no_file_can_be_opened_nobody_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Pulse(1, [0], "127.0.0.1", 9, "key", 0.05)

    def full(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socket", full)
    assert peer.reach([0], 0.3) == set()


def test_garbage_on_the_port_changes_nothing(port: int) -> None:
    head = Pulse(0, [1], "127.0.0.1", port, "key", 0.05)
    head.start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for text in (b"", b"x", b"\xff" * 255, b"0" * 16 + b"tuneplane 1 alive", b"a" * 4000):
            sender.sendto(text, ("127.0.0.1", port))
    peer = Pulse(1, [0], "127.0.0.1", port, "key", 0.05)
    peer.start()
    wait_until(lambda: head.silences_s()[1] is not None, "it still hears")


def told(**values: object) -> Signals:
    signals = Signals()
    for name, value in values.items():
        setattr(signals, name, value)
    return signals


@pytest.mark.parametrize(
    ("signals", "shared", "term", "kill"),
    [
        (told(), True, None, None),
        (told(save=True), True, 60.0, None),  # the marker alone
        (told(told=True), True, 0.0, 20.0),  # Slurm's TERM reached the ranks already
        (told(told=True), False, 10.0, 20.0),  # on this machine: time to save first
        (told(told=True, at_once=True), False, 0.0, 20.0),  # Ctrl-C, tp job stop
        (told(cut="n1 is silent"), True, 0.0, FENCE_GRACE_S),
        (told(save=True, told=True), True, 0.0, 20.0),
    ],
)
def test_when_ranks_are_told_and_made_to_end(
    signals: Signals, shared: bool, term: float | None, kill: float | None
) -> None:
    ending = Ending(60.0, 20.0, shared)
    asks = ending.note(signals, 100.0)
    assert asks == (signals.save or signals.told)
    assert ending.term_at == (None if term is None else 100 + term)
    assert ending.kill_at == (None if kill is None else 100 + kill)
    assert not ending.note(signals, 101.0), "ranks are asked once"
    assert ending.term_at == (None if term is None else 100 + term)


def test_a_later_reason_only_brings_the_end_forward() -> None:
    ending = Ending(60.0, 20.0, shared=False)
    signals = told(save=True)
    ending.note(signals, 0.0)
    signals.told = True
    ending.note(signals, 5.0)
    assert (ending.term_at, ending.kill_at) == (15.0, 25.0)
    ending.told_to_end(15.0)
    assert ending.kill_at == 25.0
    signals.cut = "a newer attempt"
    ending.note(signals, 16.0)
    assert (ending.term_at, ending.kill_at) == (15.0, 25.0)


def test_a_process_that_has_a_handler_is_known_from_one_that_would_die() -> None:
    script = "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: None); print(1, flush=True)"
    script += "; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert catches(process.pid, signal.SIGUSR1)
        assert not catches(process.pid, signal.SIGUSR2)
        process.kill()
    assert not catches(process.pid, signal.SIGUSR1)


def test_a_file_that_is_made_once_is_made_by_one_of_many(tmp_path: Path) -> None:
    target, made = tmp_path / "fence.json", []
    threads = [
        threading.Thread(target=lambda n=n: made.append((n, create_once(target, f"{n}\n"))))
        for n in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [n for n, won in made if won]
    assert len(winners) == 1
    assert target.read_text() == f"{winners[0]}\n"
    assert list(tmp_path.iterdir()) == [target]


Watch = Callable[..., tuple[Fence, Signals]]


@pytest.fixture
def watch(tmp_path: Path, port: int) -> Iterator[Watch]:
    """A fence of one node of attempt 0, with a heartbeat of 0.1 s."""
    run = RunFolder(tmp_path / "ring-20261129-120000-abcd")
    (run.attempts_folder / "0").mkdir(parents=True)
    started: list[Fence] = []

    def make(rank: int, hosts: tuple[str, ...] = ("n1", "n2")) -> tuple[Fence, Signals]:
        start = {"job_id": "7", "hosts": hosts, "address": "127.0.0.1", "port": port, "claim": "key"}
        signals = Signals()
        signals._read, signals._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        fence = Fence(run, run.attempt(0), rank, start, 0.1, signals, {"PATH": "/nowhere"})
        started.append(fence)
        fence.start()
        return fence, signals

    yield make
    for fence in started:
        fence.stop()


def test_heartbeats_that_a_hung_storage_once_told_of_keep_nobody_alive(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its host answers and its datagrams do not come: what counts is the heartbeat, and that is old news."""
    fence, _ = watch(1)
    fence.stop()
    beat = tmp_path / "ring-20261129-120000-abcd/attempts/0/node-0.beat"
    for n in range(2):
        beat.write_text(f"{n}\n")
        fence._look_at_beats()
    monkeypatch.setattr(fence._pulse, "reach", lambda others, within_s: set(others))
    assert fence._answering([0]) == {0}
    time.sleep(0.5)  # the storage's thread hangs
    assert fence._answering([0]) == set()
    beat.write_text("2\n")
    fence._look_at_beats()
    assert fence._answering([0]) == {0}


def test_a_newer_attempt_ends_the_older_one(watch: Watch, tmp_path: Path) -> None:
    _, signals = watch(0, ("n1",))
    (tmp_path / "ring-20261129-120000-abcd/attempts/1").mkdir()
    wait_until(lambda: bool(signals.cut), "it sees the newer attempt")
    assert signals.cut == "attempt 1 of this run has begun"


def test_a_marker_that_somebody_leaves_is_seen(watch: Watch, tmp_path: Path) -> None:
    _, signals = watch(0, ("n1",))
    (tmp_path / "ring-20261129-120000-abcd/attempts/0/stop").touch()
    wait_until(lambda: signals.save, "it sees the marker")
    assert not signals.cut


def test_a_node_that_falls_silent_is_noted_by_node_0(watch: Watch, port: int, tmp_path: Path) -> None:
    fence, signals = watch(0)
    peer = Pulse(1, [0], "127.0.0.1", port, "key", 0.02)
    peer.start()
    time.sleep(0.3)
    assert not signals.cut
    peer._message = lambda: b""  # type: ignore[method-assign]  # what it says is understood no more
    wait_until(lambda: bool(signals.cut), "node 0 notices")
    assert "n2 has been silent" in signals.cut
    assert fence.declare()
    noted = json.loads((tmp_path / "ring-20261129-120000-abcd/attempts/0/fence.json").read_text())
    assert (noted["by"], [node["host"] for node in noted["nodes"]]) == (0, ["n2"])
    assert not fence.declare(), "it is noted once"


@pytest.mark.slow
def test_a_node_that_ended_by_itself_is_not_missed(watch: Watch, port: int, tmp_path: Path) -> None:
    fence, signals = watch(0)
    peer = Pulse(1, [0], "127.0.0.1", port, "key", 0.02)
    peer.start()
    time.sleep(0.3)
    record = tmp_path / "ring-20261129-120000-abcd/attempts/0/node-1.json"
    record.write_text(json.dumps({"state": "ended", "code": 0}))
    peer._message = lambda: b""  # type: ignore[method-assign]
    time.sleep(1.0)
    assert not signals.cut
    assert not fence.declare()


def test_a_node_that_fenced_itself_is_missed_whatever_it_wrote(
    watch: Watch, port: int, tmp_path: Path
) -> None:
    _, signals = watch(0)
    peer = Pulse(1, [0], "127.0.0.1", port, "key", 0.02)
    peer.start()
    time.sleep(0.3)
    record = tmp_path / "ring-20261129-120000-abcd/attempts/0/node-1.json"
    record.write_text(json.dumps({"state": "ended", "code": 143, "fenced": True}))
    peer._message = lambda: b""  # type: ignore[method-assign]
    wait_until(lambda: bool(signals.cut), "node 0 notices")


@pytest.mark.slow
def test_where_the_network_lets_nothing_through_the_heartbeat_files_tell(
    watch: Watch, tmp_path: Path
) -> None:
    beat = tmp_path / "ring-20261129-120000-abcd/attempts/0/node-0.beat"
    _, signals = watch(1)
    for n in range(10):
        beat.write_text(f"{n}\n")
        time.sleep(0.1)
    assert not signals.cut
    wait_until(lambda: bool(signals.cut), "the file stands still")
    assert "n1 has been silent" in signals.cut


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
