"""evalkit: the real lm-eval on a model that lies here, and the report that it leaves (C13)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from operation_lab import files

from tuneplane.evalkit.harness import Evaluation as Request
from tuneplane.evalkit.harness import read_results, write_report
from tuneplane.evalkit.model import digest_of, find_export
from tuneplane.evalkit.report import LARGEST_BYTES, SCHEMA, Report, Row, read_report, report_path, rows_of
from tuneplane.kernel.errors import OperationError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.recipes.adapters import NodeFacts, compile_command
from tuneplane.runs.evaluation import read_evaluation

ROOT = Path(__file__).resolve().parents[1]


def evaluate(
    *words: str, cwd: Path, library: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """`python3 -m tuneplane.evalkit` as a job starts it. library: a folder with a stand-in for lm-eval."""
    paths = [str(ROOT), *([str(library)] if library else [])]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(cwd),
        "HF_HOME": str(cwd / "hf"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "NRL_RUN_ID": "bench-1",
        **more,
    }
    return subprocess.run(
        [sys.executable, "-m", "tuneplane.evalkit", *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def stand_in(folder: Path) -> Path:
    """A folder with what stands in for lm-eval."""
    for path, text in files(folder).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def export(out: Path) -> Path:
    """Something that passes for an export."""
    folder = out / "hf_export"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_real_lm_eval_offline_on_an_export_of_a_run(tmp_path: Path) -> None:
    """A path that its own argument strings would cut, a lab with a folder of the name of a library, a task of
    the user's own whose data lies beside it."""
    out, tasks, work = tmp_path / "a, b=c 实验" / "out", tmp_path / "tasks", tmp_path / "work"
    (work / "datasets").mkdir(parents=True)
    (work / "datasets/__init__.py").write_text("raise SystemExit('the wrong datasets')")
    made = subprocess.run(
        [sys.executable, ROOT / "tests/eval_lab.py", out / "hf_export", tasks],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    done = evaluate(
        *(f"--out={out}", "--tasks=colours", f"--include-path={tasks}", "--num-fewshot=1"),
        *("--batch-size=auto", "--subject=chat-20260101-000000-aaaa"),
        cwd=work,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "eval/report.json").read_text())
    assert json.loads((out / "eval/reports/bench-1.json").read_text()) == report
    (row,) = report["results"]
    assert (row["task"], row["metric"], row["samples"], row["fewshot"]) == ("colours", "acc", 4, 1)
    assert 0 <= row["value"] <= 1 and row["stderr"] > 0 and row["higher_is_better"] is True
    assert report["schema"] == SCHEMA
    assert (report["run_id"], report["subject"]) == ("bench-1", "chat-20260101-000000-aaaa")
    assert report["model"]["digest"] == digest_of(out / "hf_export").sha256
    assert report["harness"]["name"] == "lm-eval"
    assert {"python", "lm_eval", "torch", "transformers"} <= report["versions"].keys()
    assert report["settings"]["num_fewshot"] == 1
    assert sorted(path.name for path in out.iterdir()) == ["eval", "hf_export"]
    (run := RunFolder(out.parent)).job.write_text("{}")
    (shown,) = read_evaluation(run).rows
    assert (shown.task, shown.value) == ("colours", row["value"])


def test_a_failure_of_lm_eval_is_told_with_its_exit_code_and_leaves_no_report(tmp_path: Path) -> None:
    library, out = stand_in(tmp_path / "library"), tmp_path / "out"
    export(out)
    done = evaluate(f"--out={out}", "--tasks=raises", cwd=tmp_path, library=library)
    assert done.returncode == 1
    assert "no such task: raises" in done.stderr
    assert "lm-eval ended with exit code 1, and no report was written" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (out / "eval").exists()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda out: (out / "hf_export").rename(out / "elsewhere"), "there is no export to evaluate"),
        (lambda out: (out / "hf_export/config.json").unlink(), "it has no config.json"),
        (
            lambda out: (out / "hf_export/model.bin").symlink_to("/etc/passwd"),
            "leads outside the output folder",
        ),
        (
            lambda out: (
                (out / "hf_export").rename(out.parent / "x"),
                (out / "hf_export").symlink_to("../x"),
            ),
            "leads outside the output folder",
        ),
    ],
)
def test_what_is_no_export_of_the_run_is_told(tmp_path: Path, spoil: Any, told: str) -> None:
    out = tmp_path / "out"
    export(out)
    spoil(out)
    with pytest.raises(OperationError, match=told):
        find_export(out)


def test_a_report_is_not_written_through_a_link(tmp_path: Path) -> None:
    out, outside = tmp_path / "out", tmp_path / "outside"
    out.mkdir()
    outside.mkdir()
    (out / "eval").symlink_to(outside)
    with pytest.raises(OperationError, match="leads outside the output folder"):
        write_report(Request("m", out, ("a",), run_id="r"), {"schema": SCHEMA})
    assert list(outside.iterdir()) == []


def test_results_that_lm_eval_could_not_write_are_no_success(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match="left no results"):
        read_results(tmp_path)


def test_rows_hold_each_metric_with_its_filter_error_and_samples() -> None:
    rows = rows_of(
        {
            "results": {
                "gsm8k": {
                    "alias": "gsm8k",
                    "sample_len": 5,
                    "exact_match,strict-match": 0.5,
                    "exact_match_stderr,strict-match": "N/A",
                    "exact_match,flexible-extract": float("nan"),
                },
                "group": {"alias": "group", "acc,none": 1, "acc_stderr,none": 0.25},
            },
            "n-shot": {"gsm8k": 8},
            "versions": {"gsm8k": 3.0, "group": None},
            "n-samples": {"gsm8k": {"original": 1319, "effective": 5}},
            "higher_is_better": {"gsm8k": {"exact_match": True}, "group": {"acc": None}},
        }
    )
    assert rows == [
        Row("gsm8k", "exact_match", 0.5, None, 5, True, 8, "strict-match", "3.0"),
        Row("gsm8k", "exact_match", None, None, 5, True, 8, "flexible-extract", "3.0"),
        Row("group", "acc", 1.0, 0.25, None, None, None, "none"),
    ]
    assert [row.name for row in rows] == ["exact_match, strict-match", "exact_match, flexible-extract", "acc"]


@pytest.mark.parametrize(
    "results", [{}, {"results": []}, {"results": {}}, {"results": {"a": {"alias": "a"}}}]
)
def test_results_of_another_form_are_refused(results: dict[str, Any]) -> None:
    with pytest.raises(OperationError):
        rows_of(results)


def test_the_digest_is_of_names_and_contents_whatever_the_modes(tmp_path: Path) -> None:
    folder = export(tmp_path / "one")
    first = digest_of(folder)
    assert (first.files, first.size_bytes) == (2, 102)
    (folder / "config.json").chmod(0o600)
    assert digest_of(folder) == first
    (folder / "config.json").write_text("[]")
    assert digest_of(folder).sha256 != first.sha256


GOOD = {"task": "a", "metric": "acc", "value": 0.5}


@pytest.mark.contract("C13")
@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is no JSON object"),
        ('{"schema": "x\\u001b[31m"}', "its schema is"),
        ('{"schema": 1}', "its schema is"),
        (json.dumps({"schema": SCHEMA, "results": {"a": 1}}), "its results are no list"),
        (f'{{"schema": "{SCHEMA}", "results": [], "x": "{"y" * LARGEST_BYTES}"}}', "is larger than 4 MB"),
    ],
)
def test_a_report_that_is_none_is_told_and_not_shown(tmp_path: Path, content: str, told: str) -> None:
    run = RunFolder(tmp_path)
    report_path(run.out).parent.mkdir(parents=True)
    report_path(run.out).write_text(content)
    run.job.write_text("{}")
    found = read_evaluation(run)
    assert found.rows == ()
    (notice,) = found.notices
    assert told in notice and notice.isprintable()


@pytest.mark.contract("C13")
def test_no_link_out_of_the_output_folder_is_followed(tmp_path: Path) -> None:
    run, outside = RunFolder(tmp_path / "run"), tmp_path / "secret.json"
    outside.write_text(json.dumps({"schema": SCHEMA, "results": [GOOD]}))
    (run.out / "eval").mkdir(parents=True)
    report_path(run.out).symlink_to(outside)
    (notice,) = read_evaluation(run).notices
    assert f"leads outside the output folder, to {outside}" in notice
    report_path(run.out).unlink()
    os.mkfifo(report_path(run.out))
    (notice,) = read_evaluation(run).notices
    assert "is no file" in notice


def test_rows_of_wrong_types_are_passed_over_and_counted(tmp_path: Path) -> None:
    rows: list[Any] = [
        GOOD,
        {**GOOD, "value": None, "samples": 1.5, "stderr": "N/A", "higher_is_better": 1},
        {**GOOD, "task": "t\ud800" * 400},
        {**GOOD, "value": "much"},
        {**GOOD, "value": True},
        {**GOOD, "task": 7},
        None,
    ]
    path = report_path(tmp_path)
    path.parent.mkdir()
    path.write_text(json.dumps({"schema": SCHEMA, "run_id": 7, "model": [], "results": rows}))
    found = read_report(path, tmp_path)
    assert isinstance(found, Report)
    assert [(row.value, row.samples) for row in found.rows] == [(0.5, None), (None, None), (0.5, None)]
    assert len(found.rows[2].task) <= 500 and found.rows[2].task.encode()
    assert found.notices == ("report.json: 4 of its rows cannot be read",)
    assert (found.run_id, found.model_digest) == ("", "")


def facts(**more: Any) -> NodeFacts:
    return NodeFacts(
        work_dir="/w",
        exp_dir="/w/experiments/bench",
        out_dir="/runs/chat-1/out",
        entrypoint="tuneplane.evalkit",
        nodes=1,
        gpus_per_node=1,
        node_rank=0,
        main_ip="10.0.0.1",
        main_port=1,
        **more,
    )


def test_the_commands_of_an_experiment_and_of_an_operation() -> None:
    params = {
        "tasks": ["a", "--b c"],
        "include_path": "tasks",
        "limit": 0.5,
        "num_fewshot": 0,
        "batch_size": None,
        "apply_chat_template": True,
        "system_instruction": "",
    }
    command = compile_command("evalkit", "train", facts(params=params, bindings={"model": "/m, x"}))
    assert command.argv == (
        *("python3", "-m", "tuneplane.evalkit", "--model=/m, x", "--out=/runs/chat-1/out"),
        *("--tasks=a", "--tasks=--b c", "--include-path=/w/experiments/bench/tasks"),
        *("--batch-size=auto", "--num-fewshot=0", "--limit=0.5", "--apply-chat-template"),
    )
    command = compile_command(
        "evalkit", "eval", facts(params={"tasks": ["a"], "include_path": "/t", "batch_size": 4})
    )
    assert command.argv == (
        *("python3", "-m", "tuneplane.evalkit", "--out=/runs/chat-1/out", "--subject=chat-1"),
        *("--tasks=a", "--include-path=/t", "--batch-size=4"),
    )
