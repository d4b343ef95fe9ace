"""One backend of the report rows, in a process of its own: `report_backend.py BACKEND MODE FOLDER`. For `report`.

Runs under the Python that has the backend; prints JSON.
"""

from __future__ import annotations

import json
import os
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
RATE_HZ = 100
PACED_S = 3
STALL_S = 4
Log = Callable[[dict[str, float], int], Any]


def tuneplane(folder: str) -> Log:
    os.environ.update(
        TUNEPLANE_JOB_TOKEN="t", TUNEPLANE_JOB_ENDPOINT=Path(folder).as_uri(), TUNEPLANE_JOB_RUN_ID="run"
    )
    sys.path.insert(0, str(REPOSITORY))
    from tuneplane.report import init, log

    init({"lr": 0.1})
    return log


def plain_json(folder: str) -> Log:
    file = Path(folder, "points.jsonl").open("a")  # noqa: SIM115 (for as long as the process lives)

    def log(metrics: dict[str, float], step: int) -> None:
        file.write(json.dumps({"step": step, **metrics}) + "\n")
        file.flush()

    return log


def tensorboard(folder: str) -> Log:
    """What torch.utils.tensorboard calls underneath."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(folder)

    def log(metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    return log


def trackio(folder: str) -> Log:
    os.environ.update(TRACKIO_DIR=folder, HF_HUB_OFFLINE="1")
    import trackio as module

    run = module.init("bench", embed=False, auto_log_gpu=False, auto_log_cpu=False)
    return lambda metrics, step: run.log(metrics, step=step)


def wandb(folder: str) -> Log:
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=folder)
    import wandb as module

    run = module.init(project="bench", settings=module.Settings(x_disable_stats=True))
    return lambda metrics, step: run.log(metrics, step=step)


def count_tuneplane(folder: Path) -> int:
    return sum(
        line.count('"m":') for path in folder.glob("*.jsonl") for line in path.read_text().split("\n")[:-1]
    )


def count_plain_json(folder: Path) -> int:
    return (folder / "points.jsonl").read_text().count("\n")


def count_tensorboard(folder: Path) -> int:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = [event for path in folder.glob("events*") for event in EventFileLoader(str(path)).Load()]
    return len({event.step for event in events if event.HasField("summary")})


def count_trackio(folder: Path) -> int:
    with sqlite3.connect(folder / "bench.db") as database:
        (count,) = database.execute("SELECT count(*) FROM metrics").fetchone()
    return int(count)


def count_wandb(folder: Path) -> int:
    """Its file is a LevelDB log of protobuf records after seven bytes of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, position, count, parts = path.read_bytes(), 7, 0, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            count += record.HasField("history")
            parts = b""
    return count


BACKENDS = {f.__name__: f for f in (tuneplane, plain_json, tensorboard, trackio, wandb)}


COUNTS = {
    "tuneplane": count_tuneplane,
    "plain_json": count_plain_json,
    "tensorboard": count_tensorboard,
    "trackio": count_trackio,
    "wandb": count_wandb,
}


def five(step: int) -> dict[str, float]:
    """Five scalars as a trainer has them: all digits of a double."""
    return {
        "loss": 2.3 / (1 + step / 7),
        "accuracy": step / (step + 3),
        "lr": 3e-4 / (1 + step),
        "grad_norm": 1 + 1 / (step + 0.7),
        "seconds": step / 7,
    }


def tight(log: Log) -> dict[str, float]:
    """Median of a call, calls made without pause: of several rounds the best, since others use the machine."""
    rounds = []
    for number in range(10):
        times = []
        for index in range(1000):
            metrics, step = five(index), number * 1000 + index
            start = time.perf_counter()
            log(metrics, step)
            times.append(time.perf_counter() - start)
        rounds.append(statistics.median(times))
        time.sleep(0.1)
    return {"us": min(rounds) * 1e6}


def paced(log: Log) -> dict[str, float]:
    """Median of a call at 100 a second."""
    times = []
    for step in range(RATE_HZ * PACED_S):
        metrics = five(step)
        start = time.perf_counter()
        log(metrics, step)
        times.append(time.perf_counter() - start)
        time.sleep(1 / RATE_HZ)
    return {"us": statistics.median(times) * 1e6}


def until_killed(log: Log) -> dict[str, float]:
    """Log at 100 a second, and say each step that was logged."""
    step = 0
    while True:
        log(five(step), step)
        print(step, flush=True)
        step += 1
        time.sleep(1 / RATE_HZ)


def stalled(log: Log, folder: str) -> dict[str, float]:
    """The longest call while the file system below is frozen; 1 in `raised` where a call raised."""
    for step in range(50):
        log(five(step), step)
        time.sleep(1 / RATE_HZ)
    thaw = subprocess.Popen(
        ["sh", "-c", f'sleep {STALL_S}; fsfreeze -u "$1"', "sh", os.environ["BENCH_MOUNT"]]
    )
    subprocess.run(["fsfreeze", "-f", os.environ["BENCH_MOUNT"]], check=True)
    step, slowest, raised = 50, 0.0, 0
    while thaw.poll() is None:
        metrics = five(step)
        start = time.perf_counter()
        try:
            log(metrics, step)
        except Exception:  # whatever it is, a trainer would have ended
            raised = 1
        slowest = max(slowest, time.perf_counter() - start)
        step += 1
        time.sleep(1 / RATE_HZ)
    return {"ms": slowest * 1e3, "raised": raised}


def main(backend: str, mode: str, folder: str) -> None:
    if mode == "count":
        print(COUNTS[backend](Path(folder)))
        return
    log = BACKENDS[backend](folder)
    modes: dict[str, Callable[[], dict[str, float]]] = {
        "tight": lambda: tight(log),
        "paced": lambda: paced(log),
        "kill": lambda: until_killed(log),
        "stall": lambda: stalled(log, folder),
    }
    print("ready", flush=True)
    print(json.dumps(modes[mode]()), flush=True)
    os._exit(0)  # the ending is nobody's row, and takes some of them a minute


if __name__ == "__main__":
    main(*sys.argv[1:])
