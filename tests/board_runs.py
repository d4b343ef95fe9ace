"""Storage roots full of runs as their trainers would have left them: for tests of the board and its bench."""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from launch_jobs import local_job, write_run

from tuneplane.kernel.files import write_json
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import Submission
from tuneplane.runs.index import current_user

TOKEN = "a-token-of-these-runs"
TOKEN_SHA256 = hashlib.sha256(TOKEN.encode()).hexdigest()

Row = tuple[float, float, Mapping[str, float]]  # step, unix time, values


def make_run(root: Path, run_id: str, started_s: float, *, code: int | None = 0, **job: Any) -> RunFolder:
    """A run with one attempt that ended with `code`, or still runs as this process where that is None."""
    experiment = run_id.rsplit("-", 3)[0]
    folder = root / "runs" / current_user() / experiment / run_id
    run = write_run(
        local_job(
            folder,
            metadata__experiment=experiment,
            spec__reporting={
                "enabled": True,
                "endpoint": f"file://{folder}/ingest",
                "token_sha256": TOKEN_SHA256,
            },
            **job,
        )
    )
    begin_attempt(run, 0, started_s)
    if code is not None:
        end_attempt(run, 0, started_s + 3600, code)
    return run


def begin_attempt(run: RunFolder, number: int, started_s: float) -> None:
    """Attempt `number`, running in this very process."""
    import os
    import socket

    from tuneplane.kernel.process import start_ticks

    pid = os.getpid()
    job = Submission(f"local-{number + 1}", "tp", started_s, socket.gethostname(), pid, start_ticks(pid))
    write_json(run.submissions / f"{job.job_id}.json", vars(job))
    folder = run.attempt(number)
    folder.path.mkdir(parents=True)
    host = socket.gethostname()
    start = {"job_id": job.job_id, "hosts": [host], "host": host, "pid": pid, "started_at": started_s}
    write_json(folder.start, start)
    write_json(
        folder.node_record(0), {"rank": 0, "host": host, "state": "running", "code": None, "reason": ""}
    )


def end_attempt(run: RunFolder, number: int, ended_s: float, code: int) -> None:
    """It ended, for good."""
    end = {"code": code, "reason": None if code == 0 else "ValueError: loss is nan", "for_good": True}
    write_json(run.attempt(number).end, {**end, "ended_at": ended_s})


def write_points(
    run: RunFolder,
    rows: Iterable[Row],
    *,
    attempt: int = 0,
    rank: int = 0,
    hparams: Mapping[str, Any] | None = None,
    dropped: int = 0,
) -> Path:
    """An ingest file, as the writer of a trainer makes it."""
    header = {
        "v": 1,
        "run_id": run.run_id,
        "attempt": attempt,
        "rank": rank,
        "host": "n1",
        "pid": 7,
        "token_sha256": TOKEN_SHA256,
        "started": 1.0,
        "tuneplane": "0",
    }
    bodies: list[dict[str, Any]] = [{"t": 1.0, "h": dict(hparams)}] if hparams else []
    bodies += [{"t": t, "s": step, "m": dict(values)} for step, t, values in rows]
    if dropped:
        bodies.append({"t": time.time(), "d": {"points": dropped, "values": 0}})
    lines = [json.dumps(header), *(json.dumps({"n": n, **body}) for n, body in enumerate(bodies))]
    path = run.ingest / f"{attempt}-n1-{rank}-7.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def training(
    seed: int, steps: int, started_s: float, step_s: float = 1.0, first: int = 0, noise: float = 0.08
) -> list[Row]:
    """A plausible training: a noisy loss that falls, accuracy, learning rate, speed."""
    chance = random.Random(seed)
    rate, level = chance.uniform(0.5, 2.0), chance.uniform(0.1, 0.4)
    rows: list[Row] = []
    for step in range(first, first + steps):
        x = step / 1000
        loss = level + 2.2 * math.exp(-3 * rate * x) + chance.gauss(0, noise) * (0.3 + math.exp(-2 * x))
        values = {
            "train/loss": max(loss, 0.01),
            "train/lr": 3e-4 * min(1, step / 100) * 0.5 * (1 + math.cos(math.pi * min(1, x))),
            "train/grad_norm": abs(chance.lognormvariate(0, 0.4)),
            "perf/tokens_per_s": 41_000 + chance.gauss(0, 900),
        }
        if step % 20 == 0:
            values["validation/loss"] = max(loss + 0.1, 0.01)
            values["validation/accuracy"] = min(0.99, 1 - level - 0.6 * math.exp(-3 * rate * x))
        rows.append((step, started_s + (step - first) * step_s, values))
    return rows


def hardware(seed: int, started_s: float, samples: int, nodes: int = 1, gpus: int = 4) -> list[Row]:
    """What a sampler would say every ten seconds."""
    chance = random.Random(seed)
    rows: list[Row] = []
    for i in range(samples):
        at = started_s + 10 * i
        values: dict[str, float] = {}
        for node in range(nodes):
            place = f"system/node{node}"
            for gpu in range(gpus):
                values[f"{place}/gpu{gpu}/utilization_percent"] = min(100, max(0, chance.gauss(93, 6)))
                values[f"{place}/gpu{gpu}/memory_used_bytes"] = 61e9 + 2e9 * gpu + chance.gauss(0, 2e8)
                values[f"{place}/gpu{gpu}/power_watts"] = 560 + chance.gauss(0, 40)
                values[f"{place}/gpu{gpu}/temperature_celsius"] = 58 + gpu + chance.gauss(0, 1)
            values[f"{place}/cpu_percent"] = min(100, abs(chance.gauss(35, 8)))
            values[f"{place}/memory_used_bytes"] = 180e9 + chance.gauss(0, 4e9)
            values[f"{place}/network_received_bytes_per_s"] = abs(chance.gauss(1.2e9, 3e8))
        rows.append((int(at), at, values))
    return rows
