"""`tp eval` and `--then eval` on this machine, in order and with nothing but processes (C7, C47)."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from operation_lab import MANIFEST, METHOD, SCAFFOLD, TRAIN, files
from warm_tp import run_tp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


class User:
    """A user of this machine with a lab of one experiment of the toy method."""

    def __init__(self, folder: Path, train: str = TRAIN) -> None:
        self.folder, self.lab, self.site = folder, folder / "lab", folder / "site"
        library = folder / "library"
        for path, text in files(library).items():
            self.write(library / path, text)
        (library / "bin/python3").chmod(0o755)
        self.write(self.site / "recipe/toy/model.yaml", MANIFEST)
        for name, text in SCAFFOLD.items():
            self.write(self.site / f"recipe/toy/model.scaffold/{name}", text)
        self.write(
            self.site / "cluster/bench.yaml",
            f"scheduler: local\ndevice: cpu\ngpus_per_node: 4\npath: {library}/bin:/usr/local/bin:/usr/bin:/bin\n",
        )
        self.write(folder / ".gitconfig", "[user]\nname = A\nemail = a@example.org\n")
        self.tp("init", str(self.lab), cwd=folder)
        self.tp("new", "mlp", "--method", METHOD)
        self.train(train)

    def train(self, text: str) -> None:
        self.write(self.lab / "experiments/mlp/train.sh", text)
        self.git("add", "-A")
        self.git("commit", "-qm", "x", "--allow-empty")

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def environment(self) -> dict[str, str]:
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.folder),
            "LANG": "C.UTF-8",
            "TUNEPLANE_CONFIG_DIR": str(self.site),
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        }

    def git(self, *words: str) -> None:
        subprocess.run(["git", *words], cwd=self.lab, env=self.environment(), check=True, timeout=30)

    def tp(self, *words: str, code: int = 0, cwd: Path | None = None) -> str:
        done = run_tp(words, cwd=cwd or self.lab, env=self.environment())
        assert done.returncode == code, done.stderr + done.stdout
        assert "Traceback" not in done.stderr
        return done.stdout if code == 0 else done.stderr

    def submit(self, *words: str) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self.tp("submit", "mlp", "--profile", "bench:2", "--json", *words))
        return said

    def status(self, run: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.tp("job", "status", run, "--json"))
        return value

    def wait(self, run: str, *states: str) -> dict[str, Any]:
        until = time.monotonic() + 60
        while True:
            status = self.status(run)
            if status["state"] in states:
                return status
            assert time.monotonic() < until and status["state"] in ("PENDING", "RUNNING"), status
            time.sleep(0.3)

    def runs(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "tuneplane/runs").glob("*/mlp/*"))


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


def report_of(run: Mapping[str, Any]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((Path(run["folder"]) / "out/eval/report.json").read_text())
    return value


def test_an_evaluation_follows_the_run_by_itself_and_its_rows_are_shown(user: User) -> None:
    first = user.submit("--then", "eval", "--tasks", "a,b", "--eval-set", "num_fewshot=2")
    (behind,) = first["then"]
    status = user.wait(behind["run_id"], "COMPLETED")
    assert (status["operation"], status["subject"]) == ("eval", first["run_id"])
    report = report_of(first)
    assert (report["run_id"], report["subject"]) == (behind["run_id"], first["run_id"])
    assert report["model"]["digest"].startswith("sha256:")
    rows = [(row["task"], row["metric"], row["value"], row["samples"]) for row in report["results"]]
    assert rows == [("a", "acc", 0.25, 9), ("b", "acc", 1.25, 9)]
    for run in (first["run_id"], behind["run_id"], "mlp"):  # by the experiment's name the run that trained
        told = user.tp("job", "status", run)
        assert "acc" in told and "1.25" in told and "0.125" in told
    assert f"run        {first['run_id']}" in user.tp("job", "status", "mlp")
    assert f"eval of    {first['run_id']}" in user.tp("job", "status", behind["run_id"])
    assert f"eval of {first['run_id']}" in user.tp("job", "ls")
    assert "eval/report.json" in user.tp("job", "artifacts", first["run_id"])
    assert "eval/a/acc" in user.tp("job", "metrics", behind["run_id"])
    assert "as submitted" in user.tp("job", "verify", behind["run_id"])


def test_what_follows_a_run_that_fails_does_not_run(user: User) -> None:
    user.train("sleep 1; exit 7\n")
    first = user.submit("--then", "eval", "--tasks", "a")
    behind = first["then"][0]["run_id"]
    status = user.wait(behind, "NOT_RUN")
    assert status["reason"] == f"not run: {first['run_id']} is FAILED"
    assert status["attempts"] == 0
    assert f"not run: {first['run_id']} is FAILED" in user.tp("job", "ls")
    refused = user.tp("eval", first["run_id"], "--tasks", "a", code=2)
    assert f"{first['run_id']} is FAILED, not COMPLETED" in refused
    why = user.tp("job", "why", behind)
    assert f"it was not run, because {first['run_id']} is FAILED" in why and "tp job retry" in why


def test_what_follows_a_run_that_is_stopped_does_not_run_and_can_be_retried(user: User) -> None:
    user.train(f"{TRAIN}[[ $TUNEPLANE_JOB_ATTEMPT = 1 ]] || sleep 1000\n")
    first = user.submit("--then", "eval", "--tasks", "a")
    behind = first["then"][0]["run_id"]
    user.wait(first["run_id"], "RUNNING")
    waiting = user.status(behind)
    assert waiting["state"] == "PENDING" and first["run_id"] in waiting["reason"]
    user.tp("job", "stop", first["run_id"])
    assert user.wait(behind, "NOT_RUN")["reason"] == f"not run: {first['run_id']} is CANCELLED"
    user.tp("job", "retry", first["run_id"])
    user.wait(first["run_id"], "COMPLETED")
    user.tp("job", "retry", behind)
    user.wait(behind, "COMPLETED")
    assert report_of(first)["run_id"] == behind


def test_two_evaluations_at_once_leave_both_reports_whole(user: User) -> None:
    first = user.submit()
    user.wait(first["run_id"], "COMPLETED")
    user.lab.rename(user.folder / "gone")  # the lab is not needed
    user.lab.mkdir()
    runs = [
        json.loads(user.tp("eval", "mlp", "--tasks", task, "--limit", "3", "--json"))["run_id"]
        for task in ("a", "b")
    ]
    for run, task in zip(runs, ("a", "b"), strict=True):
        user.wait(run, "COMPLETED")
        (row,) = user.status(run)["report"]["rows"]
        assert (row["task"], row["samples"]) == (task, 3)
    assert report_of(first)["run_id"] in runs


def test_a_failed_evaluation_has_lm_evals_exit_code_and_no_report(user: User) -> None:
    first = user.submit()
    user.wait(first["run_id"], "COMPLETED")
    run = json.loads(user.tp("eval", first["run_id"], "--tasks", "raises", "--json"))["run_id"]
    assert user.wait(run, "FAILED")["code"] == 1
    log = user.tp("job", "logs", run)
    assert "no such task: raises" in log
    assert "lm-eval ended with exit code 1, and no report was written" in log
    assert not (Path(first["folder"]) / "out/eval").exists()


def test_a_run_without_an_export_is_told_so(user: User) -> None:
    user.train("exit 0\n")
    first = user.submit()
    user.wait(first["run_id"], "COMPLETED")
    run = json.loads(user.tp("eval", first["run_id"], "--tasks", "a", "--json"))["run_id"]
    user.wait(run, "FAILED")
    assert "there is no export to evaluate" in user.tp("job", "logs", run)
    assert "the last it printed: " in (why := user.tp("job", "why", run).splitlines()[0])
    assert why.endswith("there is no export to evaluate")


@pytest.mark.contract("C30")
def test_all_faults_of_a_run_and_of_what_follows_are_told_at_once_and_nothing_is_made(user: User) -> None:
    told = user.tp(
        *("submit", "mlp", "--profile", "bench:9", "--set", "x=1", "--then", "export", "--then", "eval"),
        *("--include-path", "/nowhere/tasks", "--eval-set", "num_fewshot=-1"),
        code=2,
    )
    for words in (
        "toy/model has no parameter x",
        "9 processes do not fit",
        "the evalkit adapter compiles train, eval alone: export is refused",
        "'/nowhere/tasks' is no folder",
        "which tasks are to be evaluated?",
        "num_fewshot",
    ):
        assert words in told, told
    assert user.runs() == []


def test_a_folder_of_tasks_in_nobodys_home_is_told_so(user: User) -> None:
    run = user.submit()["run_id"]
    told = user.tp("eval", run, "--tasks", "a", "--include-path", "~nobody-here/tasks", code=2)
    assert "'~nobody-here/tasks' is no folder" in told


def test_an_operation_on_another_profile_lies_where_its_run_does_and_nodes_must_see_that(user: User) -> None:
    shared = user.folder / "shared"
    shared.mkdir()
    cluster = f"{FAR}shared: [{shared}]\nstorage_root: {shared}/tuneplane\n"
    user.write(user.site / "cluster/far.yaml", cluster)
    run = user.submit()["run_id"]
    user.wait(run, "COMPLETED")
    told = user.tp("eval", run, "--tasks", "a", "--profile", "far:1", code=2)
    assert "compute nodes would not reach the run's folder" in told
    assert "name a profile whose nodes see the folder of the run worked on" in told


FAR = "scheduler: slurm\ndevice: cpu\ngpus_per_node: 4\ncpus_per_node: 4\nmemory_per_node: 8G\n"

SLURM = """#!/bin/sh
case "$(basename "$0") $*" in
  *--test-only*) exit 0 ;;
  "sbatch "*--dependency=*) touch "$HOME/down"; echo "sbatch: error: no controller" >&2; exit 1 ;;
  "sbatch "*) echo "Submitted batch job 101"; exit 0 ;;
esac
[ ! -e "$HOME/down" ] || { echo "$0: error: Unable to contact slurm controller" >&2; exit 1; }
"""
"""A Slurm whose controller goes away between the first job and the one that is to wait for it."""


def test_a_run_that_cannot_be_taken_back_is_named_with_its_job(user: User) -> None:
    user.write(user.site / "cluster/far.yaml", FAR)
    for name in ("sbatch", "squeue", "scancel", "scontrol", "sacct"):
        user.write(user.folder / "slurm" / name, SLURM)
        (user.folder / "slurm" / name).chmod(0o755)
    path = f"{user.folder}/slurm:{user.environment()['PATH']}"
    words = ("submit", "mlp", "--profile", "far:1", "--then", "eval", "--tasks", "a")
    done = run_tp(words, cwd=user.lab, env={**user.environment(), "PATH": path})
    (run,) = user.runs()
    assert done.returncode == 1
    assert f"eval was not taken, so {run} could not be stopped: sbatch refused: " in done.stderr
    assert f"{run} is still queued, as job 101: " in done.stderr
    assert f"tp job stop {run}" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["eval", "mlp", "--tasks", "a"], "mlp has no run yet"),
        (["eval", "nobody", "--tasks", "a"], "no run 'nobody' of yours"),
        (["export", "mlp"], "the evalkit adapter compiles train, eval alone: export is refused"),
        (["submit", "mlp", "--profile", "bench:1", "--tasks", "a"], "of an evaluation, and none follows"),
        (["submit", "mlp", "--profile", "bench:1", "--then", "eval", "--then", "export"], "in this order"),
        (["render", "mlp", "--profile", "bench:1", "--then", "eval"], "as it is submitted"),
    ],
)
def test_what_cannot_be_is_refused(user: User, words: list[str], told: str) -> None:
    assert told in user.tp(*words, code=2)
    assert user.runs() == []


@pytest.mark.contract("C7")
def test_no_operation_is_there_for_a_custom_run_nor_behind_one(user: User) -> None:
    """By the experiment's name, of a run of it, and behind one that is yet to be made."""
    user.tp("new", "own", "--method", "custom/custom")
    user.write(user.lab / "experiments/own/train.sh", "exit 0\n")
    user.git("add", "-A")
    user.git("commit", "-qm", "own")
    flags = ("--profile", "bench:1", "--observability-url", "https://tracker.example.org")
    for operation, more in (("export", ()), ("eval", ("--tasks", "a"))):
        for words in ((operation, "own", *more), ("submit", "own", *flags, "--then", operation, *more)):
            told = user.tp(*words, code=2)
            assert "custom adapter" in told and operation in told
    run = json.loads(user.tp("submit", "own", *flags, "--json"))["run_id"]
    user.wait(run, "COMPLETED")
    for operation in ("export", "eval"):
        told = user.tp(operation, run, code=2)
        assert f"the custom adapter compiles train alone: {operation} is refused" in told


def test_an_operation_is_not_evaluated_itself(user: User) -> None:
    first = user.submit("--then", "eval", "--tasks", "a", "--follow")
    behind = first["then"][0]["run_id"]
    user.wait(behind, "COMPLETED")
    assert f"{behind} is an eval itself, of {first['run_id']}" in user.tp(
        "eval", behind, "--tasks", "a", code=2
    )


def test_a_dry_run_and_a_validation_make_nothing(user: User) -> None:
    words = ("mlp", "--profile", "bench:1", "--then", "eval", "--tasks", "a")
    assert "nothing to fault" in user.tp("validate", *words)
    said = json.loads(user.tp("submit", *words, "--dry-run", "--json"))
    assert "then eval, on bench:1" in said["notices"]
    assert user.runs() == []


def test_an_evaluation_is_an_experiment_too(user: User) -> None:
    """A method of its own: tasks in config.yaml, the model by --model, which is bound and looked at."""
    user.tp("new", "bench", "--method", "evalkit/benchmark")
    user.write(user.lab / "experiments/bench/config.yaml", "tasks: [a]\nlimit: 4\n")
    user.git("add", "-A")
    user.git("commit", "-qm", "bench")
    missing = user.tp(
        "submit", "bench", "--profile", "bench:1", "--set", "tasks=[]", "--set", "sed=1", code=2
    )
    assert "evalkit/benchmark needs --model" in missing and "no parameter sed" in missing
    model = user.folder / "a model"
    for name in ("config.json", "tokenizer.json"):
        user.write(model / name, "{}")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    library = user.folder / "library/bin/python3"  # here it is evalkit that is started, not a training
    library.write_text(library.read_text().replace('*" --subject="*', '*" -m tuneplane.evalkit "*'))
    said = json.loads(user.tp("submit", "bench", "--profile", "bench:1", "--model", str(model), "--json"))
    user.wait(said["run_id"], "COMPLETED")
    report = report_of(said)
    assert (report["subject"], report["model"]["path"]) == (None, str(model))
    (row,) = user.status("bench")["report"]["rows"]
    assert (row["task"], row["samples"]) == ("a", 4)


def test_a_subject_that_gc_cleared_cannot_be_evaluated_and_its_report_stays(user: User) -> None:
    first = user.submit("--then", "eval", "--tasks", "a", "--follow")
    behind = first["then"][0]["run_id"]
    user.wait(behind, "COMPLETED")
    time.sleep(1)
    user.tp("job", "gc", "--older-than", "0m", "--yes")
    told = user.tp("eval", first["run_id"], "--tasks", "a", code=2)
    assert "has no capsule any more: tp job gc cleared it" in told
    (row,) = user.status(first["run_id"])["report"]["rows"]
    assert row["task"] == "a"


def test_a_report_that_a_trainer_spoiled_is_told_with_the_status(user: User) -> None:
    user.train(
        'mkdir -p "$TUNEPLANE_OUT_DIR/eval" && ln -s /etc/passwd "$TUNEPLANE_OUT_DIR/eval/report.json"\n'
    )
    first = user.submit()
    user.wait(first["run_id"], "COMPLETED")
    (notice,) = user.status(first["run_id"])["report"]["notices"]
    assert "eval/report.json leads outside the output folder, to /etc/passwd" in notice
    assert "COMPLETED" in user.tp("job", "status", first["run_id"])
