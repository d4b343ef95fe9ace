"""`tp … | head`: whoever has read enough goes away, and that is no failure of `tp`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from metric_runs import MetricRun

from tuneplane.cli.main import COMMANDS
from tuneplane.cli.pipe import ACTING, acts

pytestmark = pytest.mark.timeout(60)

TP = f"{sys.executable} -m tuneplane.cli.main"


@pytest.fixture
def run(tmp_path: Path) -> MetricRun:
    run = MetricRun(tmp_path)
    run.attempt(0, 0)
    run.log((step, {"train/loss": 1.0}) for step in range(30_000))
    return run


def shell(tmp_path: Path, line: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "TUNEPLANE_STORE_DIR": str(tmp_path / "store"),
        "TUNEPLANE_CONFIG_DIR": str(tmp_path),
        "LANG": "C.UTF-8",
    }
    argv = ["bash", "-c", f"set -o pipefail; {line}"]
    return subprocess.run(
        argv, cwd=cwd or tmp_path, env=environ, capture_output=True, text=True, timeout=50, check=False
    )


@pytest.mark.parametrize(
    "words",
    [
        "job metrics {run} --csv",
        "job metrics {run} --json",
        "job export-metrics {run} --format jsonl --out -",
        "methods custom/custom",
        "job ls",
        "--help",
    ],
)
def test_a_reader_that_has_enough_is_no_failure(tmp_path: Path, run: MetricRun, words: str) -> None:
    done = shell(tmp_path, f"{TP} {words.format(run=run.run_id)} | head -n 1")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("\n") == 1
    gone = shell(tmp_path, f"{TP} {words.format(run=run.run_id)} | true")
    assert (gone.returncode, gone.stderr) == (0, "")


def test_a_full_disk_is_still_a_failure(tmp_path: Path, run: MetricRun) -> None:
    done = shell(tmp_path, f"{TP} job metrics {run.run_id} --csv > /dev/full")
    assert done.returncode == 1 and "No space left on device" in done.stderr


@pytest.mark.parametrize("words", ["methods", "init lab", "job ls"])
def test_a_standard_output_that_is_closed_is_no_failure(tmp_path: Path, words: str) -> None:
    done = shell(tmp_path, f"{TP} {words} >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_long_log_is_read_by_its_first_line_alone(tmp_path: Path, run: MetricRun) -> None:
    run.folder.attempt(0).node_log(0).write_text("a line of the log\n" * 100_000)
    done = shell(tmp_path, f"{TP} job logs {run.run_id} | head -n 1")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)


def test_a_command_that_acts_goes_on_to_its_end(tmp_path: Path) -> None:
    assert shell(tmp_path, f"{TP} init lab | true").returncode == 0
    lab = tmp_path / "lab"
    assert (lab / "tuneplane.yaml").is_file()
    for name in ("one", "two"):
        assert shell(tmp_path, f"{TP} new {name} --method custom/custom | true", lab).returncode == 0
    for lock in lab.glob("experiments/*/recipe.lock.json"):
        lock.write_text(lock.read_text().replace('"version": "1.0.0"', '"version": "0.9.0"'))
    assert shell(tmp_path, f"{TP} recipe upgrade | true", lab).returncode == 0
    assert shell(tmp_path, f"{TP} recipe status", lab).stdout.count("current") == 2
    refused = shell(tmp_path, f"{TP} new one --method custom/custom | true", lab)
    assert refused.returncode == 2 and "exists" in refused.stderr


def test_which_commands_act() -> None:
    assert set(ACTING) <= set(COMMANDS)
    for line in ("submit x", "--debug job stop x", "recipe upgrade", "job sync wandb x", "image pull x"):
        assert acts(line.split()), line
    for line in ("", "--help", "job metrics x", "job logs -f x", "recipe status", "methods", "validate x"):
        assert not acts(line.split()), line
