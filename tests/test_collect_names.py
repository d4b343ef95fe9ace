"""Canonical names of metrics: whatever a framework calls its loss, users see one name and one line of it."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from metric_runs import MetricRun
from report_job import RUN_ID, TOKEN_SHA256
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from test_collect_outputs import scalar
from test_collect_points import header
from test_collect_points import write as write_lines

from tuneplane import spec as jobspec
from tuneplane.cli.job import job_command
from tuneplane.collect import store as store_module
from tuneplane.collect.metrics import Metrics, metrics_of
from tuneplane.collect.source import Declared, RunSource
from tuneplane.collect.store import Store
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.packaged import packaged_configs
from tuneplane.recipes.catalog import load_catalog
from tuneplane.runs.sources import read_source

LOSS = (("train/loss", ("loss", "train_loss")), ("validation/loss", ("eval_loss",)))

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "ingest").mkdir(parents=True)
    (tmp_path / "run" / "out").mkdir()
    return tmp_path / "run"


def point(number: int, step: float, values: dict[str, float]) -> str:
    return json.dumps({"n": number, "t": 1000.0 + number, "s": step, "m": values}) + "\n"


def write(run: Path, lines: list[str], name: str = "0-n1-0-1.jsonl") -> Path:
    return write_lines(run, *lines, name=name)


def source_of(run: Path, *outputs: Declared, metrics: Any = LOSS) -> RunSource:
    return RunSource(run, RUN_ID, TOKEN_SHA256, outputs, ((0, 0.0),), metrics=metrics)


def look(run: Path, *outputs: Declared, metrics: Any = LOSS) -> Metrics:
    with Store(memory=True) as store:
        store.refresh([source_of(run, *outputs, metrics=metrics)])
        return metrics_of(store, RUN_ID)


def line(metrics: Metrics, name: str) -> list[tuple[float, float]]:
    series = metrics.series[name]
    return list(zip(series.steps, series.values, strict=True))


@pytest.mark.contract("C21")
def test_an_alias_is_shown_under_the_canonical_name(run: Path) -> None:
    write(run, [header(), *(point(n, n, {"loss": 1.0 / (n + 1), "lr": 0.1}) for n in range(20))])
    metrics = look(run)
    assert sorted(metrics.series) == ["lr", "train/loss"]
    assert line(metrics, "train/loss") == [(n, 1.0 / (n + 1)) for n in range(20)]
    assert metrics.metrics["train/loss"].points == 20


def test_without_canonical_names_nothing_is_renamed(run: Path) -> None:
    write(run, [header(), point(0, 0, {"loss": 1.0, "train/loss": 2.0, "train_loss": 3.0})])
    assert sorted(look(run, metrics=()).series) == ["loss", "train/loss", "train_loss"]
    with Store(memory=True) as store:  # and what was kept of such a run is good still
        store.refresh([source_of(run, metrics=())])
        assert store._ledgers[RUN_ID].reader.state()["of"] == [RUN_ID, TOKEN_SHA256, []]


def test_names_are_told_apart_by_case(run: Path) -> None:
    write(run, [header(), point(0, 0, {"Loss": 1.0, "LOSS": 2.0, "loss": 3.0, "train/Loss": 4.0})])
    assert sorted(look(run).series) == ["LOSS", "Loss", "train/Loss", "train/loss"]


def test_the_name_itself_wins_over_an_alias_at_the_same_step_whichever_came_last(run: Path) -> None:
    write(
        run,
        [
            header(),
            point(0, 0, {"train/loss": 10.0, "loss": 1.0}),
            point(1, 1, {"loss": 2.0}),
            point(2, 2, {"loss": 3.0}),
            point(3, 2, {"train/loss": 30.0}),
            point(4, 3, {"train/loss": 40.0}),
            point(5, 3, {"loss": 4.0}),
        ],
    )
    metrics = look(run)
    assert line(metrics, "train/loss") == [(0, 10.0), (1, 2.0), (2, 30.0), (3, 40.0)]
    told = metrics.metrics["train/loss"]
    assert (told.points, told.last, told.min, told.max) == (4, 40.0, 2.0, 40.0)


def test_an_accuracy_that_says_that_it_is_of_validation_is_not_hidden_by_one_that_does_not(run: Path) -> None:
    declared = load_catalog([packaged_configs()]).get("pytorch/image-classification").metrics
    write(run, [header(), point(0, 0, {"accuracy": 0.99, "val_accuracy": 0.5})])
    assert line(look(run, metrics=tuple(declared.items())), "validation/accuracy") == [(0, 0.5)]


def test_of_two_aliases_at_a_step_the_first_declared_wins(run: Path) -> None:
    write(
        run,
        [
            header(),
            point(0, 0, {"train_loss": 9.0, "loss": 1.0}),
            point(1, 1, {"train_loss": 8.0}),
            point(2, 0, {"train_loss": 7.0}),
        ],
    )
    assert line(look(run), "train/loss") == [(0, 1.0), (1, 8.0)]
    other = (("train/loss", ("train_loss", "loss")),)
    assert line(look(run, metrics=other), "train/loss") == [(0, 7.0), (1, 8.0)]


def test_another_rank_has_a_line_of_its_own_whatever_it_calls_the_metric(run: Path) -> None:
    write(run, [header(), point(0, 0, {"loss": 1.0})])
    write(run, [header(rank=3), point(0, 0, {"train/loss": 2.0})], name="0-n1-3-1.jsonl")
    metrics = look(run)
    assert {name: line(metrics, name) for name in metrics.series} == {
        "train/loss": [(0, 1.0)],
        "train/loss@rank3": [(0, 2.0)],
    }


def test_an_attempt_that_took_up_again_hides_the_other_name_too(run: Path) -> None:
    write(run, [header(), *(point(n, n, {"loss": 1.0}) for n in range(10))])
    again = [header(attempt=1), *(point(n, 6 + n, {"train/loss": 2.0}) for n in range(8))]
    write(run, again, name="1-n1-0-1.jsonl")
    metrics = look(run)
    assert line(metrics, "train/loss") == [(n, 1.0 if n < 6 else 2.0) for n in range(14)]
    assert list(metrics.series["train/loss"].hidden[0].steps) == [6, 7, 8, 9]


def test_declared_json_lines_and_events_have_canonical_names_too(run: Path) -> None:
    lines = [{"step": n, "loss": n / 2, "eval_loss": n} for n in range(3)]
    (run / "out" / "m.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    writer = EventFileWriter(str(run / "out" / "tb"))
    for step in range(4):
        writer.add_event(scalar("train_loss", step, step))
        writer.add_event(scalar("train/loss", step + 10, step))
    writer.close()
    logs = Declared("log", "m.jsonl", "jsonl", "step")
    boards = Declared("boards", "tb/**", "tensorboard")
    metrics = look(run, logs)
    assert {name: line(metrics, name) for name in metrics.series} == {
        "train/loss": [(0, 0.0), (1, 0.5), (2, 1.0)],
        "validation/loss": [(0, 0.0), (1, 1.0), (2, 2.0)],
    }
    assert line(look(run, boards), "train/loss") == [(n, n + 10) for n in range(4)]
    assert sorted(look(run, logs, boards).series) == ["log/train/loss", "train/loss", "validation/loss"]


def test_what_was_kept_under_other_names_is_never_shown(run: Path, tmp_path: Path) -> None:
    """A cache that an older reader left, one that goes on, and one made anew say the same."""
    path = write(run, [header(), *(point(n, n, {"loss": float(n)}) for n in range(9))])
    cache = tmp_path / "store"
    with Store(cache) as store:
        store.refresh([source_of(run, metrics=())])
        assert sorted(store.overview(RUN_ID).metrics) == ["loss"]
    for _ in range(2):
        with Store(cache) as store:
            store.refresh([source_of(run)])
            assert sorted(store.overview(RUN_ID).metrics) == ["train/loss"]
            assert len(store.series(RUN_ID, ["train/loss"])["train/loss"]) == 9
    with sqlite3.connect(cache / "metrics.sqlite") as database:
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (1,)
    with path.open("a") as file:
        file.write("".join(point(n, n, {"train/loss": -1.0}) for n in (9, 10)))
    with Store(cache) as store:
        store.refresh([source_of(run)])
        kept = store.series(RUN_ID, ["train/loss"])["train/loss"]
        assert store.overview(RUN_ID).metrics["train/loss"].points == 11
    assert list(kept.values) == [value for _, value in line(look(run), "train/loss")]


def test_the_file_of_a_run_that_ended_is_read_under_canonical_names(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "WORTH_BYTES", 1)
    write(run, [header(), *(point(n, n, {"loss": float(n)}) for n in range(40))])
    for metrics, name in ((), "loss"), (LOSS, "train/loss"), (LOSS, "train/loss"):
        with Store(memory=True) as store:
            store.refresh([RunSource(run, RUN_ID, TOKEN_SHA256, ended=True, metrics=metrics)])
            assert list(store.overview(RUN_ID).metrics) == [name]
            assert len(store.series(RUN_ID, [name])[name]) == 40
        assert (run / "metrics.compact").exists()


# What users see


Tp = Callable[..., str]


@pytest.fixture
def tp() -> Tp:
    def call(*words: str) -> str:
        done = CliRunner().invoke(job_command, list(words), standalone_mode=False)
        assert done.exception is None, done.exception
        return done.stdout

    return call


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One run whose framework says `loss`, one that says `train_loss`, one that says the canonical name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("TUNEPLANE_STORE_DIR", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    made = []
    for number, name in enumerate(("loss", "train_loss", "train/loss")):
        run = MetricRun(tmp_path, f"ring-20260102-03040{number}-ab12", f"local-499999{number}")
        job = json.loads(run.folder.job.read_text())
        job["spec"]["metrics"] = {"train/loss": ["loss", "train_loss"]}
        run.folder.job.chmod(0o600)
        run.folder.job.write_text(json.dumps(job))
        run.attempt(0, 0)
        run.log((step, {name: 1.0 / (step + 1)}) for step in range(5))
        made.append(run.run_id)
    return made


def test_a_run_is_read_by_what_its_job_says(runs: list[str], tmp_path: Path) -> None:
    (path,) = tmp_path.glob(f"tuneplane/runs/*/*/{runs[0]}")
    assert read_source(RunFolder(path)).metrics == (("train/loss", ("loss", "train_loss")),)
    assert jobspec.read(path / "job.json").spec.metrics == {"train/loss": ["loss", "train_loss"]}


@pytest.mark.contract("C21")
def test_runs_of_several_frameworks_are_compared_and_exported_under_one_name(runs: list[str], tp: Tp) -> None:
    shown = json.loads(tp("metrics", runs[0], "--json", "--compare", runs[1], runs[2]))
    assert [[m["name"] for m in run["metrics"]] for run in shown["runs"]] == [["train/loss"]] * 3
    assert len({json.dumps(run["metrics"][0]["values"]) for run in shown["runs"]}) == 1
    drawn = tp("metrics", runs[0], "train/loss", "--compare", runs[1], runs[2], "--ascii")
    assert drawn.count("train/loss") >= 1 and "train_loss" not in drawn
    for run_id in runs:
        rows = list(
            csv.DictReader(io.StringIO(tp("export-metrics", run_id, "--format", "csv", "--out", "-")))
        )
        assert {row["metric"] for row in rows} == {"train/loss"} and len(rows) == 5
