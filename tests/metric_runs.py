"""Runs with points for tests of what shows and exports them: real run folders, lines as the SDK writes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from launch_jobs import local_job, write_run

from tuneplane.kernel.files import write_json
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import record_submission
from tuneplane.runs.index import current_user

BEGAN_S = 1_767_323_045.0
TOKEN_SHA256 = hashlib.sha256(b"a-token-of-this-run").hexdigest()

Values = Mapping[str, float]


class MetricRun:
    """A run below `home`, submitted to this machine; `log` writes what its job would have written."""

    def __init__(
        self, home: Path, run_id: str = "ring-20260102-030405-ab12", job: str = "local-4999999"
    ) -> None:
        where = home / "tuneplane" / "runs" / current_user() / run_id.rsplit("-", 3)[0] / run_id
        self.folder: RunFolder = write_run(local_job(where, spec__reporting__token_sha256=TOKEN_SHA256))
        self.run_id, self.job_id = run_id, job
        self._numbers: dict[Path, int] = {}
        record_submission(self.folder, job, "tp", 1)

    def attempt(self, number: int, code: int | None = None) -> None:
        """An attempt as its node agent records it, ended where there is an exit code."""
        folder = self.folder.attempt(number)
        folder.path.mkdir(parents=True, exist_ok=True)
        start = {"attempt": number, "job_id": self.job_id, "started_at": BEGAN_S + 1000 * number, "nodes": 1}
        write_json(folder.start, start)
        if code is not None:
            write_json(folder.end, {"code": code, "reason": "", "ended_at": BEGAN_S + 1000 * number + 900})

    def log(
        self,
        points: Iterable[tuple[float, Values]],
        attempt: int = 0,
        rank: int = 0,
        hparams: Mapping[str, Any] | None = None,
        time_s: float | None = None,
        **more: Any,
    ) -> None:
        """Points of one process, a second apart. more: lines that are no points, such as d={"points": 2}."""
        path = self.folder.ingest / f"{attempt}-n1-{rank}-1.jsonl"
        lines: list[dict[str, Any]] = []
        if path not in self._numbers:
            self._numbers[path] = 0
            lines.append(
                {
                    **{"v": 1, "run_id": self.run_id, "token_sha256": TOKEN_SHA256, "attempt": attempt},
                    **{"rank": rank, "host": "n1", "pid": 1, "started": BEGAN_S + 1000 * attempt},
                }
            )
        if hparams:
            lines.append({"n": self._next(path), "h": dict(hparams)})
        for name, value in more.items():
            lines.append({"n": self._next(path), name: value})
        for step, values in points:
            number = self._next(path)
            at = BEGAN_S + 1000 * attempt + number if time_s is None else time_s + number
            lines.append({"n": number, "t": at, "s": step, "m": dict(values)})
        with path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def _next(self, path: Path) -> int:
        self._numbers[path] += 1
        return self._numbers[path] - 1
