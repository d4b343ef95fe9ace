"""Attempts merged into one line: what a restarted job did again hides what it did before."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from tuneplane.collect.series import Points, Series, merge


def points(*pairs: tuple[float, float]) -> Points:
    made = Points()
    for index, (step, value) in enumerate(pairs):
        made.append(step, value, float(index))
    return made


def line(series: Series) -> list[tuple[float, float, int]]:
    return list(zip(series.steps, series.values, series.attempts, strict=True))


def hidden(series: Series) -> dict[int, list[tuple[float, float]]]:
    return {a: list(zip(p.steps, p.values, strict=True)) for a, p in series.hidden.items()}


def test_a_restart_hides_the_steps_that_it_does_again() -> None:
    first = points((0, 1.0), (10, 0.9), (20, 0.8), (30, 0.7))
    again = points((20, 0.5), (30, 0.4))
    merged = merge({0: first, 1: again})
    assert line(merged) == [(0, 1.0, 0), (10, 0.9, 0), (20, 0.5, 1), (30, 0.4, 1)]
    assert hidden(merged) == {0: [(20, 0.8), (30, 0.7)]}


def test_what_lay_beyond_the_restart_is_hidden_even_before_it_is_reached_again() -> None:
    merged = merge({0: points((0, 1.0), (10, 0.9), (90, 0.1)), 3: points((10, 0.8))})
    assert line(merged) == [(0, 1.0, 0), (10, 0.8, 3)]


def test_an_attempt_that_logged_nothing_hides_nothing() -> None:
    assert len(merge({0: points((0, 1.0), (1, 2.0)), 1: Points()})) == 2
    assert len(merge({})) == 0


def test_within_an_attempt_steps_come_late_and_the_last_value_of_a_step_wins() -> None:
    merged = merge({0: points((10, 1.0), (5, 2.0), (10, 3.0), (7, 4.0))})
    assert line(merged) == [(5, 2.0, 0), (7, 4.0, 0), (10, 3.0, 0)]
    assert not merged.hidden


def test_an_attempt_may_say_where_it_took_up_again() -> None:
    first = points((0, 1.0), (50, 0.9), (100, 0.8))
    assert line(merge({0: first, 1: points((100, 0.5))}, {1: 50})) == [(0, 1.0, 0), (100, 0.5, 1)]
    assert line(merge({0: first}, {1: 50})) == [(0, 1.0, 0)], "of a metric that it has not come to yet"
    assert line(merge({0: first, 1: points((0, 2.0))}, {1: 50})) == [(0, 2.0, 1)], "earlier points hide too"


attempts = st.dictionaries(
    st.integers(0, 5), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 99)), max_size=10), max_size=5
)


def _model(
    logged: dict[int, list[tuple[int, int]]], resumed: dict[int, int]
) -> tuple[list[tuple[float, float, int]], dict[int, list[tuple[float, float]]]]:
    """Each point asks by itself whether any later attempt began at or before its step."""
    begins = {a: min([s for s, _ in rows] + [resumed.get(a, 10**9)]) for a, rows in logged.items() if rows}
    begins.update({a: min(s, begins.get(a, s)) for a, s in resumed.items()})
    shown, covered = [], {}
    for attempt in sorted(logged):
        for step, value in sorted(dict(logged[attempt]).items()):
            if any(later > attempt and begin <= step for later, begin in begins.items()):
                covered.setdefault(attempt, []).append((step, value))
            else:
                shown.append((step, value, attempt))
    return sorted(shown), covered


@given(attempts, st.dictionaries(st.integers(0, 5), st.integers(0, 12), max_size=2))
def test_merging_agrees_with_a_plain_model(
    logged: dict[int, list[tuple[int, int]]], resumed: dict[int, int]
) -> None:
    merged = merge({a: points(*rows) for a, rows in logged.items()}, resumed)
    assert (line(merged), hidden(merged)) == _model(logged, resumed)
    assert list(merged.steps) == sorted(set(merged.steps)), "each step once, ascending"


def test_a_million_points_merge_in_a_second_or_two() -> None:
    import time

    steps = array("d", range(1_000_000))
    big = Points(steps, steps, steps)
    start = time.process_time()
    assert len(merge({0: big, 1: points((999_999, 1.0))})) == 1_000_000
    assert time.process_time() - start < 10
