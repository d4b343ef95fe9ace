"""Metrics that a trainer writes by itself, into outputs that are declared: TensorBoard events and JSON lines."""

from __future__ import annotations

import json
import math
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from report_job import RUN_ID, TOKEN_SHA256
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_ndarray
from test_collect_points import header, point, write

from tuneplane.collect import beneath
from tuneplane.collect.metrics import Metrics, metrics_of
from tuneplane.collect.source import Declared, RunSource
from tuneplane.collect.store import Store

EVENTS = Declared("tensorboard", "tb/**", "tensorboard")
LINES = Declared("log", "metrics.jsonl", "jsonl", "step")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "ingest").mkdir(parents=True)
    (tmp_path / "run" / "out").mkdir()
    return tmp_path / "run"


class Follower:
    """Looks at one run again and again."""

    def __init__(
        self, run: Path, *outputs: Declared, attempts: tuple[tuple[int, float], ...] = ((0, 0.0),)
    ) -> None:
        self.source = RunSource(run, RUN_ID, TOKEN_SHA256, outputs, attempts)
        self.store = Store(memory=True)

    def look(self) -> Metrics:
        ledger = self.store._ledgers.get(RUN_ID)
        if ledger:  # two seconds later
            ledger.reader._found_at = -math.inf
        self.store.refresh([self.source])
        return metrics_of(self.store, RUN_ID)


def look(run: Path, *outputs: Declared, **more: Any) -> Metrics:
    return Follower(run, *outputs, **more).look()


def steps(metrics: Metrics, name: str) -> list[float]:
    return list(metrics.series[name].steps)


def event_writer(folder: Path) -> EventFileWriter:
    return EventFileWriter(str(folder))


def scalar(tag: str, value: float, step: int, wall_time: float = 1000.0) -> Event:
    return Event(
        wall_time=wall_time, step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)])
    )


def events_file(folder: Path) -> Path:
    return next(folder.glob("events.out.tfevents.*"))


@pytest.mark.contract("C21")
def test_tensorboard_files_hold_what_the_real_package_reads_in_them(run: Path) -> None:
    folder = run / "out" / "tb" / "run one"
    writer = event_writer(folder)
    values = [0.1, 3.0, -0.0, 1e-42, 3.4e38, math.inf, -math.inf, math.nan, 2.5]
    for step, value in enumerate(values):
        writer.add_event(scalar("train/loss", value, step * 1000, 1700000000.25 + step))
        writer.add_event(Event(wall_time=1700000000.5 + step, step=step, summary=scalar_pb("acc", value)))
    big = Summary(value=[Summary.Value(tag=f"many/{i}", simple_value=i) for i in range(300)])
    writer.add_event(Event(wall_time=1.0, step=2**40, summary=big))
    writer.add_event(Event(wall_time=1.0, step=-5, summary=scalar("neg", 1.0, 0).summary))
    note = Summary.Value(tag="note", tensor=TensorProto(dtype=7, string_val=[b"text"]))
    image = Summary.Value(
        tag="image", image=Summary.Image(height=9, width=9, encoded_image_string=bytes(9 << 20))
    )
    writer.add_event(Event(wall_time=2.0, step=1, summary=Summary(value=[note, image])))
    writer.add_event(scalar("after", 1.0, 7))
    writer.close()
    real = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    metrics = look(run, EVENTS)
    assert (metrics.torn_lines, dict(metrics.unreadable)) == (0, {})
    tags = {*real.Tags()["scalars"], *(tag for tag in real.Tags()["tensors"] if tag != "note")}
    assert set(metrics.series) == tags and len(tags) == 304
    for tag in real.Tags()["scalars"]:
        line, expected = metrics.series[tag], real.Scalars(tag)
        assert list(line.steps) == [e.step for e in expected]
        assert list(map(repr, line.values)) == [repr(e.value) for e in expected]
        assert list(line.times_s) == [e.wall_time for e in expected]
    acc = [(e.step, repr(float(make_ndarray(e.tensor_proto)))) for e in real.Tensors("acc")]
    line = metrics.series["acc"]
    assert list(zip(line.steps, map(repr, line.values), strict=True)) == acc


TENSORS = {
    "float": TensorProto(dtype=1, float_val=[1.5]),
    "content": TensorProto(dtype=1, tensor_content=struct.pack("<f", 1.5)),
    "double": TensorProto(dtype=2, double_val=[1.5]),
    "double content": TensorProto(dtype=2, tensor_content=struct.pack("<d", 1.5)),
    "half": TensorProto(dtype=19, half_val=[0x3E00]),
    "bfloat16": TensorProto(dtype=14, half_val=[0x3FC0]),
    "bfloat16 content": TensorProto(dtype=14, tensor_content=b"\xc0\x3f"),
}


def test_tensors_of_one_number_are_scalars(run: Path) -> None:
    writer = event_writer(run / "out" / "tb")
    values = [Summary.Value(tag=tag, tensor=tensor) for tag, tensor in TENSORS.items()]
    values.append(Summary.Value(tag="int", tensor=TensorProto(dtype=3, int_val=[-3])))
    values.append(Summary.Value(tag="int64", tensor=TensorProto(dtype=9, int64_val=[-3])))
    values.append(Summary.Value(tag="two", tensor=TensorProto(dtype=1, float_val=[1, 2])))
    values.append(Summary.Value(tag="none", tensor=TensorProto(dtype=1)))
    writer.add_event(Event(wall_time=1.0, step=1, summary=Summary(value=values)))
    writer.close()
    series = look(run, EVENTS).series
    assert {name: line.values[0] for name, line in series.items()} == {
        **dict.fromkeys(TENSORS, 1.5),
        "int": -3.0,
        "int64": -3.0,
    }


def test_a_torn_event_waits_for_its_end(run: Path) -> None:
    source = run / "elsewhere"
    writer = event_writer(source)
    for step in range(20):
        writer.add_event(scalar("loss", step, step))
    writer.close()
    data = events_file(source).read_bytes()
    target = run / "out" / "tb" / "events.out.tfevents.1"
    target.parent.mkdir()
    target.write_bytes(b"")
    follower = Follower(run, EVENTS)
    seen: list[int] = []
    for end in range(0, len(data) + 7, 7):
        with target.open("ab") as file:
            file.write(data[end : end + 7])
        metrics = follower.look()
        assert not metrics.unreadable
        seen.append(len(metrics.series["loss"]) if "loss" in metrics.series else 0)
    assert seen == sorted(seen) and len(set(seen)) == 21


def test_a_damaged_event_file_tells_where_and_hides_no_other(run: Path) -> None:
    for name in ("a", "b"):
        writer = event_writer(run / "out" / "tb" / name)
        for step in range(20):
            writer.add_event(scalar(f"{name}/loss", step, step))
        writer.close()
    path = events_file(run / "out" / "tb" / "a")
    data = bytearray(path.read_bytes())
    whole = bytes(data)
    data[500:540] = bytes(40)
    path.write_bytes(data)
    follower = Follower(run, EVENTS)
    metrics = follower.look()
    assert len(metrics.series["b/loss"]) == 20 and 5 < len(metrics.series["a/loss"]) < 15
    (why,) = metrics.unreadable.values()
    assert why.startswith("it is damaged at byte ") and why.endswith(": what follows is not read")
    with path.open("r+b") as file:  # as a client's cache that gets it late
        file.write(whole)
    metrics = follower.look()
    assert not metrics.unreadable and steps(metrics, "a/loss")[-10:] == list(range(10, 20))


def test_bytes_that_are_no_events_do_no_harm(run: Path) -> None:
    (run / "out" / "tb").mkdir()
    for index, data in enumerate((b"", b"x", os.urandom(5000), bytes(5000), b"\xff" * 64, b"text\n" * 100)):
        (run / "out" / "tb" / f"{index}").write_bytes(data)
    writer = event_writer(run / "out" / "tb")
    writer.add_event(scalar("loss", 1.0, 1))
    writer.close()
    assert steps(look(run, EVENTS), "loss") == [1]


@pytest.mark.contract("C21")
def test_json_lines_are_read_by_their_step_key(run: Path) -> None:
    path = run / "out" / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "data": {"actor/loss": 0.5, "deep": {"er": NaN}}, "note": "x", "ok": true, "none": null}\n'
        '{"data": {"actor/loss": 9}}\n'
        "not json\n[1]\n\n"
        '{"step": "two", "data": {"actor/loss": 9}}\n'
        '{"step": NaN, "data": {"actor/loss": 9}}\n'
        '{"step": 2, "data": {"actor/loss": -Infinity, "huge": 1%s}}\n{"step": 3, "da' % ("0" * 400)
    )
    follower = Follower(run, LINES)
    metrics = follower.look()
    assert sorted(metrics.series) == ["data/actor/loss", "data/deep/er"]
    assert list(metrics.series["data/actor/loss"].values) == [0.5, -math.inf]
    assert math.isnan(metrics.series["data/deep/er"].values[0]) and metrics.torn_lines == 5
    with path.open("a") as file:
        file.write('ta": {"actor/loss": 1}}\n')
    assert steps(follower.look(), "data/actor/loss") == [1, 2, 3]


def test_a_step_key_may_be_nested(run: Path) -> None:
    (run / "out" / "metrics.jsonl").write_text('{"trainer": {"step": 4}, "loss": 1}\n')
    metrics = look(run, Declared("log", "metrics.jsonl", "jsonl", "trainer/step"))
    assert steps(metrics, "loss") == [4] and sorted(metrics.series) == ["loss"]


def test_points_belong_to_the_attempt_that_ran_then(run: Path) -> None:
    attempts = ((0, 1000.0), (1, 2000.0), (3, 3000.0))
    writer = event_writer(run / "out" / "tb")
    for step, at in ((0, 900.0), (5, 1500.0), (6, 1999.0), (5, 2000.0), (6, 2500.0), (6, 9999.0)):
        writer.add_event(scalar("loss", at, step, at))
    writer.close()
    loss = look(run, EVENTS, attempts=attempts).series["loss"]
    assert list(loss.steps) == [0, 5, 6] and list(loss.attempts) == [0, 1, 3]
    assert {attempt: list(p.steps) for attempt, p in loss.hidden.items()} == {0: [5, 6], 1: [6]}
    path = run / "out" / "metrics.jsonl"
    follower = Follower(run, LINES, attempts=attempts)
    for at in (1500.0, 2500.0):
        with path.open("a") as file:
            file.write('{"step": 1, "lr": 1}\n{"step": 2, "lr": 2}\n')
        os.utime(path, (at, at))
        metrics = follower.look()
    assert list(metrics.series["lr"].attempts) == [1, 1] and list(metrics.series["lr"].hidden) == [0]


def test_what_two_say_by_one_name_stays_tellable(run: Path) -> None:
    write(run, header(), point(0, value=1.0), point(1, name="only sdk"))
    (run / "out" / "metrics.jsonl").write_text('{"step": 5, "loss": 2, "only log": 2}\n')
    for name, value in (("train", 3.0), ("validation", 4.0)):
        writer = event_writer(run / "out" / "tb" / name)
        writer.add_event(scalar("loss", value, 9))
        writer.add_event(scalar(f"only {name}", value, 9))
        writer.close()
    series = look(run, LINES, EVENTS).series
    assert {name: line.values[0] for name, line in series.items()} == {
        "loss": 1.0,
        "log/loss": 2.0,
        "tb/train/loss": 3.0,
        "tb/validation/loss": 4.0,
        "only sdk": 1.0,
        "only log": 2.0,
        "only train": 3.0,
        "only validation": 4.0,
    }


def test_a_trainer_that_names_a_folder_anew_at_each_restart_has_one_line(run: Path) -> None:
    for attempt, folder in enumerate(("Nov30_n1", "Dec01_n2")):
        writer = event_writer(run / "out" / "tb" / folder)
        for step in range(attempt * 3, 6):
            writer.add_event(scalar("loss", attempt, step, 100.0 + attempt * 100))
        writer.close()
    loss = look(run, EVENTS, attempts=((0, 100.0), (1, 200.0))).series["loss"]
    assert list(loss.steps) == list(range(6)) and list(loss.attempts) == [0, 0, 0, 1, 1, 1]


@pytest.mark.contract("C13")
def test_no_declared_path_leads_out_of_the_output_folder(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "metrics.jsonl").write_text('{"step": 1, "secret": 1}\n')
    out = run / "out"
    (out / "metrics.jsonl").symlink_to(secret / "metrics.jsonl")
    (out / "folder").symlink_to(secret)
    (out / "loop").symlink_to(out)
    (out / "real").mkdir()
    (out / "real" / "metrics.jsonl").write_text('{"step": 1, "mine": 1}\n')
    (out / "real" / "up").symlink_to("..")
    patterns = ["metrics.jsonl", "folder/metrics.jsonl", "**/*.jsonl", "*/metrics.jsonl", "../secret/*", "/etc/*",
                "real/../../../secret/metrics.jsonl", "loop/loop/real/*"]  # fmt: skip
    metrics = look(run, *(Declared(f"o{i}", p, "jsonl", "step") for i, p in enumerate(patterns)))
    assert sorted(metrics.series) == ["mine"] and len(metrics.series["mine"]) == 1
    assert metrics.skipped["out/metrics.jsonl"] == metrics.skipped["out/folder"] == "a link"
    assert metrics.skipped["out/../secret/*"] == "not below the output folder"
    (run / "out").rename(run / "real-out")
    (run / "out").symlink_to("real-out")
    metrics = look(run, LINES)
    assert not metrics.series and metrics.skipped == {"out/metrics.jsonl": "a link, or no folder"}


def test_a_file_that_becomes_a_link_after_it_was_found_is_not_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text('{"step": 1, "secret": 1}\n{"step": 2, "secret": 1}\n')
    (run / "out" / "a").mkdir()
    path = run / "out" / "a" / "metrics.jsonl"
    path.write_text('{"step": 1, "mine": 1}\n')
    follower = Follower(run, Declared("log", "a/metrics.jsonl", "jsonl", "step"))
    follower.look()
    path.unlink()
    path.symlink_to(tmp_path / "secret.jsonl")
    assert sorted(follower.look().series) == ["mine"]
    (run / "out" / "a").rename(run / "out" / "b")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "metrics.jsonl").write_text('{"step": 3, "secret": 1}\n' * 9)
    (run / "out" / "a").symlink_to(tmp_path / "secret")
    assert sorted(follower.look().series) == ["mine"]


def test_what_is_no_file_is_skipped_and_named(run: Path) -> None:
    out = run / "out"
    (out / "folder.jsonl").mkdir()
    os.mkfifo(out / "fifo.jsonl")
    (out / "good.jsonl").write_text('{"step": 1, "loss": 1}\n')
    with (out / "huge.jsonl").open("wb") as file:
        file.truncate(2 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"step": 2, "huge": 1}\n')
    started = time.monotonic()
    metrics = look(run, Declared("log", "*.jsonl", "jsonl", "step"))
    assert time.monotonic() - started < 10
    assert sorted(metrics.series) == ["huge", "loss"] and metrics.torn_lines == 1
    assert metrics.skipped == {"out/fifo.jsonl": "a FIFO", "out/folder.jsonl": "a folder"}


def test_of_a_million_tiny_files_some_are_read_and_the_rest_is_told(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beneath, "MAX_ENTRIES", 300)
    monkeypatch.setattr(beneath, "MAX_FILES", 200)
    (run / "out" / "many").mkdir()
    for index in range(400):
        (run / "out" / "many" / f"{index}.jsonl").write_text(f'{{"step": {index}, "loss": 1}}\n')
        write(run, header(), point(0, step=index, name="sdk"), name=f"{index}.jsonl")
        (run / "ingest" / f"{index}.txt").write_text("")
    metrics = look(run, Declared("log", "many/*", "jsonl", "step"))
    assert len(metrics.series["loss"]) == 200 and 50 < len(metrics.series["sdk"]) <= 200
    assert metrics.skipped["out/log: the rest"] == "only the first 201 entries are looked at"
    assert "ingest: the rest" in metrics.skipped and len(metrics.skipped) < 30


def test_deep_folders_and_many_stars_end(run: Path) -> None:
    folder = run / "out"
    for _ in range(60):
        folder = folder / "d"
        folder.mkdir()
    (run / "out" / "d" / "d" / "x.jsonl").write_text('{"step": 1, "loss": 1}\n')
    started = time.monotonic()
    metrics = look(run, Declared("log", "**/**/**/*.jsonl", "jsonl", "step"))
    assert steps(metrics, "loss") == [1] and time.monotonic() - started < 10


def test_declared_files_are_read_on_by_the_next_process(run: Path, tmp_path: Path) -> None:
    writer = event_writer(run / "out" / "tb")
    path = run / "out" / "metrics.jsonl"
    for step in range(3):
        writer.add_event(scalar("loss", 1.0, step))
        writer.flush()
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "lr": 1}) + "\n")
        with Store(tmp_path / "cache") as store:
            store.refresh([RunSource(run, RUN_ID, TOKEN_SHA256, (EVENTS, LINES), ((0, 0.0),))])
            metrics = metrics_of(store, RUN_ID)
            assert store.new_points(RUN_ID) == 2
        assert steps(metrics, "loss") == steps(metrics, "lr") == list(range(step + 1))
    writer.close()


def test_folders_that_a_pattern_walks_through_are_no_trouble(run: Path) -> None:
    out = run / "out"
    for name in ("tb/train/deep/a.jsonl", "tb/b.jsonl"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("")
    (out / "tb" / "link").symlink_to(out)
    for pattern in ("tb/**", "tb/**/*", "tb/**/*.jsonl"):
        found = beneath.find_files(out, pattern)
        assert found.files == ["tb/b.jsonl", "tb/train/deep/a.jsonl"], pattern
        assert set(found.skipped) == ({"tb/link"} if "jsonl" not in pattern else set()), pattern
    assert set(beneath.find_files(out, "tb/*").skipped) == {"tb/train", "tb/link"}, "here a file is expected"
