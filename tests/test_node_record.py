"""What a node leaves about itself: a regular heartbeat and an exit record, whatever the storage does meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_fixture import PYTHON, Run, runs_below, small_file_system, wait_until

from tuneplane.kernel.runfolder import AttemptFolder
from tuneplane.node.record import NodeRecord, read_record

MakeRun = Callable[..., Run]
MIB = 1 << 20


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRun]:
    with runs_below(tmp_path) as make_one:
        yield make_one


@pytest.fixture
def make_on_disk(tmp_path: Path) -> Iterator[MakeRun]:
    """Makes runs whose storage is a small file system of its own."""
    with (
        small_file_system(tmp_path / "disk", tmp_path / "storage", 24 * MIB),
        runs_below(tmp_path) as make_one,
    ):
        yield make_one


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptFolder:
    folder = tmp_path / "attempts" / "0"
    folder.mkdir(parents=True)
    return AttemptFolder(folder)


def beats_of(path: Path, for_s: float) -> list[float]:
    """When the file was touched, seconds of the storage's clock, as seen during a while."""
    seen: dict[float, None] = {}
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        if path.exists():
            seen[path.stat().st_mtime] = None
        time.sleep(0.01)
    return list(seen)


@pytest.mark.slow
def test_a_heartbeat_is_written_in_place_and_regular(make: MakeRun) -> None:
    run = make("echo training; sleep 1000", heartbeat_s=0.25)
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    beat = run.attempt().node_beat(0)
    inode = beat.stat().st_ino
    beats = beats_of(beat, 3)
    assert 10 <= len(beats) <= 14
    assert beat.stat().st_ino == inode
    assert abs(float(beat.read_text()) - beats[-1]) < 0.5
    agent.send_signal(signal.SIGTERM)
    run.finish(agent)
    assert beats_of(beat, 0.6) == [beat.stat().st_mtime]  # none after the end


@pytest.mark.slow
def test_slow_writes_do_not_shift_the_beat(attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    at: list[float] = []

    def slow(self: NodeRecord) -> None:
        at.append(time.monotonic())
        time.sleep(0.15)

    monkeypatch.setattr(NodeRecord, "_write_beat", slow)
    record = NodeRecord(attempt, 0, 0.2)
    record.start()
    wait_until(lambda: len(at) >= 11, "eleven beats")
    record.end(0, "", False, 0.0)
    assert 1.9 < at[10] - at[0] < 2.6  # ten intervals, not ten intervals and ten writes


@pytest.mark.slow
def test_a_stalled_storage_delays_no_signal_and_the_record_follows(
    make_on_disk: MakeRun, tmp_path: Path
) -> None:
    # One that prints nothing meanwhile: its own output would wait for the storage.
    trainer = (
        "import pathlib, signal, sys, time\n"
        "def told(*_): pathlib.Path(sys.argv[1]).touch(); sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, told)\n"
        "print('training', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    run = make_on_disk(f"exec {PYTHON} experiments/ring/t.py {tmp_path}/told", files={"t.py": trainer})
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    wait_until(lambda: run.record().get("state") == "running", "it is recorded as running")
    storage = str(tmp_path / "storage")
    thaw = subprocess.Popen(["sh", "-c", 'sleep 4; fsfreeze -u "$1"', "sh", storage])
    subprocess.run(["fsfreeze", "-f", storage], check=True)
    time.sleep(0.5)  # the heartbeat hangs by now
    began = time.monotonic()
    agent.send_signal(signal.SIGTERM)
    wait_until((tmp_path / "told").exists, "the trainer was told while the storage stalls")
    assert time.monotonic() - began < 2
    assert thaw.poll() is None
    assert run.finish(agent).returncode == 7
    assert thaw.wait() == 0
    record = run.record()
    assert (record["state"], record["code"], record["told_to_stop"]) == ("ended", 7, True)


@pytest.mark.slow
def test_the_heartbeat_goes_on_after_a_stall(make_on_disk: MakeRun, tmp_path: Path) -> None:
    run = make_on_disk("echo training; sleep 1000", heartbeat_s=0.25)
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    storage = str(tmp_path / "storage")
    subprocess.run(["fsfreeze", "-f", storage], check=True)
    time.sleep(2)
    subprocess.run(["fsfreeze", "-u", storage], check=True)
    time.sleep(0.5)
    beats = beats_of(run.attempt().node_beat(0), 2)
    assert 6 <= len(beats) <= 10  # as often as before: none made up for, none left out
    agent.send_signal(signal.SIGTERM)
    assert run.finish(agent).returncode == 143


def fill(folder: Path) -> Path:
    """Take all the room that is left, to the last block."""
    path = folder / "fill"
    with path.open("wb", buffering=0) as file:
        for size_bytes in (MIB, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size_bytes)
            except OSError:
                continue
    return path


@pytest.mark.slow
def test_the_exit_record_is_written_on_a_full_disk_too(make_on_disk: MakeRun, tmp_path: Path) -> None:
    run = make_on_disk(f"echo training; until [ -e {tmp_path}/full ]; do sleep 0.05; done; exit 9")
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    wait_until(lambda: run.record().get("state") == "running", "it is recorded as running")
    filled = fill(tmp_path / "storage")
    (tmp_path / "full").touch()
    done = run.finish(agent)
    assert (done.returncode, done.stderr) == (9, "")
    record = run.record()
    assert (record["state"], record["code"]) == ("ended", 9)
    ended = run.end(code=9)
    assert ended.stdout == "9\n"  # the batch script leaves with it, though nothing can be written
    assert ended.stderr == f"tuneplane: {run.attempt().end} not written: No space left on device\n"
    filled.unlink()
    assert run.end(code=9).stdout == "9\n"
    assert run.end_of()["code"] == 9


@pytest.mark.slow
def test_an_exit_record_that_finds_no_room_at_first_is_tried_for_a_while(
    attempt: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuneplane.node import record as module

    real, full = module.write_json, threading.Event()
    full.set()

    def write(path: Path, value: Any, mode: int = 0o644) -> None:
        if full.is_set():
            raise OSError(28, "No space left on device", str(path))
        real(path, value, mode)

    monkeypatch.setattr(module, "write_json", write)
    record = NodeRecord(attempt, 3, 10.0, host="n4")
    record.start()
    threading.Timer(1.5, full.clear).start()
    assert record.end(1, "the command ended with exit code 1", False, 5.0)
    written = read_record(attempt.node_record(3))
    assert {k: written[k] for k in ("rank", "host", "state", "code", "ended_at")} == {
        "rank": 3,
        "host": "n4",
        "state": "ended",
        "code": 1,
        "ended_at": 5.0,
    }


def test_a_record_written_over_itself_is_sound_json_of_any_length(attempt: AttemptFolder) -> None:
    path = attempt.node_record(0)
    for former, reason in [("x" * 2000, "short"), ("x", "y" * 1500), ("x" * 100, "实验 \udcff")]:
        path.write_text(json.dumps({"former": former}))
        record = NodeRecord(attempt, 0, 10.0)
        assert record._write_in_place({"reason": reason, "code": 1})
        read = json.loads(path.read_bytes().decode("utf-8", "surrogateescape"))
        assert read == {"reason": reason, "code": 1}
    assert not record._write_in_place({"reason": "z" * 10_000})  # more than its blocks hold
    assert json.loads(path.read_bytes().decode("utf-8", "surrogateescape"))["code"] == 1


def test_an_attempt_whose_folder_is_gone_holds_nobody(attempt: AttemptFolder) -> None:
    record = NodeRecord(attempt, 0, 10.0)
    record.start()
    wait_until(attempt.node_record(0).exists, "the first record")
    for path in attempt.path.iterdir():
        path.unlink()
    attempt.path.rmdir()
    began = time.monotonic()
    assert record.end(1, "", False, 0.0) is False
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_a_record_that_is_none_is_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r.json").write_bytes(content)
    assert read_record(tmp_path / "r.json") == {}
    assert read_record(tmp_path / "none") == {}


def test_nobody_sees_half_a_record(make: MakeRun) -> None:
    run = make("for n in 1 2 3; do sleep 0.05; done")
    agent = run.start_node(run.claimed())
    states = []
    while agent.poll() is None:
        if os.path.exists(run.attempt().node_record(0)):  # noqa: PTH110
            states.append(run.record()["state"])
    run.finish(agent)
    assert run.record()["state"] == "ended"
    order = ["starting", "running", "ending", "ended"]
    assert states == sorted(states, key=order.index)
