"""`TunePlaneCallback` by its events alone, without any trainer: names, ranks, faults, the common end of ranks."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from report_job import ReportJob

from tuneplane.report import together
from tuneplane.report.callback import settings, sorted_out
from tuneplane.report.together import Together

EVENTS = """
from types import SimpleNamespace as Some
from tuneplane.report import TunePlaneCallback
def state(step, zero=True): return Some(global_step=step, is_world_process_zero=zero)
def control(): return Some(should_save=False, should_training_stop=False)
args = Some(to_dict=lambda: {"learning_rate": 0.1, "hub_token": "<HUB_TOKEN>"})
callback = TunePlaneCallback()
"""


@pytest.fixture
def job(tmp_path: Path) -> ReportJob:
    return ReportJob(tmp_path / "run")


@pytest.mark.parametrize(
    ("logs", "train", "validation"),
    [
        ({"loss": 1, "epoch": 0.5}, {"loss": 1, "epoch": 0.5}, {}),
        ({"train_runtime": 9, "train_loss": 1}, {"train_runtime": 9, "train_loss": 1}, {}),
        ({"eval_loss": 2, "eval_runtime": 1, "epoch": 0.5}, {}, {"loss": 2, "runtime": 1}),
        ({"eval_wiki_loss": 2, "eval_wiki_runtime": 1}, {}, {"wiki_loss": 2, "wiki_runtime": 1}),
        ({"test_loss": 2, "test_runtime": 1, "epoch": 1}, {}, {"test_loss": 2, "test_runtime": 1}),
        ({"eval_rewards/chosen": 2}, {}, {"validation/rewards/chosen": 2}),
        ({"rewards/chosen": 2, "test_loss": 1}, {"rewards/chosen": 2, "test_loss": 1}, {}),
        ({"loss": 1, "eval_loss": 2}, {"loss": 1}, {"loss": 2}),
        ({}, {}, {}),
    ],
    ids=str,
)
def test_what_of_a_log_is_trainings_and_what_an_evaluations(
    logs: dict[str, Any], train: dict[str, Any], validation: dict[str, Any]
) -> None:
    assert sorted_out(logs) == (train, validation)


@pytest.mark.contract("C19")
def test_events_become_points(job: ReportJob) -> None:
    done = job.run(
        f"""{EVENTS}
model = Some(config=Some(to_dict=lambda: {{"hidden_size": 16, "dropout": 0.0, "names": [1], "type": "llama"}}))
callback.on_train_begin(args, state(0), control(), model=model, processing_class=None)
callback.on_log(args, state(1), control(), logs={{"loss": 0.5, "rewards/mean": 2, "epoch": 0.1}})
callback.on_log(args, state(1), control(), logs={{"eval_loss": 0.6, "eval_a/b": 3, "epoch": 0.1}})
callback.on_evaluate(args, state(1), control(), metrics={{"eval_loss": 0.7, "eval_bleu": 0.8, "epoch": 0.1}})
callback.on_evaluate(args, state(2), control(), metrics={{"eval_loss": 0.9}})
callback.on_train_end(args, state(2), control())
"""
    )
    assert done.stderr == ""
    metrics = job.metrics()
    assert {name: list(series.values) for name, series in metrics.series.items()} == {
        "train/loss": [0.5],
        "train/epoch": [0.1],
        "rewards/mean": [2],
        "validation/loss": [0.6, 0.9],
        "validation/a/b": [3],
        "validation/bleu": [0.8],
    }
    model = {"hidden_size": 16, "dropout": 0.0, "type": "llama"}
    assert metrics.hparams == {"learning_rate": 0.1, "hub_token": "<HUB_TOKEN>", "model": model}


def test_a_resumed_training_says_the_first_step_that_it_does_anew_once(job: ReportJob) -> None:
    """A second training of the same attempt took up nothing, whatever step it starts at."""
    job.run(
        f"""{EVENTS}
callback.on_train_begin(args, state(10), control())
callback.on_train_begin(args, state(3), control())
TunePlaneCallback().on_train_begin(args, state(7), control())
"""
    )
    assert [line["r"] for line in job.lines() if "r" in line] == [11]


def test_other_ranks_report_nothing(job: ReportJob) -> None:
    job.run(
        f"""{EVENTS}
callback.on_train_begin(args, state(0, False), control())
callback.on_log(args, state(1, False), control(), logs={{"loss": 1}})
callback.on_evaluate(args, state(1, False), control(), metrics={{"eval_loss": 1}})
callback.on_train_end(args, state(1, False), control())
"""
    )
    assert list(job.ingest.iterdir()) == []


def test_it_answers_events_that_it_does_not_know_and_no_other_name() -> None:
    from tuneplane.report import TunePlaneCallback

    callback = TunePlaneCallback()
    assert callback.on_pre_optimizer_step(1, 2, 3, model=None) is None
    assert callback.on_whatever_comes_next_year() is None
    assert not hasattr(callback, "state") and not hasattr(callback, "__deepcopy__")
    assert TunePlaneCallback.__mro__ == (TunePlaneCallback, object)
    with pytest.raises(ImportError):
        from tuneplane.report import TunePlaneCallbacks  # noqa: F401


def test_an_event_that_fails_costs_its_own_report_alone(job: ReportJob) -> None:
    done = job.run(
        f"""{EVENTS}
class Bad:
    def __getattr__(self, name): raise RuntimeError(name)
callback.on_train_begin(args, state(0), control())
for event in ("on_train_begin", "on_log", "on_evaluate", "on_step_end", "on_train_end"):
    getattr(callback, event)(Bad(), Bad(), Bad(), logs=Bad(), metrics=Bad(), model=Bad())
    getattr(callback, event)(None, None, None)
callback.on_log(args, state(1), control(), logs={{"loss": 1}})
"""
    )
    assert "Traceback" not in done.stderr
    assert list(job.metrics().series) == ["train/loss"]
    assert job.metrics().dropped_points > 0


def test_settings_that_cannot_be_read_cost_themselves_alone(job: ReportJob) -> None:
    """Where training took up again is told all the same."""
    done = job.run(
        f"""{EVENTS}
class Args:
    def to_dict(self): raise RuntimeError("no")
callback.on_train_begin(Args(), state(40), control(), model=args)
callback.on_log(args, state(50), control(), logs={{"loss": 1}})
"""
    )
    assert "Traceback" not in done.stderr
    assert 41 in [line.get("r") for line in job.lines()]


@pytest.mark.contract("C19", "C17")
def test_outside_a_job_it_is_silent(job: ReportJob) -> None:
    done = job.run(
        f"""{EVENTS}
import sys
callback.on_train_begin(args, state(0), control())
callback.on_log(args, state(1), control(), logs={{"loss": 1}})
callback.on_step_end(args, state(1), control())
callback.on_train_end(args, state(1), control())
assert "torch" not in sys.modules and "transformers" not in sys.modules
""",
        TUNEPLANE_JOB_TOKEN="",
    )
    assert (done.stdout, done.stderr) == ("", "") and not list(job.ingest.iterdir())


def test_a_run_that_is_asked_to_stop_has_the_trainer_save_and_end(job: ReportJob, tmp_path: Path) -> None:
    done = job.run(
        f"""{EVENTS}
import sys, time
deaf = TunePlaneCallback(stop_when_asked=False)
callback.on_train_begin(args, state(0), control()); deaf.on_train_begin(args, state(0), control())
told = control()
callback.on_step_end(args, state(1), told)
assert (told.should_save, told.should_training_stop) == (False, False)
open(sys.argv[1], "w").close()
time.sleep(0.6)
callback.on_step_end(args, state(2), told)
assert (told.should_save, told.should_training_stop) == (True, True)
told = control()
deaf.on_step_end(args, state(2), told)
assert (told.should_save, told.should_training_stop) == (False, False)
""",
        str(tmp_path / "stop"),
        TUNEPLANE_STOP_FILE=str(tmp_path / "stop"),
    )
    assert done.stderr == ""


@pytest.mark.parametrize("model", [None, object(), types.SimpleNamespace(config=None)], ids=["0", "1", "2"])
def test_any_arguments_and_any_model_are_settings(model: Any) -> None:
    assert settings(types.SimpleNamespace(lr=0.1), model) == {"lr": 0.1}


class FakeDistributed(types.ModuleType):
    """A fake of torch.distributed: a store of several ranks, all in this process."""

    def __init__(self, world: int) -> None:
        super().__init__("torch.distributed")
        self.kept: dict[str, Any] = {}
        self.rank, self.world = 0, world
        self.distributed_c10d = types.SimpleNamespace(_get_default_store=lambda: self)

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def get_world_size(self) -> int:
        return self.world

    def get_rank(self) -> int:
        return self.rank

    def add(self, key: str, number: int) -> int:
        self.kept[key] = self.kept.get(key, 0) + number
        return int(self.kept[key])

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)

    def get(self, key: str) -> bytes:
        return str(self.kept[key]).encode()


@pytest.mark.parametrize("step_s", [0.003, 0.2, 30.0])
def test_all_ranks_end_after_one_step(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """Ranks a step apart, each looking at its own times; the marker appears on the way."""
    store, now = FakeDistributed(3), [100.0]
    monkeypatch.setitem(sys.modules, "torch.distributed", store)
    monkeypatch.setattr(together.time, "monotonic", lambda: now[0])
    asked = [False]
    monkeypatch.setattr(together, "should_stop", lambda: asked[0])
    ranks = []
    for store.rank in range(3):
        ranks.append(Together("t"))
    ended: dict[int, int] = {}
    for step in range(1, 5000):
        asked[0] = step > 700 * 0.01 / step_s if step_s < 1 else step > 3
        for number, rank in enumerate(ranks):
            now[0] += step_s / 3
            if number not in ended and rank.is_time_to_stop(step):
                ended[number] = step
        if ended:
            break
    assert len(ended) == 3 and len(set(ended.values())) == 1


@pytest.mark.parametrize("slow_before_asked", [0, 1, 15])
def test_a_step_that_took_long_does_not_part_the_ranks(
    monkeypatch: pytest.MonkeyPatch, slow_before_asked: int
) -> None:
    """A save of 5 s in steps of 0.1 s; the run is asked to end during it or a little later."""
    store, now = FakeDistributed(2), [100.0]
    monkeypatch.setitem(sys.modules, "torch.distributed", store)
    monkeypatch.setattr(together.time, "monotonic", lambda: now[0])
    asked = [False]
    monkeypatch.setattr(together, "should_stop", lambda: asked[0])
    ranks = []
    for store.rank in range(2):
        ranks.append(Together("t"))
    ended: dict[int, int] = {}
    for step in range(1, 400):
        now[0] += 5.0 if step == 100 else 0.1
        asked[0] = step >= 100 + slow_before_asked
        for number in (1, 0):  # the other rank looks just before rank 0 names a step
            if number not in ended and ranks[number].is_time_to_stop(step):
                ended[number] = step
        if ended:
            break
    assert len(ended) == 2 and len(set(ended.values())) == 1


def test_where_some_ranks_lack_the_callback_none_ends_before_the_others(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store, now = FakeDistributed(4), [100.0]
    monkeypatch.setitem(sys.modules, "torch.distributed", store)
    monkeypatch.setattr(together.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(together, "should_stop", lambda: True)
    alone = Together("t")
    for step in range(1, 100):
        now[0] += 0.3
        assert not alone.is_time_to_stop(step)
    assert capfd.readouterr().err.count("1 of 4 ranks have TunePlaneCallback") == 1
