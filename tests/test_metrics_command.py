"""`tp job metrics` as a user sees it: which metrics are meant, runs side by side, what was lost, for programs."""

from __future__ import annotations

import csv
import io
import json
import math
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from metric_runs import BEGAN_S, MetricRun

from tuneplane.cli.job import job_command
from tuneplane.collect.choice import choose, nearest
from tuneplane.kernel.errors import TunePlaneError, UsageError

pytestmark = pytest.mark.timeout(60)

Tp = Callable[..., Result]

HOSTILE = {
    "\x1b[31mred\x1b[0m\n": 1.0,
    "=cmd()|'calc'": 2.0,
    "x" * 10_000: 3.0,
    "损失" * 60: 4.0,
    "\u202eabc": 5.0,
    "e" + "\u0301" * 500: 6.0,
    "\ud800x": 7.0,
    "\x9b2J": math.nan,
    "שלום": 8.0,
    'a,"b"\'c': 9.0,
}
READ = {name.replace("\ud800", "?") for name in HOSTILE}
"""As they are read: half a character is none."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("TUNEPLANE_STORE_DIR", str(tmp_path / "store"))
    return tmp_path


@pytest.fixture
def run(home: Path) -> MetricRun:
    """Two attempts: the second took up 20 steps before the first had ended."""
    run = MetricRun(home)
    run.attempt(0, 1)
    run.attempt(1, 0)
    run.log(
        ((s, {"train/loss": 100.0 - s, "train/lr": 0.1}) for s in range(60)), hparams={"lr": 0.1, "depth": 2}
    )
    run.log(((s, {"train/loss": 90.0 - s}) for s in range(40, 100)), attempt=1)
    run.log([(s, {"validation/loss": 1.0 + s}) for s in (50, 90)], attempt=1)
    return run


@pytest.fixture
def tp() -> Tp:
    def call(*words: str, width: int | None = None, environ: dict[str, str] | None = None) -> Result:
        given = {"COLUMNS": str(width) if width else None, **(environ or {})}
        return CliRunner().invoke(job_command, words, env=given, standalone_mode=False)

    return call


def test_curves_and_last_values_at_eighty_columns(run: MetricRun, tp: Tp) -> None:
    done = tp("metrics", run.run_id, "loss", width=80)
    lines = done.stdout.splitlines()
    assert lines[0] == "train/loss  last -9  min -9  max 100  attempts 0–1  20 done anew"
    assert any(line.startswith("validation/loss  last 91") for line in lines)
    assert lines[-6:-1] == [
        "",
        "METRIC           LAST  MIN  MAX  STEP  POINTS",
        "train/loss       -9    -9   100  99    100",
        "validation/loss  91    51   91   90    2",
        "hparams  depth=2, lr=0.1",
    ]
    assert lines[-1].startswith("newest point ") and max(map(len, lines)) <= 80
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (("loss",), ["train/loss", "validation/loss"]),
        (("train",), ["train/loss", "train/lr"]),
        (("train/",), ["train/loss", "train/lr"]),
        (("*/l*",), ["train/loss", "train/lr", "validation/loss"]),
        (("re:^v.*ss$",), ["validation/loss"]),
        (("train/lr", "loss"), ["train/lr", "train/loss", "validation/loss"]),
        (("train/l?",), ["train/lr"]),
    ],
)
def test_a_name_may_be_a_part_a_glob_or_an_expression(patterns: tuple[str, ...], names: list[str]) -> None:
    assert choose(patterns, ["train/loss", "train/lr", "validation/loss"]) == (names, [])


def test_a_whole_name_is_meant_whatever_else_it_could_mean() -> None:
    have = ["loss", "train/loss", "[a]*", "a", "re:x"]
    assert choose(["loss"], have)[0] == ["loss"]
    assert choose(["[a]*"], have)[0] == ["[a]*"]
    assert choose(["re:x"], have)[0] == ["re:x"]
    assert choose(["", "/", "nothing"], have) == ([], ["", "/", "nothing"])


def test_an_unknown_metric_is_told_with_the_nearest(run: MetricRun, tp: Tp) -> None:
    error = tp("metrics", run.run_id, "train/los", "los").exception
    assert isinstance(error, UsageError)
    assert f"no metric train/los, los in {run.run_id}" in str(error)
    assert "nearest: train/loss" in str(error)
    assert isinstance(tp("metrics", run.run_id, "re:(").exception, UsageError)
    assert nearest("LR", ["train/lr", "x"]) == ["train/lr"]


def test_runs_side_by_side_with_what_differs(home: Path, run: MetricRun, tp: Tp) -> None:
    other = MetricRun(home, "ring-20260102-030406-cd34")
    other.attempt(0, 0)
    other.log(((s, {"train/loss": 50.0}) for s in range(10)), hparams={"lr": 0.2, "depth": 2})
    for words in (
        ("--compare", other.run_id),
        ("--compare", str(other.folder.path), other.run_id, run.run_id),
    ):
        lines = tp("metrics", run.run_id, "loss", *words, width=80).stdout.splitlines()
        assert lines[:3] == [
            "train/loss",
            f"  a {run.run_id}  last -9  min -9  max 100  attempts 0–1  20 done anew"[:80],
            f"  b {other.run_id}  last 50  min 50  max 50",
        ]
        assert f"validation/loss of {run.run_id}  last 91  min 51  max 91" in lines
        assert "train/loss       b    50    50   50   9     10" in lines
        assert "hparams  lr: a=0.1 b=0.2" in lines
    said = json.loads(tp("metrics", run.run_id, "train/loss", "--compare", other.run_id, "--json").stdout)
    assert [(r["run_id"], r["metrics"][0]["last"]) for r in said["runs"]] == [
        (run.run_id, -9),
        (other.run_id, 50),
    ]
    error = tp("metrics", run.run_id, "--compare", other.run_id, "train/loss").exception
    assert "names of metrics stand before it" in str(error)


def test_hardware_is_told_apart_and_drawn_by_time(run: MetricRun, tp: Tp) -> None:
    hardware = "system/node0/gpu0/utilization_percent", "system/node0/memory_used_bytes"
    run.log(
        ((BEGAN_S + 10 * i, dict(zip(hardware, (50.0 + i, 3e10), strict=True))) for i in range(31)), attempt=1
    )
    said = tp("metrics", run.run_id, width=80).stdout
    table = said[said.index("HARDWARE") :].splitlines()
    assert table[1].split()[1:7] == ["80", "%", "50", "%", "80", "%"]
    assert table[2].split()[1:3] == ["30.0", "GB"]
    assert "system/" not in said[: said.index("HARDWARE")]
    drawn = tp("metrics", run.run_id, "utilization_percent").stdout
    assert "after " in drawn and "step " not in drawn.partition("HARDWARE")[0]


def test_many_metrics_are_listed_and_a_few_drawn_losses_first(home: Path, tp: Tp) -> None:
    run = MetricRun(home)
    run.log([(s, {**{f"a{i:02}": 1.0 * s for i in range(30)}, "z/loss": 2.0}) for s in range(3)])
    done = tp("metrics", run.run_id)
    assert done.stdout.count("└") == 6 and "z/loss  last 2" in done.stdout and "a29 " in done.stdout
    assert "curves of 6 of 31 metrics: name those you want" in done.stderr
    assert tp("metrics", run.run_id, "*").stdout.count("└") == 31


@pytest.mark.contract("C16")
def test_what_was_lost_is_told(run: MetricRun, tp: Tp) -> None:
    run.log([], attempt=1, d={"points": 7, "values": 2})
    run.log([(101, {"train/loss": 0.0})], attempt=1)
    path = next(run.folder.ingest.glob("1-*.jsonl"))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:10], *lines[12:], '{"torn']) + "\n")
    (run.folder.ingest / "0-alien-\x1b[2J.jsonl").write_text('{"v": 1, "run_id": "other"}\n')
    said = tp("metrics", run.run_id).stderr
    assert "7 points were dropped by the job" in said and "2 values were no numbers" in said
    assert "2 points are missing" in said and f"1 lines are torn and were passed over, in {path.name}" in said
    assert "was refused: it belongs to run 'other'" in said and "\x1b" not in said


def test_a_name_of_10_kb_makes_only_its_own_row_wide(run: MetricRun, tp: Tp) -> None:
    run.log([(100, {"x" * 10_000: 1.0})], attempt=1)
    lines = tp("metrics", run.run_id).stdout.splitlines()
    rows = lines[next(i for i, line in enumerate(lines) if line.startswith("METRIC")) :]
    assert [len(row) > 200 for row in rows].count(True) == 1
    assert any(row.startswith("x" * 10_000) for row in rows), "a program gets all of it"


def test_programs_get_every_point_with_its_attempt(run: MetricRun, tp: Tp) -> None:
    run.log([(100, {"train/loss": math.nan}), (101, {"train/loss": -math.inf})], attempt=1)
    done = tp("metrics", run.run_id, "train/loss", "--json")
    said = json.loads(done.stdout, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    (loss,) = said["metrics"]
    assert (loss["last"], loss["min"], loss["points"], loss["hidden"]) == ("-Infinity", -9, 102, 20)
    assert loss["values"][-2:] == ["NaN", "-Infinity"] and loss["attempt_of"][39:41] == [0, 1]
    assert loss["hidden_points"]["0"]["steps"] == list(range(40, 60))
    assert said["run_id"] == run.run_id and said["attempts"] == [0, 1] and said["hparams"]["lr"] == 0.1

    rows = list(csv.DictReader(io.StringIO(tp("metrics", run.run_id, "train/loss", "--csv").stdout)))
    assert len(rows) == 122 and sum(row["hidden"] == "1" for row in rows) == 20
    last = rows[-1]
    assert (last["step"], last["value"], last["attempt"]) == ("101", "-inf", "1")
    assert float(last["time"]) > BEGAN_S
    assert isinstance(tp("metrics", run.run_id, "--csv", "--json").exception, UsageError)


@pytest.mark.parametrize("form", ["", "--json", "--csv", "--ascii", "*"])
def test_hostile_names_are_text_and_no_row_is_too_wide(home: Path, tp: Tp, form: str) -> None:
    run = MetricRun(home)
    run.log([(1, HOSTILE), (2, HOSTILE)], hparams={"\x1b]0;t\x07": "\x1b[2J\n" * 50})
    done = tp("metrics", run.run_id, *([form] if form else []), width=80)
    assert done.exception is None
    for line in (done.stdout + done.stderr).splitlines():
        assert line.isprintable(), ascii(line[:200])
        if form in ("", "--ascii", "*") and not line.startswith("hparams"):
            assert sum(columns_of(c) for c in line) <= 80, line
    if form == "--csv":
        names = {row["metric"] for row in csv.DictReader(io.StringIO(done.stdout))}
        assert len(names) == len(HOSTILE) and not any(name[0] in "=+-@" for name in names)
    if form == "--json":
        assert {metric["name"] for metric in json.loads(done.stdout)["metrics"]} == READ


def columns_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def test_a_run_without_points_says_what_would_write_them(home: Path, tp: Tp) -> None:
    run = MetricRun(home)
    done = tp("metrics", run.run_id, "loss")
    assert done.exit_code == 0 and f"no points of {run.run_id} yet" in done.stderr
    assert json.loads(tp("metrics", run.run_id, "--json").stdout)["metrics"] == []


def test_a_colleague_s_run_is_shown_by_its_path(home: Path, run: MetricRun, tp: Tp, tmp_path: Path) -> None:
    done = tp("metrics", str(run.folder.path), "train/lr", environ={"HOME": str(tmp_path / "other")})
    assert "train/lr  last 0.1" in done.stdout


def test_an_ingest_folder_that_cannot_be_listed_is_an_error(home: Path, run: MetricRun, tp: Tp) -> None:
    ingest = run.folder.ingest
    ingest.rename(ingest.with_name("gone"))
    ingest.write_text("not a folder")
    error = tp("metrics", run.run_id).exception
    assert isinstance(error, TunePlaneError) and "cannot read points" in str(error)
