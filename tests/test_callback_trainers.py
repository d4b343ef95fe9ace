"""`TunePlaneCallback` in real trainers of transformers and TRL, on the CPU, in real runs of this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_fixture import Run, runs_below, wait_until

from tuneplane.collect.metrics import Metrics, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TRAINERS = Path(__file__).parent / "trainers"
RANKS = 2

QUIET = """\
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export HF_HOME="$TMPDIR/hf" CUDA_VISIBLE_DEVICES=
cd "$TUNEPLANE_EXP_DIR"
"""

MakeRun = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRun]:
    """Runs whose train.sh starts a trainer of tests/trainers, on two ranks where nothing else is said."""
    if importlib.util.find_spec("trl") is None:
        reason = "tests/requirements-training.txt is not installed: `make test` does so"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}, and this is a CI run: it must not be skipped")
        pytest.skip(reason)
    with runs_below(tmp_path) as make_one:

        def trainer(name: str, asked: dict[str, Any], ranks: int = RANKS) -> Run:
            port = "$TUNEPLANE_MAIN_PROCESS_PORT"
            words = [sys.executable]
            if ranks > 1:
                words += [f"-m torch.distributed.run --nproc_per_node {ranks} --master_port {port}"]
            command = f"{' '.join(words)} {name} '{json.dumps(asked)}'"
            return make_one(
                f"{QUIET}exec {command}",
                files={name: (TRAINERS / name).read_text()},
                scheduler="local",
                profile="local",
                observability="platform",
                url=None,
            )

        yield trainer


def metrics_of(run: Run) -> Metrics:
    return read_metrics(run.path, run.job.metadata.run_id, run.job.spec.reporting.token_sha256)


SEEN_BY_SOME = "total_flos"
"""A callback of the trainer itself takes this out of the log before those that are added later see it."""


def reported(metrics: Metrics) -> dict[str, dict[float, float]]:
    """What of the trainer was reported: by name, value by step."""
    return {
        name: dict(zip(series.steps, series.values, strict=True))
        for name, series in metrics.series.items()
        if not name.startswith("system/") and name != f"train/{SEEN_BY_SOME}"
    }


def told_by_trainer(run: Run, *attempts: int) -> dict[str, dict[float, float]]:
    """The trainer's own log_history of these attempts, under the names that the callback gives."""
    found: dict[str, dict[float, float]] = {}
    for attempt in attempts:
        for entry in json.loads((run.folder.out / f"history-{attempt}.json").read_text()):
            evaluation = any(key.startswith("eval_") for key in entry)
            for key, value in entry.items():
                if key in ("step", SEEN_BY_SOME) or (evaluation and key == "epoch"):
                    continue
                name = f"validation/{key[5:]}" if key.startswith("eval_") else f"train/{key}"
                found.setdefault(name, {})[entry["step"]] = pytest.approx(value, rel=1e-8)
    return found


def run_to_end(run: Run, code: int = 0) -> None:
    script = run.start_script()
    assert script.wait(timeout=90) == code, run.said() + run.log()


@pytest.mark.contract("C19")
def test_points_of_two_ranks_are_the_trainers_own_history(make: MakeRun) -> None:
    run = make("hf_trainer.py", {"steps": 12})
    run_to_end(run)
    metrics = metrics_of(run)
    found = reported(metrics)
    assert found == told_by_trainer(run, 0)
    assert list(found["train/loss"]) == list(range(1, 13))
    assert list(found["validation/loss"]) == [4, 8, 12]
    assert metrics.hparams["learning_rate"] == 0.01
    assert metrics.hparams["model"]["hidden_size"] == 16
    assert (metrics.dropped_points, metrics.dropped_values, metrics.gaps) == (0, 0, 0)
    assert "reporting" not in run.log()


@pytest.mark.contract("C19")
def test_a_run_that_is_told_to_stop_saves_and_goes_on_where_it_was(make: MakeRun) -> None:
    """All ranks end after one step, and the next attempt's points join the first's without a seam."""
    steps = 120
    run = make("hf_trainer.py", {"steps": steps, "pause_s": 0.05, "callback": "instance"})
    script = run.start_script()
    wait_until(lambda: "train/loss" in metrics_of(run).series, "the first step is reported", 60)
    os.kill(run.start_of()["pid"], signal.SIGUSR2)
    script.wait(timeout=60)
    (ended,) = [line for line in run.log().splitlines() if line.startswith("ended after step")]
    last = int(ended.split()[3])
    assert 3 <= last < steps, "it ended before its time"
    assert (run.folder.out / "checkpoints" / f"checkpoint-{last}").is_dir()
    run_to_end(run)
    metrics = metrics_of(run)
    found = reported(metrics)
    loss = metrics.series["train/loss"]
    assert list(loss.steps) == list(range(1, steps + 1))
    assert list(loss.attempts) == [0] * last + [1] * (steps - last)
    assert list(found["validation/loss"]) == list(range(4, steps + 1, 4))
    assert not loss.hidden and not metrics.series["validation/loss"].hidden
    assert found == told_by_trainer(run, 0, 1)


def test_where_rank_0_alone_has_the_callback_training_is_not_held_up(make: MakeRun) -> None:
    run = make("hf_trainer.py", {"steps": 30, "pause_s": 0.08, "callback": "rank0"})
    script = run.start_script()
    wait_until(lambda: "train/loss" in metrics_of(run).series, "the first step is reported", 60)
    os.kill(run.start_of()["pid"], signal.SIGUSR2)
    script.wait(timeout=60)
    assert "ended after step 30 of 30" in run.log()
    assert run.log().count("1 of 2 ranks have TunePlaneCallback") == 1
    assert list(metrics_of(run).series["train/loss"].steps) == list(range(1, 31))


@pytest.mark.contract("C19")
def test_trl_trainers_take_it_too(make: MakeRun) -> None:
    run = make("sft_trainer.py", {"steps": 4}, ranks=1)
    run_to_end(run)
    metrics = metrics_of(run)
    found = reported(metrics)
    assert found == told_by_trainer(run, 0)
    assert list(found["train/mean_token_accuracy"]) == [1, 2, 3, 4]
    assert list(found["validation/mean_token_accuracy"]) == [2, 4]
