"""Whatever is logged, however it is torn and resumed, the merged line is that of a plain model (C21)."""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_job import RUN_ID, TOKEN, TOKEN_SHA256

import tuneplane.report
import tuneplane.report.session  # so that forked trainers need not import it
from tuneplane.collect.series import Series
from tuneplane.collect.source import RunSource
from tuneplane.collect.store import Store

Step = int | float | None
Aliases = tuple[tuple[str, tuple[str, ...]], ...]

A_PROCESS = 1000
"""In the model's order, what the calls of one process have."""


@dataclass(frozen=True)
class Call:
    """One call of a trainer: `log(metrics, step)`, or `init(resume_step=…)` where there are no metrics."""

    metrics: dict[str, float] | None
    step: Step


@dataclass(frozen=True)
class Trainer:
    """One process of an attempt. cut: where its file is torn, as a part of its length.

    killed: what comes after the cut was never written; else a write was torn there and repaired.
    """

    attempt: int
    rank: int
    calls: list[Call]
    cut: float
    killed: bool


NAMES = st.sampled_from(["loss", "train/acc", 'é "quoted"\n', "x@rank1", "train_loss", "train/loss", "Loss"])
ALIASES = st.sampled_from(
    [(), (("train/loss", ("train_loss", "loss")),), (("loss", ("train/loss",)), ("x@rank1", ("Loss",)))]
)
NUMBERS = st.one_of(st.floats(width=32), st.integers(-5, 5))
STEPS = st.one_of(st.none(), st.integers(-2, 9), st.sampled_from([2.5, 10**12]))
LOGS = st.builds(Call, st.dictionaries(NAMES, NUMBERS, min_size=1, max_size=3), STEPS)
RESUMES = st.builds(Call, st.none(), st.integers(-1, 9))
TRAINERS = st.builds(
    Trainer,
    attempt=st.integers(0, 3),
    rank=st.sampled_from([0, 0, 1, 12]),
    calls=st.lists(st.one_of(LOGS, LOGS, LOGS, RESUMES), max_size=7),
    cut=st.floats(0, 1),
    killed=st.booleans(),
)


def run_trainer(ingest: Path, trainer: Trainer, start_s: float) -> None:
    """A process of its own with the real module, whose clock goes on by a second a call."""
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return
    code = 1
    try:
        os.environ.update(
            TUNEPLANE_JOB_ENABLED="1",
            TUNEPLANE_JOB_ENDPOINT=ingest.as_uri(),
            TUNEPLANE_JOB_RUN_ID=RUN_ID,
            TUNEPLANE_JOB_TOKEN=TOKEN,
            TUNEPLANE_JOB_ATTEMPT=str(trainer.attempt),
            RANK=str(trainer.rank),
        )
        now = [start_s]
        time.time = lambda: now[0]  # type: ignore[assignment]
        tuneplane.report.init(all_ranks=True)
        for call in trainer.calls:
            now[0] += 1
            if call.metrics is None:
                tuneplane.report.init(resume_step=call.step)  # type: ignore[arg-type]
            else:
                tuneplane.report.log(call.metrics, step=call.step)
        tuneplane.report.finish()
        code = 0
    finally:
        os._exit(code)


# The model: calls that arrived, in dictionaries.


@dataclass(frozen=True)
class Arrived:
    """One value that arrived. `order` is by time: within an attempt the last value of a step wins."""

    attempt: int
    rank: int
    order: int
    name: str
    step: float
    value: float


def arrived_of(trainer: Trainer, lines: int, first: int) -> tuple[list[Arrived], float | None]:
    """What the first `lines` lines of a trainer say, and where it said that it took up again."""
    found: list[Arrived] = []
    resumed = None
    count = 0
    for index, call in enumerate(trainer.calls[:lines]):
        if call.metrics is None:
            resumed = call.step
            continue
        step = count if call.step is None else call.step
        count = max(count, int(step) + 1) if step >= count else count
        for name, value in call.metrics.items():
            found.append(Arrived(trainer.attempt, trainer.rank, first + index, name, step, value))
    return found, resumed if found else None


def canonical(arrived: list[Arrived], aliases: Aliases) -> list[Arrived]:
    """Under canonical names; of the names that one process gave a metric at a step, the first one listed stays."""
    known = {
        name: (metric, place) for metric, others in aliases for place, name in enumerate((metric, *others))
    }
    first: dict[tuple[int, str, float], int] = {}
    for a in arrived:
        metric, place = known.get(a.name, (a.name, 0))
        key = (a.order // A_PROCESS, metric, a.step)
        first[key] = min(place, first.get(key, place))
    return [
        replace(a, name=metric)
        for a in arrived
        for metric, place in [known.get(a.name, (a.name, 0))]
        if first[a.order // A_PROCESS, metric, a.step] == place
    ]


def model(arrived: list[Arrived], resumed: dict[int, float]) -> dict[str, Any]:
    """By name: the merged line (step, value, attempt), and what is hidden of each attempt."""
    series: dict[str, Any] = {}
    for name in {a.name for a in arrived}:
        ranks = sorted({a.rank for a in arrived if a.name == name})
        for rank in ranks:
            mine = sorted((a for a in arrived if (a.name, a.rank) == (name, rank)), key=lambda a: a.order)
            last: dict[tuple[int, float], float] = {}
            for a in mine:
                last[a.attempt, a.step] = a.value
            anew: dict[int, float] = dict(resumed)
            for attempt, step in last:
                anew[attempt] = min(step, anew.get(attempt, step))
            shown, hidden = [], defaultdict(list)
            for (attempt, step), value in last.items():
                if any(later > attempt and step >= begin for later, begin in anew.items()):
                    hidden[attempt].append((step, value))
                else:
                    shown.append((step, value, attempt))
            label = name if rank == ranks[0] else f"{name}@rank{rank}"
            series[label] = (
                sorted(shown, key=lambda p: p[0]),
                {a: sorted(p, key=lambda p: p[0]) for a, p in hidden.items()},
            )
    return series


def lines_of(found: dict[str, Series]) -> dict[str, Any]:
    """What a store gives, in the model's form."""
    return {
        name: (
            list(zip(line.steps, line.values, line.attempts, strict=True)),
            {a: list(zip(p.steps, p.values, strict=True)) for a, p in line.hidden.items()},
        )
        for name, line in found.items()
    }


def as_text(series: dict[str, Any]) -> dict[str, str]:
    """Comparable, since NaN is unlike itself: numbers as twelve digits say them, written out."""
    text = "{:.12g}".format
    return {
        name: repr(
            (
                [(float(step), text(value + 0.0), attempt) for step, value, attempt in shown],
                {a: [(float(step), text(value + 0.0)) for step, value in hidden[a]] for a in sorted(hidden)},
            )
        )
        for name, (shown, hidden) in series.items()
    }


@pytest.mark.slow
@pytest.mark.contract("C21")
@settings(deadline=None, max_examples=60)
@given(st.lists(TRAINERS, max_size=5), ALIASES)
def test_any_calls_torn_anywhere_and_resumed_anyhow_merge_as_the_model_says(
    trainers: list[Trainer], aliases: Aliases
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ingest, scratch = Path(folder, "run/ingest"), Path(folder, "scratch")
        ingest.mkdir(parents=True)
        scratch.mkdir()
        source = RunSource(Path(folder, "run"), RUN_ID, TOKEN_SHA256, metrics=aliases)
        arrived: list[Arrived] = []
        resumed: dict[int, float] = {}
        with Store(Path(folder, "store")) as store:
            for number, trainer in enumerate(trainers):
                run_trainer(scratch, trainer, 1000.0 * (number + 1))
                lines = len(trainer.calls)
                for path in scratch.iterdir():
                    data = path.read_bytes()
                    path.unlink()
                    cut = round(trainer.cut * len(data))
                    target = ingest / path.name
                    target.write_bytes(data[:cut])
                    store.refresh([source])  # it may look at any moment
                    with target.open("ab") as file:
                        if not trainer.killed:  # the torn line comes again, whole
                            file.write(b"\n" + data[data.rfind(b"\n", 0, cut) + 1 :])
                    if trainer.killed:
                        lines = data[:cut].count(b"\n") - 1  # the header is one
                    store.refresh([source])
                told, took_up = arrived_of(trainer, max(0, lines), A_PROCESS * number)
                arrived += told
                if took_up is not None:
                    resumed[trainer.attempt] = min(took_up, resumed.get(trainer.attempt, took_up))
            expected = model(canonical(arrived, aliases), resumed)
            found = store.series(RUN_ID, sorted({*store.overview(RUN_ID).metrics, *expected}))
            assert as_text(lines_of(found)) == as_text(expected)
            overview = store.overview(RUN_ID)
            assert overview.gaps == 0
            for name, line in found.items():
                if not len(line):  # all of it was done anew, by an attempt that logs it no more
                    continue
                told = overview.metrics[name]
                assert (told.points, told.last_step, repr(told.last)) == (
                    *(len(line), line.steps[-1], repr(line.values[-1])),
                )
        with Store(memory=True) as anew:  # whatever was read in between, at once gives the same
            anew.refresh([source])
            assert as_text(lines_of(anew.series(RUN_ID, found))) == as_text(lines_of(found))
