"""What reading metrics costs: parsing, an idle look, a query, memory. Part of `make bench`.

`--full` asks the store among 20 million points instead of 2 million.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tuneplane.collect.source import RunSource
from tuneplane.collect.store import Store

Row = tuple[str, str, str, str, str, bool]
"""What, measured, floor, figure, target, whether it holds."""

MEMORY = """
import resource, sys
from pathlib import Path
from tuneplane.collect.source import RunSource
from tuneplane.collect.store import Store
with Store(Path(sys.argv[2])) as store:
    store.refresh([RunSource(Path(sys.argv[1]), "run", "")])
    assert store.overview("run").metrics
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def make_run(folder: Path, run_id: str, lines: int, names: list[str]) -> RunSource:
    """A run that logged `lines` times, as `tuneplane.report` writes it."""
    (folder / "ingest").mkdir(parents=True)
    header = {"v": 1, "run_id": run_id, "attempt": 0, "rank": 0, "started": 0.0}
    with (folder / "ingest" / "0-n1-0-1.jsonl").open("w") as file:
        file.write(json.dumps(header) + "\n")
        for n in range(lines):
            values = ",".join(f'"{name}":{random.random():.9g}' for name in names)
            file.write(f'{{"n":{n},"t":{1.7e9 + n / 100:.3f},"s":{n},"m":{{{values}}}}}\n')
    return RunSource(folder, run_id, "")


def best_s(call: Callable[[], object], repeats: int = 5) -> float:
    """The least processor time of several calls."""
    times = []
    for _ in range(repeats):
        before = time.process_time()
        call()
        times.append(time.process_time() - before)
    return min(times)


def parse_row(folder: Path, scalars: int) -> Row:
    """Reading a run into the store, beside json.loads of each line and nothing else."""
    lines = 200_000 // scalars
    source = make_run(folder / f"parse{scalars}", "run", lines, [f"train/m{i}" for i in range(scalars)])
    texts = next((source.folder / "ingest").iterdir()).read_bytes().splitlines()

    def plain() -> None:
        for text in texts:
            json.loads(text)

    def read() -> None:
        cache = Path(tempfile.mkdtemp(dir=folder))
        with Store(cache) as store:
            store.refresh([source])

    floor, took = best_s(plain), best_s(read)
    told = f"json.loads a line {lines / floor / 1e6:.2f} M/s"
    rate, figure = lines / took / 1e6, f"{floor / took:.1f} x"
    if scalars == 1:
        # 0.8 M points/s of one scalar, where json.loads alone does 0.85: a ratio, since machines differ.
        return "collect points", f"{rate:.2f} M/s", told, figure, ">= 0.94 x", floor / took >= 0.94
    values = f"{rate * scalars:.2f} M/s"
    return f"collect values, {scalars} a point", values, told, figure, ">= 0.8 M/s", rate * scalars >= 0.8


def idle_row(folder: Path) -> Row:
    """A look at 1,000 runs that have nothing new, beside two calls of stat for each."""
    sources = [make_run(folder / f"idle{i}", f"run{i}", 2, ["loss"]) for i in range(1000)]
    paths = [str(path) for s in sources for path in (s.folder / "ingest", *(s.folder / "ingest").iterdir())]
    with Store(folder / "idle-cache") as store:
        store.refresh(sources)
        took = best_s(lambda: store.refresh(sources), 9)
    floor = best_s(lambda: [os.lstat(path) for path in paths], 9)
    figure = f"{took / floor:.1f} x"
    return "idle look at 1,000 runs", ms(took), f"2,000 stats {ms(floor)}", figure, "<= 10 ms", took <= 0.010


def query_row(folder: Path, points: int) -> Row:
    """One metric of one run: 1,000 points among many, beside reading as many bytes from a file."""
    names = [f"train/m{i}" for i in range(20)]
    sources = [
        make_run(folder / f"query{i}", f"run{i}", 1000, names) for i in range(points // (1000 * len(names)))
    ]
    with Store(folder / "query-cache") as store:
        store.refresh(sources)
    times = []
    with Store(folder / "query-cache") as store:
        store.refresh(sources)
        for source in random.sample(sources, min(100, len(sources))):
            before = time.perf_counter()
            found = store.series(source.run_id, ["train/m7"])
            times.append(time.perf_counter() - before)
            assert len(found["train/m7"]) == 1000
    plain = folder / "plain"
    plain.write_bytes(bytes(32_000))
    floor = best_s(plain.read_bytes, 9)
    took = statistics.median(times)
    size = (folder / "query-cache" / "metrics.sqlite").stat().st_size
    name = f"a metric among {points / 1e6:.0f} M points"
    told = f"read 32 kB {ms(floor)}; cache {size / 1e6:.0f} MB"
    return name, ms(took), told, ms(took), "<= 1 ms", took <= 0.001


def memory_row(folder: Path) -> Row:
    """The reader's memory over a long file, beside a short one."""
    peaks = []
    for lines in (50_000, 600_000):
        source = make_run(folder / f"memory{lines}", "run", lines, ["loss"])
        argv = [sys.executable, "-c", MEMORY, str(source.folder), str(folder / f"memory-cache{lines}")]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300)
        peaks.append(int(done.stdout) / 1024)
    short, long = peaks
    told = f"12 times less {short:.0f} MB"
    return (
        "memory over 600,000 lines",
        f"{long:.0f} MB",
        told,
        f"+{long - short:.0f} MB",
        "<= +64 MB",
        long - short <= 64,
    )


def collect_rows(full: bool = False) -> list[Row]:
    """All of them."""
    random.seed(7)
    with tempfile.TemporaryDirectory(prefix="tuneplane-bench-") as name:
        folder = Path(name)
        return [
            parse_row(folder, 1),
            parse_row(folder, 5),
            idle_row(folder),
            query_row(folder, 20_000_000 if full else 2_000_000),
            memory_row(folder),
        ]


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


if __name__ == "__main__":
    for what, measured, floor, figure, target, holds in collect_rows("--full" in sys.argv):
        word = "holds" if holds else "MISSED"
        print(f"{what:<28} {measured:>9}   {floor:<36} {figure:>9}   {target:<10} {word}", flush=True)
