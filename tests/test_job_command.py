"""`tp job ls`, `status` and the other commands as a user sees them, over hand-made run folders."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from hand_made import HandSlurm, attempt, slurm_run, submit

from tuneplane.cli.clear import parse_age
from tuneplane.cli.job import job_command
from tuneplane.cli.lab import new_command
from tuneplane.cli.show import cut
from tuneplane.kernel.errors import TunePlaneError
from tuneplane.kernel.files import write_json
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.runs.index import find_run

pytestmark = pytest.mark.timeout(60)

Tp = Callable[..., Result]
WHY = "no progress since attempt 0: no new checkpoint in out/checkpoints and no new step"
WALLTIME = {"cause": "walltime", "to_be_continued": True}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HandSlurm:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    return HandSlurm(tmp_path / "bin", monkeypatch)


@pytest.fixture
def run(tmp_path: Path, slurm: HandSlurm) -> RunFolder:
    """Two attempts, the second ended by its walltime and not restarted."""
    run = slurm_run(tmp_path / "tuneplane")
    submit(run, "42")
    attempt(run, 0, "42", end=WALLTIME, restart={"cause": "walltime", "way": "requeue"}, restarted={})
    end = {
        "code": 143,
        "cause": "walltime",
        "to_be_continued": False,
        "not_restarted": WHY,
        "reason": "SIGTERM",
    }
    attempt(run, 1, "42", automatic=True, follows="walltime", end={**end, "progress": {"step": 120}})
    return run


@pytest.fixture
def tp() -> Tp:
    def call(*words: str, width: int | None = None) -> Result:
        environ = {"COLUMNS": str(width) if width else None}
        return CliRunner().invoke(job_command, words, env=environ, standalone_mode=False)

    return call


@pytest.mark.contract("C46")
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_reason_of_ls_wraps_and_status_has_it_whole(run: RunFolder, tp: Tp, width: int) -> None:
    said = tp("ls", width=width).stdout.splitlines()
    assert max(len(line) for line in said if line.startswith("  ") or width > 80) <= width
    whole = f"SIGTERM; not restarted: {WHY}"
    assert any(line.endswith("…") for line in said)
    assert f"reason     {whole}" in tp("status", run.run_id, width=width).stdout.splitlines()
    (listed,) = json.loads(tp("ls", "--json").stdout)
    assert (listed["reason"], listed["cause"], listed["not_restarted"]) == (whole, "walltime", WHY)


def test_what_goes_to_a_program_is_not_cut(run: RunFolder, tp: Tp) -> None:
    assert WHY in tp("ls").stdout


@pytest.mark.contract("C46")
def test_status_lists_the_attempts_with_their_causes(run: RunFolder, tp: Tp) -> None:
    said = tp("status", run.run_id).stdout
    first, second = (line for line in said.splitlines() if line.startswith(("0 ", "1 ")) and " 42 " in line)
    assert "saved" in first and first.endswith("met its walltime")
    assert "ended" in second and "143" in second and "120" in second
    assert second.endswith(
        f"began because attempt 0 met its walltime; met its walltime; not restarted: {WHY}"
    )
    history = json.loads(tp("status", run.run_id, "--json").stdout)["history"]
    assert [(a["number"], a["automatic"], a["cause"], a["step"]) for a in history] == [
        (0, False, "walltime", None),
        (1, True, "walltime", 120),
    ]


def test_one_attempt_that_speaks_for_itself_has_no_such_table(
    tmp_path: Path, slurm: HandSlurm, tp: Tp
) -> None:
    run = slurm_run(tmp_path / "tuneplane", 1)
    submit(run, "43")
    attempt(run, 0, "43", end={"for_good": True})
    assert "ATTEMPT " not in tp("status", run.run_id).stdout


@pytest.mark.parametrize(
    "words", [("ls", "--limit", "-1"), ("ls", "--limit", "x"), ("logs", "--attempt", "x", "ring")]
)
def test_wrong_numbers_are_wrong_use(run: RunFolder, tp: Tp, words: tuple[str, ...]) -> None:
    assert isinstance(tp(*words).exception, click.BadParameter)


def test_logs_of_an_attempt_are_that_attempts(run: RunFolder, tp: Tp) -> None:
    for number in (0, 1):
        run.attempt(number).node_log(0).write_text(f"of attempt {number}\n")
    assert tp("logs", run.run_id, "--attempt", "0").stdout == "of attempt 0\n"
    assert tp("logs", run.run_id).stdout == "of attempt 1\n"
    for wrong in ("2", "-1"):
        done = tp("logs", run.run_id, "--attempt", wrong)
        assert isinstance(done.exception, TunePlaneError)
        assert f"has no attempt {wrong}" in str(done.exception) and "it has: 0, 1" in str(done.exception)


def test_a_half_made_run_is_listed_and_never_the_latest(run: RunFolder, tmp_path: Path, tp: Tp) -> None:
    half = slurm_run(tmp_path / "tuneplane", 5)
    half.script.unlink()
    assert find_run("ring").run_id == run.run_id
    assert "INCOMPLETE" in tp("ls").stdout
    assert find_run(half.run_id).run_id == half.run_id
    for command in ("retry", "resume", "pause"):
        assert isinstance(tp(command, half.run_id).exception, TunePlaneError)
    assert "was never submitted" in tp("stop", half.run_id).stdout


@pytest.mark.parametrize("command", ["stop", "pause", "resume", "retry", "rerun"])
@pytest.mark.parametrize("text", ["", "nope", "ring-2026", "../x", "42_7", "实验", "a\nb", "/", "."])
def test_a_run_that_there_is_not_is_told(
    tmp_path: Path, slurm: HandSlurm, tp: Tp, command: str, text: str
) -> None:
    done = tp(command, text)
    assert isinstance(done.exception, TunePlaneError) and "no run" in str(done.exception)


def test_stop_says_what_it_did(tmp_path: Path, slurm: HandSlurm, tp: Tp) -> None:
    run = slurm_run(tmp_path / "tuneplane", 1)
    submit(run, "43", at=time.time())
    slurm.jobs({"43": "PENDING Priority"})
    done = tp("stop", run.run_id)
    assert done.stdout == f"{run.run_id}: CANCELLED\n"
    assert done.stderr == "note: Slurm job 43 was cancelled while it was PENDING\n"
    assert tp("stop", run.run_id).stdout == f"{run.run_id} had ended already: CANCELLED\n"
    assert json.loads(tp("stop", run.run_id, "--json").stdout)["done"] == []


@pytest.mark.parametrize(
    ("age", "seconds"), [("30m", 1800), ("12h", 43_200), ("7d", 604_800), ("8w", 4_838_400), ("0m", 0)]
)
def test_an_age_is_said_in_minutes_hours_days_or_weeks(age: str, seconds: float) -> None:
    assert parse_age(age) == seconds


@pytest.mark.parametrize("age", ["", "30", "d", "-1d", "1.5d", "３d", "1y", "999999d", "30s", "30M"])
def test_an_age_that_is_none_is_told(run: RunFolder, tp: Tp, age: str) -> None:
    done = tp("gc", "--older-than", age)
    assert isinstance(done.exception, TunePlaneError) and "is no age" in str(done.exception)
    assert run.path.exists()


def test_gc_lists_first_and_removes_with_yes(run: RunFolder, tp: Tp) -> None:
    done = tp("gc")
    assert "nothing is removed yet: add --yes" in done.stdout and run.run_id in done.stdout
    assert run.path.exists()
    assert json.loads(tp("gc", "--yes", "--json").stdout)["items"][0]["name"] == run.run_id
    assert not run.path.exists()
    assert tp("gc").stdout == "nothing to remove\n"


@pytest.fixture
def cleared(run: RunFolder, tp: Tp) -> RunFolder:
    """A run of which `tp job gc` left the outputs."""
    (run.out / "model").write_text("w")
    tp("gc", "--yes")
    assert not run.script.exists()
    return run


@pytest.mark.parametrize("command", ["resume", "retry"])
def test_a_cleared_run_cannot_go_on_and_nothing_else_is_named(
    cleared: RunFolder, tp: Tp, command: str
) -> None:
    told = tp(command, cleared.run_id).exception
    assert isinstance(told, TunePlaneError)
    assert [(f.what, f.remedy) for f in told.faults] == [
        (
            f"{cleared.run_id} was cleared by tp job gc: its code and its script are gone",
            "submit the experiment again",
        )
    ]


@pytest.mark.parametrize("words", [(), ("--attempt", "0"), ("--node", "n1"), ("-f",)])
def test_the_log_of_a_cleared_run_is_said_to_be_cleared(
    cleared: RunFolder, tp: Tp, words: tuple[str]
) -> None:
    done = tp("logs", cleared.run_id, *words)
    assert (
        f"what it printed was cleared by tp job gc; its outputs are left: {cleared.path}/out" in done.stderr
    )
    assert "yet" not in done.stderr


def test_a_node_whose_agent_was_killed_is_lost_once_its_run_has_ended(
    tmp_path: Path, tp: Tp, slurm: HandSlurm
) -> None:
    run = slurm_run(tmp_path / "tuneplane", 3)
    submit(run, "43")
    attempt(run, 0, "43", end={"code": 137, "for_good": True, "reason": "killed"})
    nodes = [("running", None), ("ended", 143), ("ending", 143)]
    for rank, (state, code) in enumerate(nodes):
        value = {"rank": rank, "host": f"n{rank}", "state": state, "code": code}
        write_json(run.attempt(0).node_record(rank), value)
        run.attempt(0).node_beat(rank).touch()
    said = json.loads(tp("status", run.run_id, "--json").stdout)
    assert said["state"] == "FAILED"
    assert [node["state"] for node in said["nodes"]] == ["lost", "ended", "ended"]
    assert "running" not in tp("status", run.run_id).stdout
    run.attempt(0).end.unlink()
    slurm.jobs({"43": "RUNNING"})
    said = json.loads(tp("status", run.run_id, "--json").stdout)
    assert [node["state"] for node in said["nodes"]] == ["running", "ended", "ending"]


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [("abc", 3, "abc"), ("abcd", 3, "ab…"), ("实验室", 5, "实验…"), ("实验室", 4, "实…")],
)
def test_an_ellipsis_counts_columns(text: str, width: int, shown: str) -> None:
    assert cut(text, width) == shown


def test_method_names_complete() -> None:
    option = next(p for p in new_command.params if p.name == "method")
    ctx = new_command.make_context("new", ["x", "--method", "y"])
    assert [item.value for item in option.shell_complete(ctx, "custom/")] == ["custom/custom"]
    assert option.shell_complete(ctx, "nope") == []
