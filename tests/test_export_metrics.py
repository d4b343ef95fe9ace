"""`tp job export-metrics`: whole or not at all, nothing of others replaced, read back by the programs meant."""

from __future__ import annotations

import csv
import json
import math
import os
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from metric_runs import BEGAN_S, MetricRun
from test_metrics_command import HOSTILE, READ

from tuneplane.cli.job import job_command
from tuneplane.export.events import EventFile, crc32c, masked
from tuneplane.kernel.errors import OperationError, UsageError

pytestmark = pytest.mark.timeout(100)

Tp = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MetricRun:
    """Two attempts, the second from step 40 on; values that are no numbers; a step that is no whole one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("TUNEPLANE_STORE_DIR", str(tmp_path / "store"))
    run = MetricRun(tmp_path)
    run.attempt(0, 1)
    run.attempt(1, 0)
    run.log((s, {"train/loss": 1 / (s + 1)}) for s in range(60))
    run.log(((s, {"train/loss": 2.0}) for s in range(40, 100)), attempt=1)
    odd = [(0, math.nan), (1, math.inf), (2, -math.inf), (2.5, 1e300), (2**40, -1e-300), (-7, 0.1)]
    run.log(((s, {"odd": v}) for s, v in odd), attempt=1)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return run


@pytest.fixture
def tp() -> Tp:
    def call(*words: str) -> Result:
        return CliRunner().invoke(job_command, ["export-metrics", *words], standalone_mode=False)

    return call


def scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """What TensorBoard itself reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {
        tag: [(e.step, e.value, e.wall_time) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]
    }


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def float32(value: float) -> float:
    if math.isfinite(value) and abs(value) > 3.5e38:
        return math.copysign(math.inf, value)
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


def test_csv_holds_every_point_of_the_merged_line_in_full(run: MetricRun, tp: Tp) -> None:
    done = tp(run.run_id, "--format", "csv")
    assert done.exception is None, done.exception
    assert done.stdout == f"106 points of 2 metrics: {run.run_id}.csv\n"
    rows = table(Path(f"{run.run_id}.csv"))
    assert [row["value"] for row in rows[:6]] == ["0.1", "nan", "inf", "-inf", "1e+300", "-1e-300"]
    assert [row["step"] for row in rows[:6]] == ["-7", "0", "1", "2", "2.5", str(2**40)]
    losses = [(int(r["step"]), float(r["value"]), r["attempt"]) for r in rows if r["metric"] == "train/loss"]
    assert losses == [(s, 1 / (s + 1), "0") if s < 40 else (s, 2.0, "1") for s in range(100)]
    assert float(rows[6]["time"]) == BEGAN_S


def test_all_attempts_are_told_apart(run: MetricRun, tp: Tp) -> None:
    tp(run.run_id, "loss", "--format", "jsonl", "--attempts", "all")
    lines = Path(f"{run.run_id}.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON")) for line in lines]
    assert len(rows) == 120
    assert [r["step"] for r in rows if r["hidden"]] == list(range(40, 60))
    assert [(r["attempt"], r["step"]) for r in rows] == [
        *((0, s) for s in range(60)),
        *((1, s) for s in range(40, 100)),
    ]


def test_json_lines_are_json_whatever_the_value(run: MetricRun, tp: Tp) -> None:
    out = tp(run.run_id, "odd", "--format", "jsonl", "--out", "-").stdout
    rows = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert [row["value"] for row in rows] == [0.1, "NaN", "Infinity", "-Infinity", 1e300, -1e-300]
    assert math.isnan(float(rows[1]["value"])) and float(rows[3]["value"]) == -math.inf


def test_tensorboard_itself_reads_the_same_scalars_and_times(run: MetricRun, tp: Tp) -> None:
    assert tp(run.run_id, "--format", "tensorboard", "--out", "tb").exception is None
    found = scalars(Path("tb"))
    assert sorted(found) == ["odd", "train/loss"]
    expected = [
        (s, 1 / (s + 1), BEGAN_S + s) if s < 40 else (s, 2.0, BEGAN_S + 1000 + s - 40) for s in range(100)
    ]
    assert found["train/loss"] == [(s, float32(v), t) for s, v, t in expected]
    odd = [(-7, 0.1), (0, math.nan), (1, math.inf), (2, -math.inf), (2, 1e300), (2**40, -1e-300)]
    for (step, value, _), (wanted_step, wanted) in zip(found["odd"], odd, strict=True):
        assert step == wanted_step and same(value, float32(wanted))


def test_tensorboard_has_a_folder_for_each_attempt_where_asked(run: MetricRun, tp: Tp) -> None:
    tp(run.run_id, "loss", "--format", "tensorboard", "--attempts", "all")
    root = Path(f"{run.run_id}-tensorboard")
    assert sorted(path.name for path in root.iterdir()) == ["attempt-0", "attempt-1"]
    assert [s for s, _, _ in scalars(root / "attempt-0")["train/loss"]] == list(range(60))
    assert [s for s, _, _ in scalars(root / "attempt-1")["train/loss"]] == list(range(40, 100))


@given(
    tag=st.text(max_size=200),
    points=st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.floats(width=32), st.floats(0, 1e10)), max_size=20
    ),
)
def test_any_tag_and_points_are_what_tensorboard_s_own_parser_finds(
    tag: str, points: list[tuple[int, float, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    from tensorboard.compat.proto.event_pb2 import Event

    path = tmp_path_factory.mktemp("events") / "events.out.tfevents.1"
    with path.open("wb") as file:
        assert EventFile(file, 5.0).add(tag, ((float(s), v, t) for s, v, t in points)) == len(points)
    first, *events = [Event.FromString(record) for record in records(path.read_bytes())]
    assert (first.file_version, first.wall_time) == ("brain.Event:2", 5.0)
    name = tag.encode("utf-8", "backslashreplace").decode()
    for event, (step, value, time_s) in zip(events, points, strict=True):
        (scalar,) = event.summary.value
        assert scalar.tag == name and same(scalar.simple_value, value) and event.wall_time == time_s
        assert event.step == max(-(2**63), min(2**63 - 1, round(float(step))))


def records(data: bytes) -> list[bytes]:
    """TFRecords with their checksums checked, byte by byte."""
    found, place = [], 0
    while place < len(data):
        (size, crc) = struct.unpack_from("<QI", data, place)
        assert crc == masked(crc32c(data[place : place + 8]))
        body = data[place + 12 : place + 12 + size]
        assert struct.unpack_from("<I", data, place + 12 + size)[0] == masked(crc32c(body))
        found.append(body)
        place += size + 16
    return found


def test_the_checksum_is_castagnoli_s() -> None:
    assert crc32c(b"123456789") ^ 0xFFFFFFFF == 0xE3069283, "RFC 3720's check value"


@pytest.mark.slow
def test_a_million_points_are_written_within_a_minute(tmp_path: Path) -> None:
    started = time.monotonic()
    with (tmp_path / "events.out.tfevents.1").open("wb", 1 << 20) as file:
        EventFile(file, 0.0).add("loss", ((float(s), 0.5, BEGAN_S + s) for s in range(1_000_000)))
    print(f"1 M points: {time.monotonic() - started:.1f} s")
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("form", ["csv", "jsonl", "tensorboard"])
def test_what_is_there_is_replaced_by_force_alone(run: MetricRun, tp: Tp, form: str) -> None:
    words = (run.run_id, "--format", form, "--out", "out")
    assert tp(*words).exception is None
    before = sorted(str(path) for path in Path().rglob("*"))
    error = tp(*words).exception
    assert isinstance(error, UsageError) and "out is there already" in str(error)
    assert tp(*words, "--force").exception is None
    assert sorted(str(path) for path in Path().rglob("*")) == before


def test_force_replaces_nothing_but_an_export(run: MetricRun, tp: Tp) -> None:
    mine = Path("mine")
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    for words in (("--format", "tensorboard"), ("--format", "csv")):
        error = tp(run.run_id, *words, "--out", "mine", "--force").exception
        assert isinstance(error, UsageError), words
    assert (mine / "thesis.tex").read_text() == "years of work"
    for special in ("/dev/null", "pipe", "link"):
        if special == "pipe":
            os.mkfifo(special)
        elif special == "link":
            Path("link").symlink_to("mine/thesis.tex")
        assert isinstance(
            tp(run.run_id, "--format", "csv", "--out", special, "--force").exception, UsageError
        )
    assert Path("/dev/null").is_char_device()
    assert isinstance(tp(run.run_id, "--format", "csv", "--out", "mine/thesis.tex/x").exception, UsageError)
    assert isinstance(tp(run.run_id, "--format", "tensorboard", "--out", "-").exception, UsageError)


@pytest.mark.parametrize("form", ["csv", "tensorboard"])
def test_a_disk_that_is_full_leaves_nothing_behind(run: MetricRun, form: str) -> None:
    """The limit on a file's size stands in for the disk: each write past it fails."""
    run.log(((s, {"wide": 0.123456789}) for s in range(100, 3000)), attempt=1)

    def limit() -> None:
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    words = [
        sys.executable,
        "-m",
        "tuneplane.cli.main",
        "job",
        "export-metrics",
        run.run_id,
        "--format",
        form,
    ]
    done = subprocess.run(
        [*words, "--out", "out"], capture_output=True, text=True, timeout=60, preexec_fn=limit, check=False
    )
    assert done.returncode == 1 and "File too large" in done.stderr
    assert list(Path().iterdir()) == []


def test_hostile_names_are_cells_and_tags(run: MetricRun, tp: Tp) -> None:
    run.log([(5, HOSTILE)], attempt=1)
    for form in ("csv", "jsonl", "tensorboard"):
        assert tp(run.run_id, "--format", form, "--out", form).exception is None
    names = {row["metric"] for row in table(Path("csv"))}
    assert len(names) == len(HOSTILE) + 2
    assert all(name.isprintable() and name[0] not in "=+-@" for name in names)
    exact: set[Any] = {json.loads(line)["metric"] for line in Path("jsonl").read_text().splitlines()}
    assert exact == {"odd", "train/loss", *READ}
    assert len(scalars(Path("tensorboard"))) == len(HOSTILE) + 2


@pytest.mark.parametrize("form", ["csv", "jsonl", "tensorboard"])
def test_a_run_without_points_leaves_no_file_and_fails(
    tmp_path: Path, run: MetricRun, tp: Tp, form: str
) -> None:
    empty = MetricRun(tmp_path, "ring-20260102-030406-cd34")
    for words in ((), ("--out", "-")) if form != "tensorboard" else ((),):
        done = tp(empty.run_id, "--format", form, *words)
        assert isinstance(done.exception, OperationError) and done.stdout == ""
        assert f"no points of {empty.run_id}" in str(done.exception)
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("out", ["", "  "])
def test_an_empty_name_is_no_place(run: MetricRun, tp: Tp, out: str) -> None:
    done = tp(run.run_id, "--format", "csv", "--out", out)
    assert isinstance(done.exception, UsageError) and "names no file" in str(done.exception)
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("form", ["csv", "tensorboard"])
def test_what_a_killed_export_left_is_cleared_by_the_next_and_what_is_in_use_stays(
    run: MetricRun, tp: Tp, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom tuneplane.export import place\n"
        "make = place.new_file if sys.argv[1] == 'csv' else place.new_folder\n"
        "with make(Path('here'), False):\n    print(flush=True)\n    sys.stdin.read()\n"
    )
    others = [
        subprocess.Popen([sys.executable, "-c", code, form], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    for other in others:
        assert other.stdout and other.stdout.readline() == b"\n"
    Path(".here.0123456.tmp").mkdir()  # not of our making
    assert len(list(Path.cwd().iterdir())) == 3
    others[0].kill()
    others[0].wait()
    monkeypatch.setattr("tuneplane.export.place._YOUNG_S", -1.0)
    assert tp(run.run_id, "--format", form, "--out", "here").exception is None
    assert len(list(Path.cwd().iterdir())) == 3, "ours, the one in use, and the stranger's"
    others[1].kill()
    others[1].wait()
    assert tp(run.run_id, "--format", form, "--out", "here", "--force").exception is None
    assert sorted(path.name for path in Path.cwd().iterdir()) == [".here.0123456.tmp", "here"]


def test_force_takes_no_event_files_of_a_trainer(run: MetricRun, tp: Tp) -> None:
    mine = Path("tb/train/events.out.tfevents.1700000000.gpu7.123.0")
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    words = [run.run_id, "--format", "tensorboard", "--out", "tb", "--force"]
    assert isinstance(tp(*words).exception, UsageError)
    mine.rename("tb/events.out.tfevents.1700000000.gpu7.123.0")
    mine.parent.rmdir()
    assert isinstance(tp(*words).exception, UsageError)
    assert Path("tb/events.out.tfevents.1700000000.gpu7.123.0").read_bytes() == b"mine"


def test_a_refusal_of_the_disk_names_the_place_and_the_remedy(run: MetricRun, tp: Tp) -> None:
    for form in ("csv", "tensorboard"):
        error = tp(run.run_id, "--format", form, "--out", "nowhere/x").exception
        assert str(error).splitlines() == [
            "nowhere/x: cannot be written: No such file or directory",
            "  → make the folder nowhere first",
        ]
