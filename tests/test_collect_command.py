"""`tp collect`, and outputs that an experiment declares, from `outputs.yaml` to the metrics of its run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from report_job import REPOSITORY

from tuneplane.collect.compact import NAME as COMPACT

TP = (sys.executable, "-m", "tuneplane.cli.main")

TRAIN = """\
set -euo pipefail
mkdir -p "$TUNEPLANE_OUT_DIR/logs"
for step in 1 2 3; do
  echo "{\\"at\\": {\\"step\\": $step}, \\"train\\": {\\"loss\\": 0.$step}}" >>"$TUNEPLANE_OUT_DIR/logs/verl.jsonl"
done
PYTHONPATH=$TUNEPLANE_WORK_DIR/.tuneplane/kernel python3 -c '
from tuneplane.report import log, finish
log({"sdk": 1.0}, step=7); finish()'
"""

OUTPUTS = """\
outputs:
  verl: {path: "logs/*.jsonl", kind: jsonl, step_key: at/step}
  boards: {path: "tb/**", kind: tensorboard}
  predictions: {path: predictions.csv}
"""


class Lab:
    """A lab with one experiment, of a user with a home of his own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.tp("init", "lab", cwd=home)
        self.tp("new", "exp", "--method", "custom/custom", cwd=home / "lab")
        self.experiment = home / "lab" / "experiments" / "exp"

    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "PYTHONPATH": str(REPOSITORY),
            "TUNEPLANE_STORE_DIR": str(self.home / "store"),
            "GIT_AUTHOR_NAME": "a",
            "GIT_AUTHOR_EMAIL": "a@example.org",
            "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@example.org",
        }

    def tp(self, *words: str, cwd: Path | None = None) -> CompletedProcess[str]:
        return subprocess.run(
            [*TP, *words],
            cwd=cwd or self.home / "lab",
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def commit(self) -> None:
        for words in (["add", "-A"], ["commit", "-qm", "x"]):
            subprocess.run(
                ["git", *words], cwd=self.home / "lab", env=self.environment(), check=True, timeout=60
            )

    def submit(self) -> str:
        """The run id."""
        done = self.tp("submit", "exp", "--profile", "local", "--observability-url", "https://x", "--json")
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["run_id"])

    def collect_until_ended(self, run_id: str) -> dict[str, Any]:
        for _ in range(60):
            done = self.tp("collect", run_id, "--json")
            assert done.returncode == 0, done.stderr
            (told,) = json.loads(done.stdout)
            if told["state"] in ("COMPLETED", "FAILED"):
                return dict(told)
            time.sleep(0.3)
        raise AssertionError(told)

    def folder(self, run_id: str) -> Path:
        (found,) = self.home.glob(f"tuneplane/runs/*/exp/{run_id}")
        return found


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.mark.slow
@pytest.mark.contract("C21")
def test_what_an_experiment_declares_is_collected_beside_what_it_reports(lab: Lab) -> None:
    (lab.experiment / "train.sh").write_text(TRAIN)
    (lab.experiment / "outputs.yaml").write_text(OUTPUTS)
    lab.commit()
    run_id = lab.submit()
    told = lab.collect_until_ended(run_id)
    assert told["state"] == "COMPLETED"
    values = {name: (v["last"], v["last_step"], v["points"]) for name, v in told["metrics"].items()}
    assert values == {"sdk": (1.0, 7.0, 1), "train/loss": (0.3, 3.0, 3)}
    declared = json.loads((lab.folder(run_id) / "job.json").read_text())["spec"]["outputs"]
    assert [o["name"] for o in declared][-3:] == ["verl", "boards", "predictions"]
    again = lab.tp("collect")
    assert re.search(rf"{run_id}  COMPLETED  2 +0 ", again.stdout), again.stdout
    (lab.folder(run_id) / "out" / "predictions.csv").write_text("1\n")
    assert "predictions" in lab.tp("job", "artifacts", run_id).stdout

    ingest = next((lab.folder(run_id) / "ingest").glob("*.jsonl"))
    (ingest.parent / "alien\x1b[31m.jsonl").write_text(
        ingest.read_text().replace(run_id, "other-20260102-030405-ab12")
    )
    (lab.folder(run_id) / "out" / "logs" / "link.jsonl").symlink_to("/etc/passwd")
    done = lab.tp("collect", run_id)
    assert f"note: {run_id}: out/logs/link.jsonl was passed over: a link\n" in done.stderr
    assert "[31m.jsonl was refused: it belongs to run 'other-" in done.stderr and "\x1b" not in done.stderr
    assert done.returncode == 0, "what is wrong with a file is told, and no failure"
    (lab.folder(run_id) / "job.json").chmod(0o600)
    (lab.folder(run_id) / "job.json").write_text("{")
    done = lab.tp("collect", run_id)
    assert done.returncode == 1 and "could not be read" in done.stderr


@pytest.mark.slow
def test_follow_reads_while_runs_come_and_end(lab: Lab) -> None:
    (lab.experiment / "train.sh").write_text(
        "set -euo pipefail\nPYTHONPATH=$TUNEPLANE_WORK_DIR/.tuneplane/kernel python3 -c '\n"
        "from tuneplane.report import log, finish\n"
        'for step in range(40_000): log({"loss": 1.0}, step=step)\nfinish()\'\n'
    )
    lab.commit()
    run_id = lab.submit()
    lab.collect_until_ended(run_id)
    assert (lab.folder(run_id) / COMPACT).is_file(), "of a finished run the points lie in one file"
    follower = subprocess.Popen(
        [*TP, "collect", "--follow", "--every", "0.2"],
        env=lab.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert follower.stdout is not None
    assert follower.stdout.readline() == f"{run_id} COMPLETED: 1 metrics\n"
    time.sleep(0.5)
    assert follower.poll() is None
    follower.send_signal(signal.SIGTERM)
    out, error = follower.communicate(timeout=10)
    assert (out, error, follower.returncode) == ("", "", 143)


FAULTS = """\
outputs:
  checkpoints: {path: elsewhere}
  Bad Name: {path: x}
  up: {path: ../x, kind: jsonl}
  kind: {path: x, kind: parquet}
  log: {path: x.jsonl, step_key: step, colour: red}
  nothing:
  twice: {path: a//b}
  open: {path: "a/[b"}
  whole: {path: "a/[!b]*/[]]x"}
runs: 1
"""


def test_all_that_is_wrong_with_declared_outputs_is_told_at_once(lab: Lab) -> None:
    path = lab.experiment / "outputs.yaml"
    path.write_text(FAULTS)
    lab.commit()
    done = lab.tp("validate", "exp")
    assert done.returncode == 2
    for line, words in (
        (2, "checkpoints is declared already, by every run"),
        (3, "'Bad Name' is not a name for outputs"),
        (4, "output ../x leaves the output folder"),
        (4, "output up: step_key goes with kind jsonl, and jsonl needs one"),
        (5, "outputs.kind.kind cannot be 'parquet'"),
        (6, "unknown key outputs.log.colour"),
        (7, "outputs.nothing is missing or empty"),
        (8, "output a//b has an empty part: two / in a row, or one at its end"),
        (9, "output a/[b has a [ without its ]"),
        (11, "unknown key runs"),
    ):
        assert f"{path}:{line}: {words}" in done.stderr, done.stderr
    assert f"{path}:10" not in done.stderr


@pytest.mark.parametrize("kind", ["a folder", "a link", "not YAML", "ignored"])
def test_a_file_of_outputs_that_cannot_be_taken_stops_the_submit(lab: Lab, kind: str) -> None:
    path = lab.experiment / "outputs.yaml"
    if kind == "a folder":
        path.mkdir()
        (path / "x").write_text("")
    elif kind == "a link":
        (lab.home / "outputs.yaml").write_text("outputs: {}\n")
        path.symlink_to(lab.home / "outputs.yaml")
    elif kind == "not YAML":
        path.write_text("outputs: [")
    else:
        path.write_text("outputs: {}\n")
        (lab.home / "lab" / ".gitignore").write_text("outputs.yaml\n")
    lab.commit()
    done = lab.tp("submit", "exp", "--profile", "local", "--observability-url", "https://x", "--dry-run")
    words = {
        "a folder": "is not a file",
        "a link": "is a link that leaves the experiment folder",
        "not YAML": "is not the YAML expected here",
        "ignored": "outputs.yaml is not in the commit",
    }
    assert done.returncode == 2 and words[kind] in done.stderr, done.stderr


def test_what_the_collector_s_files_start_exists() -> None:
    folder = REPOSITORY / "slurm" / "collector"
    for name, words in (
        ("tuneplane-collect.service", ["collect", "--follow"]),
        ("scrontab", ["collect"]),
    ):
        assert f"exec tp {' '.join(words)}'" in (folder / name).read_text()
        done = subprocess.run([*TP, *words, "--help"], capture_output=True, text=True, timeout=30, check=True)
        assert "Usage: tp collect" in done.stdout
    lines = (folder / "scrontab").read_text().splitlines()
    assert all(re.match(r"#|(\S+ ){5}/bin/bash -lc '", line) for line in lines)
