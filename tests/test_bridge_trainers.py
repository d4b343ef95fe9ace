"""Real trainers through the bridge, on the CPU: torch, torchrun, transformers. TRL has test_trl_runs.py."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from report_job import ReportJob
from test_bridge import BRIDGE, Case, Ended, run, same, write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TRAINERS = Path(__file__).parent / "trainers"
SEEN_BY_SOME = "total_flos"
"""A callback of the trainer itself takes this out of the log before those that are added later see it."""


@pytest.fixture(autouse=True)
def training_libraries() -> None:
    if importlib.util.find_spec("trl") is None:
        reason = "tests/requirements-training.txt is not installed: `make test` does so"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}, and this is a CI run: it must not be skipped")
        pytest.skip(reason)


def quiet(folder: Path) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }


def torchrun(folder: Path, *words: str, ranks: int = 2, **more: str) -> Ended:
    """Two ranks as torchrun starts them, each through the bridge."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--rdzv-backend=static"]
    launcher += [
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
        f"--log-dir={folder / 'ranks'}",
        "--tee=3",
    ]
    return run([*launcher, *BRIDGE, *words], folder, timeout_s=120, **quiet(folder), **more)


def told(history: list[dict[str, Any]]) -> dict[str, dict[float, float]]:
    """A trainer's own log_history, under the names that the callback gives."""
    found: dict[str, dict[float, float]] = {}
    for entry in history:
        evaluation = any(key.startswith("eval_") for key in entry)
        for key, value in entry.items():
            if key in ("step", SEEN_BY_SOME) or (evaluation and key == "epoch"):
                continue
            name = f"validation/{key[5:]}" if key.startswith("eval_") else f"train/{key}"
            found.setdefault(name, {})[entry["step"]] = pytest.approx(value, rel=1e-8)
    return found


def reported(job: ReportJob) -> dict[str, dict[float, float]]:
    return {
        name: dict(zip(series.steps, series.values, strict=True))
        for name, series in job.metrics().series.items()
        if name != f"train/{SEEN_BY_SOME}"
    }


LOADER = """\
import torch
class Squares(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, index): return torch.tensor(index * index), __name__
if __name__ == "__main__":
    for context in ("spawn", "fork"):
        loader = torch.utils.data.DataLoader(Squares(), 3, num_workers=2, multiprocessing_context=context)
        print(context, [(batch.tolist(), names) for batch, names in loader])
"""


def test_a_data_loaders_spawned_workers_find_the_users_data_set(tmp_path: Path) -> None:
    ended = same(Case(["s.py"], LOADER), tmp_path)
    assert "[([0, 1, 4], ('__mp_main__', '__mp_main__', '__mp_main__'))" in ended.stdout


GROUP = """\
import gc, glob, os, sys, torch, torch.distributed as dist
def main():
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
main()
gc.collect()
names = [open(name).read() for name in glob.glob("/proc/self/task/*/comm")]
print(any("gloo_runloop" in name for name in names), dist.is_initialized())
sys.exit(3)
"""


def test_a_destroyed_process_group_is_not_freed_in_the_middle_of_a_program(tmp_path: Path) -> None:
    """torch 2.13 frees it as the last model that used it goes, and then may wait for ever for its own thread."""
    write(tmp_path, GROUP)
    assert run(["s.py"], tmp_path, **quiet(tmp_path)).stdout == "False False\n"
    bridged = run([*BRIDGE, "s.py"], tmp_path, **quiet(tmp_path))
    assert (bridged.code, bridged.stdout) == (3, "True False\n")


RAISES = """\
import os, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
def step(rank):
    if rank == 1:
        raise ValueError("loss is not a number")
    dist.barrier()
step(dist.get_rank())
"""

COMPARES = """\
import json, os, sys
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, record
from glob import glob
(path,) = [p for p in glob("ranks/**/error.json", recursive=True) if "ValueError" in open(p).read()]
failure = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=path)
os.environ["TORCHELASTIC_ERROR_FILE"] = "torchs.json"
@record
def main():
    raise ValueError("loss is not a number")
try:
    main()
except ValueError:
    pass
print(json.dumps([failure.message, failure.timestamp, json.load(open(path)), json.load(open("torchs.json"))]))
"""


def test_the_rank_that_raised_is_named_by_torchruns_own_summary(tmp_path: Path) -> None:
    write(tmp_path, RAISES)
    ended = torchrun(tmp_path, "s.py")
    assert ended.code == 1
    root = ended.stderr.split("Root Cause (first observed failure):")[1]
    assert "rank      : 1 (local_rank: 1)" in root
    assert "ValueError: loss is not a number" in root
    assert "tuneplane" not in root.split("traceback :")[1]
    (tmp_path / "compares.py").write_text(COMPARES)
    message, timestamp, ours, torchs = json.loads(run(["compares.py"], tmp_path).stdout)
    assert message["message"] == torchs["message"]["message"] == "ValueError: loss is not a number"
    assert timestamp > 0
    assert shape(ours) == shape(torchs)


def shape(value: Any) -> Any:
    """The keys and types of a JSON value."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    return type(value)


@pytest.mark.contract("C19")
def test_a_trainer_that_knows_nothing_of_tuneplane_reports_its_own_history(tmp_path: Path) -> None:
    """Two gloo ranks; the interpreter is left with all of torch's threads in it."""
    job = ReportJob(tmp_path / "run")
    words = ["--hook", "transformers", str(TRAINERS / "bridged.py"), str(tmp_path)]
    ended = torchrun(tmp_path, *words, **reporting(job))
    assert ended.code == 0, ended.stderr
    assert ended.stdout.count("'TunePlaneCallback']") == 4
    found = reported(job)
    assert found == told(json.loads((tmp_path / "history.json").read_text()))
    assert list(found["train/loss"]) == [1, 2, 3, 4]
    assert list(found["validation/loss"]) == [2, 4]
    assert job.metrics().hparams["learning_rate"] == 5e-05


def reporting(job: ReportJob) -> dict[str, str]:
    return {name: value for name, value in job.environment().items() if name.startswith("TUNEPLANE_")}
