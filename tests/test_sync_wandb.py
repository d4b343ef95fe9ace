"""`tp job sync wandb` with wandb's own client, offline: each point once, whatever is killed, no secret told."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metric_runs import BEGAN_S, MetricRun
from run_fixture import wait_until
from wandb_file import offline_runs, read_run

from tuneplane.collect.series import Points, merge
from tuneplane.export.sent import Steps, alone, read_note
from tuneplane.export.wandb import Target, _told, metric_name, offline_folder, wandb_id
from tuneplane.kernel.errors import OperationError, UsageError

pytestmark = pytest.mark.timeout(100)

KEY = "0123456789abcdef0123456789abcdef01234567"

Sync = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> MetricRun:
    run = MetricRun(tmp_path)
    run.attempt(0)
    run.log(((s, {"train/loss": 1 / (s + 1), "lr": 0.1}) for s in range(20)), hparams={"lr": 0.1, "depth": 2})
    return run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "offline"


def words(run: MetricRun, *more: str) -> list[str]:
    return [sys.executable, "-m", "tuneplane.cli.main", "job", "sync", "wandb", run.run_id, *more]


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    store = {"TUNEPLANE_STORE_DIR": str(tmp_path / "store")}
    return {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LANG": "C.UTF-8", **store, **more}


@pytest.fixture
def sync(run: MetricRun, tmp_path: Path, out: Path) -> Sync:
    """Sync offline, as a user with a key; what is printed never holds it."""

    def call(*more: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            words(run, "--project", "p", "--offline-dir", str(out), *more),
            env=environment(tmp_path, WANDB_API_KEY=KEY, **environ),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert KEY not in done.stdout + done.stderr
        return done

    return call


def sent(out: Path) -> dict[tuple[str, int, float], Any]:
    """Value by metric, attempt and our own step, of all offline runs together; each may come once."""
    found: Counter[tuple[str, int, float]] = Counter()
    values: dict[tuple[str, int, float], Any] = {}
    numbers: Counter[int] = Counter()
    for folder in filter(rows_in, offline_runs(out)):
        for row in read_run(folder)[1]:
            numbers[row["_step"]] += 1
            for name in row:
                if not name.startswith(("_", "tuneplane/")):
                    key = (name, row["tuneplane/attempt"], row["tuneplane/step"])
                    found[key] += 1
                    values[key] = row[name]
    assert not {key: count for key, count in found.items() if count > 1}, "sent twice"
    assert not {number: count for number, count in numbers.items() if count > 1}, "a row's number came twice"
    return values


@pytest.mark.slow
def test_every_point_is_sent_once_and_a_second_call_sends_what_is_new(
    run: MetricRun, sync: Sync, out: Path, tmp_path: Path
) -> None:
    said = sync().stdout
    assert said.startswith(f"40 points of {run.run_id} sent as {run.run_id}, in {out}")
    (first,) = offline_runs(out)
    config, rows, axes = read_run(first)
    assert (config["id"], config["name"], config["group"]) == (run.run_id, run.run_id, "ring")
    assert (config["lr"], config["depth"]) == (0.1, 2)
    assert axes == {"*": "tuneplane/step", "system/*": "tuneplane/time"}
    assert [row["_step"] for row in rows] == list(range(20))
    assert rows[5]["train/loss"] == pytest.approx(1 / 6) and rows[5]["tuneplane/step"] == 5
    assert rows[5]["_timestamp"] == rows[5]["tuneplane/time"] == BEGAN_S + 6, "one line before it is hparams"

    assert sync().stdout.startswith("0 points") and offline_runs(out) == [first], (
        "nothing new: nothing is opened"
    )

    # A restart does steps anew, one step comes late, values are no numbers, names are hostile.
    run.attempt(1)
    run.log(((s, {"train/loss": 5.0}) for s in range(10, 13)), attempt=1)
    run.log([(11, {"late": 1.0}), (3, {"late": 2.0})], attempt=1)
    odd = {"a": math.nan, "b": math.inf, "\x1b[2J\n": -math.inf, "_step": 3.0, "tuneplane/step": 4.0}
    run.log([(50, odd)], attempt=1)
    assert sync().stdout.startswith("10 points")
    values = sent(out)
    assert len(values) == 50
    assert [values["train/loss", 1, s] for s in (10, 11, 12)] == [5.0] * 3
    assert (values["late", 1, 11], values["late", 1, 3]) == (1, 2)
    assert math.isnan(values["a", 1, 50]) and values["b", 1, 50] == math.inf
    assert values["\\x1b[2J\\n", 1, 50] == -math.inf
    assert (values["metrics/_step", 1, 50], values["metrics/tuneplane/step", 1, 50]) == (3, 4)

    (note,) = (tmp_path / ".local/state/tuneplane/sync/wandb").glob("*.json")
    assert note.stat().st_mode & 0o777 == 0o600 and KEY not in note.read_text()
    assert not [p for p in run.folder.path.rglob("*") if "wandb" in p.name], (
        "nothing lies in the run's folder"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "after_rows"), [(50, 0), (1500, 100)])
def test_killed_half_way_it_goes_on_without_doubles(
    run: MetricRun, sync: Sync, out: Path, tmp_path: Path, rows: int, after_rows: int
) -> None:
    sync()
    run.log((s, {"train/loss": float(s)}) for s in range(100, 100 + rows))
    started = subprocess.Popen(
        words(run, "--project", "p", "--offline-dir", str(out)),
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_until(lambda: len(offline_runs(out)) == 2, "a second run of wandb's")
    half = offline_runs(out)[1]
    wait_until(lambda: not after_rows or rows_in(half) >= after_rows, "rows", 30)
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    if after_rows:
        assert after_rows <= rows_in(half) < rows, "killed in the middle"
    run.log((s, {"train/loss": float(s)}) for s in range(5000, 5010))  # the run went on meanwhile
    assert sync().stdout.startswith(f"{rows + 10} points")
    values = sent(out)
    assert len(values) == 40 + rows + 10
    assert all(values["train/loss", 0, s] == s for s in [*range(100, 100 + rows), *range(5000, 5010)])


def rows_in(folder: Path) -> int:
    return len(read_run(folder)[1]) if list(folder.glob("*.wandb")) else 0


@pytest.mark.slow
def test_following_ends_with_the_run(run: MetricRun, sync: Sync, out: Path) -> None:
    run.attempt(0, code=0)
    assert sync("-f").stdout.startswith("40 points")
    assert len(sent(out)) == 40


def test_of_two_at_once_one_is_told(run: MetricRun, sync: Sync, out: Path, tmp_path: Path) -> None:
    notes = tmp_path / ".local/state/tuneplane/sync/wandb"
    notes.mkdir(parents=True)
    with alone(notes / f"{Target('p', '', out).key(run.run_id, {})}.json"):
        assert "another tp sends this run there just now" in sync(code=2).stderr
    assert not out.exists()


@pytest.mark.slow
def test_wandb_s_own_words_for_offline_and_off(run: MetricRun, tmp_path: Path) -> None:
    environ = environment(tmp_path, WANDB_MODE="offline", WANDB_DIR=str(tmp_path / "there"))
    done = subprocess.run(words(run), env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert "40 points" in done.stdout and len(sent(tmp_path / "there")) == 40
    with pytest.raises(UsageError, match="turned off"):
        offline_folder(None, {"WANDB_MODE": "disabled"})


@pytest.mark.slow
def test_without_credentials_wandb_s_own_words_are_told(run: MetricRun, tmp_path: Path) -> None:
    environ = environment(tmp_path, WANDB_BASE_URL="http://127.0.0.1:9")
    done = subprocess.run(
        words(run),
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and "wandb: No API key configured" in done.stderr
    assert "wandb login" in done.stderr and "Traceback" not in done.stderr


def test_where_wandb_is_not_installed_it_says_what_to_install(run: MetricRun, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "wandb.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'wandb'\", name='wandb')\n"
    )
    done = subprocess.run(
        words(run),
        env=environment(tmp_path, PYTHONPATH=str(blocked)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and "wandb is not installed for the Python that runs tp" in done.stderr
    assert "pip install wandb" in done.stderr


def test_a_note_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    note = tmp_path / "note.json"
    for text in ("", "{}", "[1]", '{"version": 2}', '{"version": 1, "sent": {"a": 1}}'):
        note.write_text(text)
        with pytest.raises(OperationError, match="what was sent cannot be read"):
            read_note(note)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("project not found (HTTP 404)", "is there such a project, and may you write to it?"),
        ("permission denied", "--project and --entity"),
        ("Error 403: entity team-x", "--project and --entity"),
        ("api_key not configured (no-tty): wandb login", "wandb login"),
        ("connection reset", "what arrived is noted: say it again"),
    ],
)
def test_what_wandb_says_brings_the_advice_that_fits(words: str, advice: str) -> None:
    (fault,) = _told(RuntimeError(words)).faults
    assert words in fault.what and advice in fault.remedy


def test_places_do_not_share_a_note() -> None:
    targets = [
        Target("p"),
        Target("q"),
        Target("p", "e"),
        Target("p", "", Path("/a")),
        Target("p", "", Path("/b")),
    ]
    assert len({target.key("run", {}) for target in targets}) == len(targets)
    assert Target().key("run", {"WANDB_PROJECT": "p"}) == Target("p").key("run", {})
    assert Target("p").key("run", {"WANDB_BASE_URL": "https://own.example"}) != Target("p").key("run", {})


def test_a_run_s_name_at_wandb_is_one_that_wandb_takes() -> None:
    assert wandb_id("ring-20260102-030405-ab12") == "ring-20260102-030405-ab12"
    one, other = wandb_id("r" * 300 + "-1"), wandb_id("r" * 300 + "-2")
    assert one != other and len(one) <= 100
    assert metric_name("train/loss") == "train/loss" and metric_name("_runtime") == "metrics/_runtime"


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53), max_size=50))
def test_steps_are_kept_exactly_however_they_come(steps: list[float]) -> None:
    kept = Steps()
    for step in steps:
        kept.add(float(step))
    again = Steps(json.loads(json.dumps(kept.stretches)))
    assert set(again) == {float(step) for step in steps} and len(list(again)) == len(set(map(float, steps)))


def test_regular_steps_take_no_room() -> None:
    kept = Steps()
    for step in range(0, 1_000_000, 10):
        kept.add(float(step))
    assert kept.stretches == [[0.0, 10.0, 100_000]]


@given(logged=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), max_size=60), cut=st.integers(0, 60))
def test_rows_are_numbered_alike_after_any_kill(
    logged: list[tuple[int, int]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What was planned before a kill keeps its numbers whatever came since, and nothing is planned twice."""

    def lines(points: list[tuple[int, int]]) -> Any:
        attempts: dict[int, Points] = {}
        for attempt, step in points:
            attempts.setdefault(attempt, Points()).append(float(step), 1.0, 0.0)
        return {"loss": merge(attempts)} if attempts else {}

    path = tmp_path_factory.mktemp("note") / "note.json"
    note = read_note(path)
    note.plan(lines(logged[:cut]))
    before = [(batch.first_row, batch.rows()) for batch in note.pending]
    again = read_note(path) if before else note
    assert [(batch.first_row, batch.rows()) for batch in again.pending] == before
    again.plan(lines(logged))
    again.confirm()
    assert again.plan(lines(logged)) is None
    planned = sum(len(rows) for _, rows in before)
    assert again.next_row >= planned and read_note(path).pending == []
