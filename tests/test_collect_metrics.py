"""What `tp job metrics` is told: series over attempts, ranks and processes, hparams, last values, age."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from report_job import ReportJob
from test_collect_points import header, point, read, write

from tuneplane.collect.metrics import last_values


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "ingest").mkdir(parents=True)
    return tmp_path / "run"


def test_attempts_become_one_line(run: Path) -> None:
    write(run, header(), *(point(n, value=1.0) for n in range(6)), name="0-n1-0-7-aaaaaa.jsonl")
    write(
        run,
        header(attempt=1, started=200.0),
        *(point(n, step=n + 3, value=2.0) for n in range(5)),
        name="1-n2-0-7-bbbbbb.jsonl",
    )
    write(run, header(attempt=2, started=300.0), name="2-n2-0-7-cccccc.jsonl")
    metrics = read(run)
    loss = metrics.series["loss"]
    assert list(loss.steps) == list(range(8)) and list(loss.attempts) == [0] * 3 + [1] * 5
    assert list(loss.hidden[0].steps) == [3, 4, 5] and metrics.attempts == (0, 1)


def test_an_attempt_that_says_where_it_took_up_hides_metrics_it_has_not_reached(run: Path) -> None:
    write(run, header(), point(0, step=0, name="val"), point(1, step=100, name="val"), point(2, step=100))
    write(run, header(attempt=1), '{"n":0,"t":1,"r":50}\n', name="1.jsonl")
    assert list(read(run).series["val"].steps) == [0, 100], "it has logged nothing, so it hides nothing"
    write(run, point(1, step=50), name="1.jsonl")
    assert list(read(run).series["val"].steps) == [0]
    assert list(read(run).series["loss"].steps) == [50]


def test_resume_step_is_told_by_init(tmp_path: Path) -> None:
    job = ReportJob(tmp_path / "run")
    job.run("from tuneplane.report import log\nfor s in (0, 50, 100): log({'val': s}, step=s)")
    job.run(
        "from tuneplane.report import init, log; init(resume_step=50); log({'loss': 1}, step=50)",
        TUNEPLANE_JOB_ATTEMPT="1",
    )
    assert list(job.metrics().series["val"].steps) == [0]


def test_ranks_have_lines_of_their_own_and_processes_of_one_rank_share_one(run: Path) -> None:
    write(
        run,
        header(rank=0, started=1.0),
        point(0, step=1, value=1.0, t=10.0),
        point(1, step=2, value=1.0, t=30.0),
    )
    write(run, header(rank=0, started=2.0), point(0, step=1, value=2.0, t=20.0), name="fork.jsonl")
    write(run, header(rank=3), point(0, value=3.0), name="rank3.jsonl")
    write(run, header(rank=5), point(0, name="only"), name="rank5.jsonl")
    series = read(run).series
    assert sorted(series) == ["loss", "loss@rank3", "only"]
    assert list(series["loss"].values) == [2.0, 1.0], "the last value of step 1 is the later one"


def test_points_that_come_late_are_put_in_their_order(run: Path) -> None:
    write(run, header(), point(0), point(2, step=1, value=2.0), point(1, step=1, value=1.0), point(3))
    assert list(read(run).series["loss"].values) == [1.0, 2.0, 1.0]


def test_hparams_of_later_attempts_win(run: Path) -> None:
    write(run, header(started=9.0), '{"n":0,"t":1,"h":{"lr":1,"seed":7}}\n')
    write(run, header(attempt=1, started=5.0), '{"n":0,"t":1,"h":{"lr":2}}\n', name="1.jsonl")
    assert read(run).hparams == {"lr": 2, "seed": 7}


def test_last_values_say_where_a_run_stands(run: Path) -> None:
    write(
        run, header(), point(0, value=3.0), point(1, value=1.0), point(2, value=math.nan), point(3, value=2.0)
    )
    write(run, header(attempt=1), point(0, step=3, value=2.5, t=1010.0), name="1.jsonl")
    write(run, header(rank=1), point(0, name="acc", value=math.nan), name="r1.jsonl")
    metrics = read(run)
    acc, loss = last_values(metrics, now_s=1020.0)
    assert (acc.name, acc.min, acc.max) == ("acc", None, None) and math.isnan(acc.last)
    assert (loss.last, loss.last_step, loss.first_step, loss.points) == (2.5, 3, 0, 4)
    assert (loss.min, loss.max, loss.hidden, loss.attempts, loss.age_s) == (1.0, 3.0, 1, 2, 10.0)
    assert [value.name for value in last_values(metrics, ["loss", "nobody"])] == ["loss"]
    assert metrics.age_s(1020.0) == 10.0
    assert metrics.age_s(0.0) == 0.0, "a node's clock may be ahead"
