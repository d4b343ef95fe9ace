"""What the board tells of runs: all that is there, exactly, and whatever they are called."""

from __future__ import annotations

import csv
import io
import json
import math
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from board_runs import TOKEN_SHA256, begin_attempt, end_attempt, make_run, training, write_points
from board_server import BoardServer, board
from hand_made import HandSlurm, slurm_run, submit

from tuneplane.board.lines import RELATIVE, STEP, TIME, View, draw, means
from tuneplane.board.logtail import plain_line, read_tail
from tuneplane.board.watch import metric_id
from tuneplane.board.worker import Worker
from tuneplane.collect.series import Points, Series, merge
from tuneplane.kernel.runfolder import RunFolder

STARTED = 1_768_383_010.0
RING = "ring-20260114-093010-x3k9"
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "../../etc/passwd",
    "a\nb\r\n\tc",
    "损失/🔥",
    "\u202eevil",
    "\ud800",
    "",
    "=1+1",
    "%2e%2e",
    "quote\"'`",
    "\x1b[31mred",
    "x" * 100_000,
)


Serve = Callable[[], BoardServer]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts a board of what lies in `tmp_path/tuneplane` by then, signed in."""
    with ExitStack() as stack:

        def start() -> BoardServer:
            server = stack.enter_context(board(tmp_path))
            server.sign_in()
            return server

        yield start


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "tuneplane"


def test_runs_with_their_states_newest_first(serve: Serve, root: Path) -> None:
    make_run(root, RING, STARTED)
    make_run(root, "ring-20260114-103010-aaaa", STARTED, code=1)
    write_points(make_run(root, "mnist-20260113-103010-zzzz", STARTED), [(0, STARTED + 5, {"loss": 1.0})])
    server = serve()
    runs = server.wait_for_runs(3)
    assert [(run["id"], run["state"], run["code"]) for run in runs] == [
        ("ring-20260114-103010-aaaa", "FAILED", 1),
        (RING, "COMPLETED", 0),
        ("mnist-20260113-103010-zzzz", "COMPLETED", 0),
    ]
    assert "loss is nan" in runs[0]["reason"]
    newest = server.wait_for(
        lambda: server.get("/api/runs")["runs"][2]["newest_s"], "the age of a run that nobody looks at"
    )
    assert newest == STARTED + 5


def test_values_arrive_as_they_are(serve: Serve, root: Path) -> None:
    values = [0.1, math.nan, math.inf, -math.inf, 1e-308, 1.7976931348623157e308, -0.0, 2.0**53]
    rows = [(step, STARTED + step, {"loss": value}) for step, value in enumerate(values)]
    write_points(make_run(root, RING, STARTED), rows, hparams={"nan": math.nan, "big": 2**70, "deep": [[1]]})
    server = serve()
    server.wait_for_runs(1)
    (metric,) = server.overview(RING)["metrics"]
    assert (metric["min"], metric["max"], metric["points"]) == (0.0, 1.7976931348623157e308, 8) or metric[
        "min"
    ] == -0.0
    (line,) = server.lines(("run", RING), ("metric", metric["id"]))
    assert array("d", values).tobytes()[:8] == line["values"].tobytes()[:8]
    assert [repr(value) for value in line["values"]] == [repr(value) for value in values]
    assert list(line["steps"]) == list(range(8)) and line["times"][-1] == STARTED + 7
    hparams = server.get("/api/details", ("run", RING))["hparams"]
    assert hparams == {"nan": "nan", "big": str(2**70), "deep": [[1]]}


def test_hostile_names_are_texts_and_nothing_else(serve: Serve, root: Path) -> None:
    run = make_run(root, RING, STARTED, spec__hyperparams={HOSTILE[0]: HOSTILE[2]})
    write_points(run, [(0, STARTED, dict.fromkeys(HOSTILE, 1.0))], hparams={HOSTILE[0]: {"\x1b": HOSTILE[4]}})
    server = serve()
    server.wait_for_runs(1)
    metrics = {metric["id"]: metric["name"] for metric in server.overview(RING)["metrics"]}
    assert len(metrics) == len(HOSTILE)
    for given in HOSTILE:
        name = given.encode("utf-8", "replace").decode()  # half a surrogate pair is no character
        told = metrics[metric_id(name)]
        assert told == name or (len(name) > 2000 and told.startswith(name[:2000]) and "100000 char" in told)
    lines = server.lines(("run", RING), *(("metric", metric) for metric in metrics))
    assert {line["metric"] for line in lines} == set(metrics)
    details = server.get("/api/details", ("run", RING))
    assert details["hparams"] == {HOSTILE[0] + ".\x1b": HOSTILE[4]}
    assert details["config"]["set." + HOSTILE[0]] == HOSTILE[2]


def test_what_an_evaluation_found_is_told_as_text_and_why_a_report_is_not(serve: Serve, root: Path) -> None:
    row = {"task": "<b>t</b>\x1b[31m", "metric": "acc", "value": 0.5, "samples": 4}
    report = {"schema": "tuneplane/eval-report/v1", "results": [row, 7]}
    run = make_run(root, RING, STARTED)
    (run.out / "eval").mkdir(parents=True)
    (run.out / "eval/report.json").write_text(json.dumps(report))
    server = serve()
    server.wait_for_runs(1)
    told = server.get("/api/details", ("run", RING))["report"]
    (shown,) = told["rows"]
    assert (shown["task"], shown["value"], shown["samples"]) == (row["task"], 0.5, 4)
    assert told["notices"] == ["report.json: 1 of its rows cannot be read"]


def test_only_what_is_new_is_sent_again(serve: Serve, root: Path) -> None:
    run = make_run(root, RING, STARTED, code=None)
    path = write_points(run, training(1, 50, STARTED))
    server = serve()
    server.wait_for_runs(1)
    first = server.overview(RING)
    assert first["read"] and first["origin_s"] == STARTED
    time.sleep(0.6)
    assert server.overview(RING, first["stamp"]) == {"id": RING, "stamp": first["stamp"], "same": True}
    with path.open("a") as file:
        file.write('{"n":50,"t":%f,"s":50,"m":{"train/loss":7.5}}\n' % (STARTED + 50))
    time.sleep(0.6)
    second = server.overview(RING, first["stamp"])
    assert {m["name"]: m["last"] for m in second["metrics"]}["train/loss"] == 7.5


def test_a_zoomed_chart_gets_its_part_and_a_neighbour_on_each_side(serve: Serve, root: Path) -> None:
    rows = [(step, STARTED + 10 + step, {"loss": float(step)}) for step in range(1000)]
    write_points(make_run(root, RING, STARTED), rows)
    server = serve()
    server.wait_for_runs(1)
    metric = ("metric", metric_id("loss"))
    server.overview(RING)
    (line,) = server.lines(("run", RING), metric, ("low", 100), ("high", 103))
    assert list(line["values"]) == [99, 100, 101, 102, 103, 104]
    (line,) = server.lines(("run", RING), metric, ("order", RELATIVE), ("low", 10), ("high", 11))
    assert list(line["values"]) == [0, 1, 2]
    (line,) = server.lines(("run", RING), metric, ("order", TIME), ("low", STARTED + 1008), ("high", "inf"))
    assert list(line["values"]) == [997, 998, 999]
    (line,) = server.lines(("run", RING), metric, ("buckets", 16))
    assert line["total"] == 1000 and len(line["values"]) <= 34 and line["means"] == 16


def test_attempts_that_were_overtaken_come_as_lines_of_their_own(serve: Serve, root: Path) -> None:
    run = make_run(root, RING, STARTED)
    begin_attempt(run, 1, STARTED + 100)
    end_attempt(run, 1, STARTED + 200, 0)
    write_points(run, [(step, STARTED + step, {"loss": 1.0}) for step in range(6)])
    write_points(run, [(step, STARTED + 100 + step, {"loss": 2.0}) for step in range(3, 8)], attempt=1)
    server = serve()
    server.wait_for_runs(1)
    server.overview(RING)
    merged, hidden = server.lines(("run", RING), ("metric", metric_id("loss")))
    assert merged["attempt"] is None and merged["starts"] == [[0, 0], [3, 1]]
    assert list(merged["values"]) == [1.0] * 3 + [2.0] * 5
    assert hidden["attempt"] == 0 and list(hidden["steps"]) == [3, 4, 5]
    history = server.get("/api/details", ("run", RING))["attempts"]
    assert [attempt["number"] for attempt in history] == [0, 1]


def test_what_was_lost_is_told(serve: Serve, root: Path) -> None:
    run = make_run(root, RING, STARTED)
    path = write_points(run, training(1, 3, STARTED), dropped=12)
    with path.open("a") as file:
        file.write("torn\n" + '{"n":9,"t":1,"s":9,"m":{"train/loss":1}}\n')
    (run.ingest / "0-n1-1-8.jsonl").write_text(path.read_text().replace(TOKEN_SHA256, "0" * 64))
    server = serve()
    server.wait_for_runs(1)
    told = server.overview(RING)["notices"]
    assert any(line.startswith("12 points were dropped by the job") for line in told)
    assert any("points are missing" in line for line in told) and any("torn" in line for line in told)
    assert any("0-n1-1-8.jsonl was refused" in line for line in told)
    (row,) = server.get("/api/runs")["runs"]
    assert row["notices"] == len(told)


def test_a_board_that_keeps_nothing_says_why(tmp_path: Path, root: Path) -> None:
    make_run(root, RING, STARTED)
    with board(tmp_path, TUNEPLANE_STORE_DIR="not/absolute") as server:
        server.sign_in()
        server.wait_for_runs(1)
        server.overview(RING)
        assert server.get("/api/runs")["notice"] == "TUNEPLANE_STORE_DIR is no absolute path"
    with board(tmp_path) as server:
        server.sign_in()
        server.wait_for_runs(1)
        server.overview(RING)
        assert server.get("/api/runs")["notice"] == ""


def test_one_broken_run_hides_no_other(serve: Serve, root: Path) -> None:
    write_points(make_run(root, RING, STARTED), [(0, STARTED, {"loss": 1.0})])
    broken = make_run(root, "ring-20260114-103010-aaaa", STARTED)
    broken.job.write_text("{")
    odd = make_run(root, "ring-20260114-113010-bbbb", STARTED)
    odd.ingest.rmdir()
    odd.ingest.write_text("a file")
    server = serve()
    server.wait_for_runs(3)
    assert server.overview(RING)["metrics"][0]["last"] == 1.0
    assert server.overview(broken.run_id)["notices"] and server.overview(odd.run_id)["notices"]
    assert server.get("/api/details", ("run", broken.run_id))["config"] == {}
    answer = server.request(f"/api/artifacts?run={broken.run_id}")
    assert answer.status == 500 and "job.json" in answer.json["error"]


def test_csv_has_every_point_and_no_formula(serve: Serve, root: Path) -> None:
    run = make_run(root, RING, STARTED)
    write_points(run, [(step, STARTED + step, {"=SUM(A1)": 0.1 + step}) for step in range(5000)])
    server = serve()
    server.wait_for_runs(1)
    answer = server.request(f"/api/lines.csv?run={RING}&metric={metric_id('=SUM(A1)')}")
    assert answer.headers["content-disposition"].startswith("attachment")
    head, *rows = csv.reader(io.StringIO(answer.body.decode()))
    assert head == ["run_id", "metric", "attempt", "step", "value", "time", "hidden"]
    assert len(rows) == 5000
    assert rows[-1] == [RING, "'=SUM(A1)", "0", "4999", repr(4999.1), f"{STARTED + 4999:.6f}", "0"]


def test_a_log_is_its_end_without_escapes_and_secrets(serve: Serve, root: Path) -> None:
    run = make_run(root, RING, STARTED)
    run.secrets.write_text("HF_TOKEN=hf_a_secret_word\n")
    run.secrets.chmod(0o600)
    log = run.attempt(0).node_log(0)
    log.write_text("first\n" + "filler line\n" * 60_000 + "\x1b[31mred\x1b[0m <b> hf_a_secret_word\n")
    server = serve()
    server.wait_for_runs(1)
    tail = server.get("/api/log", ("run", RING))
    (node,) = tail["nodes"]
    assert node["lines"][-1] == "red <b> •••" and node["cut"] and node["size_bytes"] == log.stat().st_size
    assert "first" not in node["lines"] and len(node["lines"]) > 10_000
    assert server.get("/api/log", ("run", RING), ("seen", tail["stamp"])) == {
        "stamp": tail["stamp"],
        "same": True,
    }
    assert server.get("/api/log", ("run", RING), ("attempt", "7"))["nodes"] == []


def test_hyper_parameters_that_hold_a_secret_are_masked(serve: Serve, root: Path) -> None:
    run = make_run(root, RING, STARTED)
    run.secrets.write_text("API_KEY=key-of-somebody\n")
    run.secrets.chmod(0o600)
    write_points(run, [(0, 1.0, {"x": 1.0})], hparams={"url": "https://key-of-somebody@host"})
    server = serve()
    server.wait_for_runs(1)
    server.overview(RING)
    assert server.get("/api/details", ("run", RING))["hparams"] == {"url": "https://•••@host"}


def test_a_parameter_set_to_zero_or_off_is_told(serve: Serve, root: Path) -> None:
    make_run(root, RING, STARTED, spec__hyperparams={"seed": 0, "packing": False, "dropout": 0.0})
    server = serve()
    server.wait_for_runs(1)
    config = server.get("/api/details", ("run", RING))["config"]
    told = {key: value for key, value in config.items() if key.startswith("set.")}
    assert told == {"set.seed": 0, "set.packing": False, "set.dropout": 0.0}


def test_artifacts_stay_inside(serve: Serve, root: Path) -> None:
    run = make_run(
        root,
        RING,
        STARTED,
        spec__outputs=[{"name": "checkpoints", "path": "checkpoints/*", "kind": "artifact", "step_key": ""}],
    )
    (run.out / "checkpoints/step-1").mkdir(parents=True)
    (run.out / "checkpoints/step-1/w").write_bytes(b"12345")
    (run.out / "checkpoints/outside").symlink_to("/etc")
    server = serve()
    server.wait_for_runs(1)
    found = server.get("/api/artifacts", ("run", RING))
    assert [(one["path"], one["size_bytes"]) for one in found["artifacts"]] == [("checkpoints/step-1", 5)]
    assert "outside" in found["skipped"][0]


def test_too_much_at_once_is_refused_in_words(serve: Serve) -> None:
    many = [("run", f"r{i}") for i in range(501)]
    server = serve()
    assert "at most 500" in server.get("/api/overviews", *many, status=400)["error"]
    assert server.get("/api/lines", ("order", "sideways"), status=400)["error"].startswith("order is")
    assert server.get("/api/overviews", ("run", "unknown"))["overviews"] == []
    assert server.get("/api/log", ("run", "unknown"), status=404) == {"error": "no such run"}
    assert server.lines(("run", "unknown"), ("metric", "x")) == []


def test_a_run_given_by_its_path_is_shown_first(tmp_path: Path) -> None:
    elsewhere = make_run(tmp_path / "project", RING, STARTED)
    with board(tmp_path, str(elsewhere.path)) as server:
        assert server.link.endswith(f"#runs={RING}")
        server.sign_in()
        assert [run["id"] for run in server.wait_for_runs(1)] == [RING]


@pytest.mark.slow
def test_slurm_is_asked_every_few_seconds_and_not_at_all_while_nobody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = HandSlurm(tmp_path / "slurm", monkeypatch)
    run = slurm_run(tmp_path / "tuneplane")
    submit(run, "4242", time.time())
    slurm.jobs({"4242": "PENDING Resources"})
    with board(tmp_path) as server:
        server.sign_in()
        assert server.wait_for_runs(1)[0]["state"] == "PENDING"
        until = time.monotonic() + 5
        while time.monotonic() < until:  # a hundred pages that ask at once
            server.get("/api/runs")
            time.sleep(0.05)
        assert len(slurm.asked("squeue")) <= 3
    assert len(slurm.asked("sacct")) <= len(slurm.asked("squeue"))


def series(values: list[float], step_s: float = 1.0) -> Series:
    points = Points()
    for step, value in enumerate(values):
        points.append(float(step), value, STARTED + step * step_s)
    return merge({0: points})


def test_no_spike_is_lost_to_thinning_and_means_are_true() -> None:
    values = [math.sin(i / 500) for i in range(100_000)]
    values[31_337], values[77_777], values[50_000] = 50.0, -50.0, math.nan
    (line,) = draw(series(values), View(STEP, buckets=400))
    assert line.total == 100_000 and len(line.values) <= 2 * 400 + 3
    assert {50.0, -50.0} <= set(line.values) and any(math.isnan(value) for value in line.values)
    assert (line.steps[0], line.steps[-1]) == (0, 99_999)
    assert len(line.mean_x) == len(line.mean_y) == 400
    mean = sum(line.mean_y) / 400
    assert mean == pytest.approx(sum(v for v in values if not math.isnan(v)) / 99_999, abs=1e-3)


def test_by_time_late_steps_stand_where_they_were_logged() -> None:
    points = Points()
    for step, at in ((0, 1.0), (5, 2.0), (2, 3.0), (9, 4.0)):
        points.append(float(step), float(step), at)
    (line,) = draw(merge({0: points}), View(TIME))
    assert list(line.times_s) == [1, 2, 3, 4] and list(line.steps) == [0, 5, 2, 9]
    (line,) = draw(merge({0: points}), View(STEP))
    assert list(line.steps) == [0, 2, 5, 9]


def test_means_of_huge_values_and_of_none() -> None:
    huge = Points(array("d", range(8)), array("d", [1.7e308] * 8), array("d", [0.0] * 8))
    xs, ys = means(huge, 2)
    assert len(xs) == len(ys) and all(math.isfinite(y) for y in ys)
    none = Points(array("d", [3.0, 3.0]), array("d", [math.nan, math.inf]), array("d", [0.0, 0.0]))
    assert means(none, 4) == (array("d"), array("d"))


@pytest.mark.parametrize(
    ("line", "plain"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("10%\r 50%\r100%\r\n", "100%"),
        ("a\tb\x00\x08c\x7f", "a\tbc"),
        ("abc\u202edef\u2066", "abcdef"),
        ("\x9b31mC1\x1bM\x1b(B", "C1"),
        ("\x1b", ""),
        ("\x1b]never ends", ""),
        ("x" * 10_000, "x" * 4_000 + "…"),
    ],
)
def test_a_terminals_words_leave_no_trace(line: str, plain: str) -> None:
    assert plain_line(line) == plain


def test_a_bar_that_never_ends_its_line_is_shown_as_it_is_now(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / RING)
    folder = run.attempt(0).path
    folder.mkdir(parents=True)
    run.attempt(0).node_log(0).write_text("".join(f"\r{i}% done" for i in range(100_000)))
    (folder / "node-1.log").symlink_to("/dev/zero")
    (node,) = read_tail(run).nodes
    assert node.lines == ["99999% done"]


def test_a_worker_goes_on_after_what_it_was_asked_failed() -> None:
    worker = Worker("test")

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        worker.ask(fail).result(5)
    assert worker.ask(lambda: 7).result(5) == 7
    assert worker.end(5)
