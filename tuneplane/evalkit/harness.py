"""One evaluation: lm-eval started with a configuration of its own, its results read, the report written whole.

`__main__` calls it with what the adapter's command line said.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tuneplane.evalkit.model import Digest, digest_of
from tuneplane.evalkit.report import SCHEMA, Row, as_values, own_report_path, report_path, rows_of
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.files import write_json

MODULE = "lm_eval"
"""lm-eval's package; its distribution is called lm-eval, and was lm_eval."""

ENTRY = (
    "import sys, runpy; sys.path[:] = [p for p in sys.path if p]; "
    f"runpy.run_module({MODULE!r}, run_name='__main__', alter_sys=True)"
)
"""As `python -m lm_eval`, but that nothing in the working directory is imported in place of a library."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""Compute nodes have no internet: with these a name that is not in the cache fails at once, not after minutes."""

VERSIONS = ("lm_eval", "torch", "transformers", "datasets", "accelerate")


@dataclass(frozen=True)
class Evaluation:
    """What is asked. model: a folder, or the hub's name of one in the cache. limit: samples a task,
    or their share below 1.

    include_path: a folder of task files. run_id: of this evaluation; subject: of the run that trained the model.
    """

    model: str
    out: Path
    tasks: tuple[str, ...]
    num_fewshot: int | None = None
    limit: float | None = None
    batch_size: int | str = 1
    apply_chat_template: bool = False
    system_instruction: str = ""
    include_path: str = ""
    dtype: str = "auto"
    seed: int | None = None
    run_id: str = ""
    subject: str = ""


def configuration(asked: Evaluation, results: Path) -> dict[str, Any]:
    """lm-eval's own configuration (`lm_eval run --config`): no path is pasted into one of its argument strings."""
    values: dict[str, Any] = {
        "model": "hf",
        "model_args": {"pretrained": asked.model, "dtype": asked.dtype},
        "tasks": list(asked.tasks),
        "batch_size": asked.batch_size,
        "apply_chat_template": asked.apply_chat_template,
        "output_path": str(results / "results.json"),
    }
    optional = {
        "num_fewshot": asked.num_fewshot,
        "limit": asked.limit,
        "seed": asked.seed,
        "system_instruction": asked.system_instruction or None,
        "include_path": asked.include_path or None,
    }
    return {**values, **{name: value for name, value in optional.items() if value is not None}}


def evaluate(asked: Evaluation) -> list[Row]:
    """Run lm-eval and write its report; the rows. Raises OperationError, with lm-eval's own exit code."""
    if importlib.util.find_spec(MODULE) is None:
        raise OperationError(
            Fault(
                f"lm-eval is not installed in this image: No module named {MODULE!r}",
                sys.executable,
                "name an image that has it: --image, or the site's runtime registry",
            )
        )
    started = time.time()
    digest = Digesting(Path(asked.model) if Path(asked.model).is_dir() else None)
    with tempfile.TemporaryDirectory(prefix="tuneplane-eval-") as folder:
        results = Path(folder)
        config = results / "config.json"
        config.write_text(json.dumps(configuration(asked, results)), encoding="utf-8")
        code = run_harness([sys.executable, "-c", ENTRY, "run", "--config", str(config)], asked.include_path)
        if code:
            raise HarnessError(code)
        found = read_results(results)
    rows = rows_of(found)
    value = report_value(asked, found, rows, digest.wait(), started, time.time())
    write_report(asked, value)
    return rows


class HarnessError(OperationError):
    """lm-eval failed: its exit code is the command's own."""

    def __init__(self, code: int) -> None:
        self.code = code if code > 0 else 128 - code
        how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        super().__init__(
            Fault(f"lm-eval ended with {how}, and no report was written", "", "its own words stand above")
        )


def run_harness(argv: list[str], include_path: str) -> int:
    """lm-eval's exit code, its words where this process's go. It works in the folder of tasks, where one is given,
    so that a task finds its data beside it. TERM is passed on."""
    environ = {**os.environ, **OFFLINE}
    child = subprocess.Popen(argv, env=environ, cwd=include_path or None, stdin=subprocess.DEVNULL)

    def pass_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        return child.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def read_results(folder: Path) -> dict[str, Any]:
    """lm-eval's own results, the newest where it wrote several. Raises OperationError where there are none."""
    files = sorted(folder.glob("results_*.json"))
    if not files:  # a failure to write them is a warning to lm-eval, with exit code 0
        raise OperationError(Fault("lm-eval ended well and left no results", "", "its own words stand above"))
    try:
        value = json.loads(files[-1].read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OperationError(Fault(f"lm-eval's results cannot be read: {error}", files[-1].name)) from None
    if not isinstance(value, dict):
        raise OperationError(Fault("lm-eval's results are no JSON object", files[-1].name))
    return value


def report_value(
    asked: Evaluation,
    found: Mapping[str, Any],
    rows: list[Row],
    digest: Digest | None,
    started: float,
    ended: float,
) -> dict[str, Any]:
    """The report as it stands in the file. Pure but for the versions of what is installed."""
    settings = {
        "tasks": list(asked.tasks),
        "num_fewshot": asked.num_fewshot,
        "limit": asked.limit,
        "batch_size": asked.batch_size,
        "apply_chat_template": asked.apply_chat_template,
        "system_instruction": asked.system_instruction,
        "include_path": asked.include_path,
        "dtype": asked.dtype,
        "seed": asked.seed,
    }
    config = found.get("config")
    revision = config.get("model_sha") if isinstance(config, dict) else None
    return {
        "schema": SCHEMA,
        "run_id": asked.run_id,
        "subject": asked.subject or None,
        "started_at": _clock(started),
        "ended_at": _clock(ended),
        "model": {
            "path": asked.model,
            "digest": digest.sha256 if digest else None,
            "files": digest.files if digest else None,
            "size_bytes": digest.size_bytes if digest else None,
            "revision": revision or None,
        },
        "harness": {"name": "lm-eval", "version": _version(MODULE)},
        "versions": {
            "python": platform.python_version(),
            **{name: version for name in VERSIONS if (version := _version(name))},
        },
        "settings": settings,
        "results": [as_values(row) for row in rows],
    }


def write_report(asked: Evaluation, value: Mapping[str, Any]) -> None:
    """Write both: the evaluation's own, and the latest of the output folder. Raises OperationError."""
    latest = report_path(asked.out)
    paths = [own_report_path(asked.out, asked.run_id)] if asked.run_id else []
    root = os.path.realpath(asked.out)
    for path in (*paths, latest):
        if os.path.commonpath([root, os.path.realpath(path.parent)]) != root:
            raise OperationError(
                Fault("it leads outside the output folder", str(path.parent), "remove that link")
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, value)
        except OSError as error:
            raise OperationError(Fault(f"the report is not written: {error.strerror}", str(path))) from None


class Digesting:
    """A model's digest, read in a thread of its own while lm-eval works: of a large one it takes minutes."""

    def __init__(self, folder: Path | None) -> None:
        self.digest: Digest | None = None
        self.error: OSError | None = None
        self.folder = folder
        self.thread = threading.Thread(target=self._read, name="digest", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            self.digest = digest_of(self.folder) if self.folder else None
        except OSError as error:
            self.error = error

    def wait(self) -> Digest | None:
        """The digest; None of a model that is no folder. Raises OperationError where it could not be read."""
        self.thread.join()
        if self.error is not None:
            what = f"the model changed or cannot be read: {self.error.strerror}"
            raise OperationError(Fault(what, str(self.error.filename or self.folder)))
        return self.digest


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
