"""A line of any length drawn in a few hundred pixels: what must be seen is seen."""

from __future__ import annotations

import math
import time
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from tuneplane.collect.buckets import thin
from tuneplane.collect.series import Points


def line(values: list[float], steps: list[float] | None = None) -> Points:
    steps = [float(index) for index in range(len(values))] if steps is None else steps
    return Points(array("d", steps), array("d", values), array("d", [0.0] * len(values)))


def test_a_short_line_stays_whole() -> None:
    assert list(thin(line([1.0, math.nan, 3.0]), 2)) == [0, 1, 2]
    assert list(thin(line([]), 100)) == []


def test_a_spike_and_a_nan_among_a_million_points_are_kept_quickly() -> None:
    values = [1.0 + (i % 7) * 0.01 for i in range(1_000_000)]
    values[123_456], values[700_001], values[900_000] = 1e9, math.nan, -math.inf
    points = line(values)
    started = time.perf_counter()
    kept = thin(points, 1000)
    assert time.perf_counter() - started < 1.0
    assert {0, 123_456, 700_001, 900_000, 999_999} <= set(kept)
    assert len(kept) <= 2010


def test_buckets_are_of_steps_not_of_points() -> None:
    steps = [i / 1000 for i in range(1000)] + [float(i) for i in range(1, 101)]
    kept = thin(line([float(i) for i in range(1100)], steps), 100)
    assert len([i for i in kept if i < 1000]) <= 3, "a thousand points in one pixel"
    assert len([i for i in kept if i >= 1000]) >= 99, "a pixel for each of the others"


@settings(deadline=None, max_examples=150)
@given(
    values=st.lists(st.floats(), max_size=200),
    gaps=st.lists(st.sampled_from([0.5, 1.0, 1e3, 1e300]), min_size=200, max_size=200),
    buckets=st.integers(1, 40),
)
def test_of_any_line_extremes_and_ends_are_kept(values: list[float], gaps: list[float], buckets: int) -> None:
    steps: list[float] = []
    for gap in gaps[: len(values)]:
        steps.append((steps[-1] if steps else -1e303) + gap)
    kept = list(thin(line(values, steps), buckets))
    assert kept == sorted(set(kept)) and len(kept) <= max(5 * buckets + 2, len(values) and 2)
    finite = [v for v in values if math.isfinite(v)]
    seen = [values[i] for i in kept]
    if values:
        assert kept[0] == 0 and kept[-1] == len(values) - 1
    if finite:
        assert min(finite) in seen and max(finite) in seen
    assert any(map(math.isnan, seen)) == any(map(math.isnan, values))
    assert (math.inf in seen) == (math.inf in values) and (-math.inf in seen) == (-math.inf in values)
