"""`eval/report.json`: its schema, made of lm-eval's results, and read again from a folder that nobody vouches for.

`harness.py` writes one, `tp job status` and the board read it. docs/evaluation.md explains every key.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tuneplane.kernel.errors import Fault, OperationError

SCHEMA = "tuneplane/eval-report/v1"

FOLDER, NAME = "eval", "report.json"
"""Below the output folder (C13)."""

OF_RUN = "reports"
"""Below `eval`: every evaluation's own report, `<its run id>.json`; `report.json` is the latest."""

LARGEST_BYTES = 4 << 20
"""Of a report that is read: the rows of ten thousand tasks are smaller."""

MOST_ROWS = 10_000

LONGEST = 500
"""Characters of a name that is shown."""


@dataclass(frozen=True)
class Row:
    """One value of one task. samples: how many were judged. fewshot: examples in the prompt.

    filter: lm-eval's filter, `none` where the answer was taken as it is. stderr: null where it has none.
    version: of the task; values of two versions are not comparable.
    """

    task: str
    metric: str
    value: float | None
    stderr: float | None = None
    samples: int | None = None
    higher_is_better: bool | None = None
    fewshot: int | None = None
    filter: str = "none"
    version: str = ""

    @property
    def name(self) -> str:
        """The metric, and its filter where that says anything."""
        return self.metric if self.filter == "none" else f"{self.metric}, {self.filter}"


@dataclass(frozen=True)
class Report:
    """What an evaluation found, and of what."""

    rows: tuple[Row, ...]
    run_id: str = ""
    subject: str = ""
    model_digest: str = ""
    harness: str = ""
    ended_at: str = ""
    notices: tuple[str, ...] = field(default=())


def rows_of(results: Mapping[str, Any]) -> list[Row]:
    """The rows of lm-eval's `results_*.json`. Raises OperationError where it is not of its form."""
    tasks = results.get("results")
    if not isinstance(tasks, dict):
        raise OperationError(Fault("lm-eval's results have no `results`", "results_*.json"))
    better, shots, counts = (_table(results, key) for key in ("higher_is_better", "n-shot", "n-samples"))
    versions = _table(results, "versions")
    rows = []
    for task, values in tasks.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            metric, comma, named = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            rows.append(
                Row(
                    task=task,
                    metric=metric,
                    value=_number(value),
                    stderr=_number(values.get(f"{metric}_stderr,{named}")),
                    samples=_whole(_table(counts, task).get("effective")),
                    higher_is_better=_flag(_table(better, task).get(metric)),
                    fewshot=_whole(shots.get(task)),
                    filter=named,
                    version=_version(versions.get(task)),
                )
            )
    if not rows:
        raise OperationError(Fault("lm-eval's results hold no value", "results_*.json"))
    return rows


def as_values(row: Row) -> dict[str, Any]:
    """A row as it stands in the file."""
    return asdict(row)


def report_path(out: Path) -> Path:
    """Where the latest report of an output folder lies."""
    return out / FOLDER / NAME


def own_report_path(out: Path, run_id: str) -> Path:
    """Where the report of one evaluation lies."""
    return out / FOLDER / OF_RUN / f"{run_id}.json"


def read_report(path: Path, out: Path) -> Report | str | None:
    """The report at `path`, below the output folder `out`; why it is not read; None where there is none.

    Nothing in it is trusted: a link outside is not followed, a huge one not read, and values of wrong types are
    passed over with a word about it.
    """
    try:
        if not os.path.lexists(path):
            return None
        real, root = os.path.realpath(path), os.path.realpath(out)
        if out.is_symlink() or os.path.commonpath([root, real]) != root:
            return f"{path.relative_to(out)} leads outside the output folder, to {real}"
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return f"{path.relative_to(out)} is no file"
            if status.st_size > LARGEST_BYTES:
                return f"{path.relative_to(out)} is larger than {LARGEST_BYTES >> 20} MB"
            text = file.read(LARGEST_BYTES)
        value = json.loads(text.decode("utf-8", "replace"))
    except OSError as error:
        return f"{path.relative_to(out)}: {error.strerror}"
    except (ValueError, RecursionError):
        return f"{path.relative_to(out)} is not JSON"
    return report_of(value) if isinstance(value, dict) else f"{path.relative_to(out)} is no JSON object"


def report_of(value: Mapping[str, Any]) -> Report | str:
    """A report of the values in a file; why not."""
    schema = value.get("schema")
    if schema != SCHEMA:
        said = schema[:LONGEST] if isinstance(schema, str) else "none"
        return f"report.json: its schema is {said!r}, not {SCHEMA!r}"
    given = value.get("results")
    if not isinstance(given, list):
        return "report.json: its results are no list"
    rows = [row for item in given[:MOST_ROWS] if (row := _row(item)) is not None]
    notices = []
    if len(given) > MOST_ROWS:
        notices.append(f"report.json: {len(given) - MOST_ROWS} rows more are not shown")
    passed_over = min(len(given), MOST_ROWS) - len(rows)
    if passed_over:
        notices.append(f"report.json: {passed_over} of its rows cannot be read")
    return Report(
        rows=tuple(rows),
        run_id=_text(value.get("run_id")),
        subject=_text(value.get("subject")),
        model_digest=_text(_table(value, "model").get("digest")),
        harness=" ".join(filter(None, (_text(_table(value, "harness").get(k)) for k in ("name", "version")))),
        ended_at=_text(value.get("ended_at")),
        notices=tuple(notices),
    )


def _row(item: Any) -> Row | None:
    if not isinstance(item, dict):
        return None
    task, metric, value = item.get("task"), item.get("metric"), item.get("value")
    if not isinstance(task, str) or not isinstance(metric, str):
        return None
    if value is not None and _number(value) is None:
        return None
    return Row(
        task=_text(task),
        metric=_text(metric),
        value=_number(value),
        stderr=_number(item.get("stderr")),
        samples=_whole(item.get("samples")),
        higher_is_better=_flag(item.get("higher_is_better")),
        fewshot=_whole(item.get("fewshot")),
        filter=_text(item.get("filter")) or "none",
        version=_text(item.get("version")),
    )


def _table(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    inner = value.get(key)
    return inner if isinstance(inner, dict) else {}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53 else None


def _version(value: Any) -> str:
    return str(value)[:LONGEST] if isinstance(value, (str, int, float)) else ""


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _text(value: Any) -> str:
    """Text cut, half surrogate pairs replaced: no file and no page takes them."""
    return value[:LONGEST].encode("utf-8", "replace").decode() if isinstance(value, str) else ""
