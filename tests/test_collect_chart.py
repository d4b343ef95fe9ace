"""Curves as text: what a user sees in a terminal, and in one that knows nothing but ASCII."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuneplane.collect.chart import number_text, render_curve, step_text
from tuneplane.collect.series import Series


def series(*pairs: tuple[float, float], attempts: int = 1) -> Series:
    made = Series()
    for index, (step, value) in enumerate(pairs):
        made.steps.append(step)
        made.values.append(value)
        made.times_s.append(0.0)
        made.attempts.append(index * attempts // max(1, len(pairs)))
    return made


def test_a_falling_loss_is_drawn_with_its_range() -> None:
    falling = series(*((step, 100 - step) for step in range(101)))
    assert render_curve(falling, width=40, height=9, title="loss") == (
        "loss  last 0  min 0  max 100\n"
        "       100 ┤⠉⠳⠤⣄⡀\n"
        "           │    ⠉⠙⠲⠤⣄⡀\n"
        "           │         ⠉⠓⠲⢤⣀⡀\n"
        "           │              ⠉⠓⠦⢤⣀\n"
        "           │                  ⠈⠉⠓⠦⢤⡀\n"
        "         0 ┤                       ⠉⠉⠳⠤⣄\n"
        "           └────────────────────────────\n"
        "            step 0                   100"
    )


def test_without_unicode_it_is_ascii() -> None:
    rising = series((0, 0.0), (50, 0.5), (100, 1.0), attempts=2)
    text = render_curve(rising, width=44, height=8, unicode=False, title="acc 精度")
    assert text == (
        "acc ??  last 1  min 0  max 1  attempts 0-1\n"
        "         1 +                           *****\n"
        "           |                    ********\n"
        "           |            *********\n"
        "           |    *********\n"
        "         0 +*****\n"
        "           +--------------------------------\n"
        "            step 0                       100"
    )


@pytest.mark.slow
def test_one_spike_among_a_million_points_is_seen() -> None:
    spiked = series(*((step, 50.0 if step == 123_457 else 1.0) for step in range(1_000_000)))
    text = render_curve(spiked, width=80, height=12, unicode=False)
    column = [line[12:] for line in text.split("\n")[1:-2]]
    tall = [x for x in range(68) if all(x < len(row) and row[x] == "*" for row in column)]
    assert len(tall) == 1 and abs(tall[0] - round(0.123457 * 67)) <= 1


def test_a_value_that_is_no_number_breaks_the_line_and_is_counted() -> None:
    text = render_curve(
        series((0, 1), (10, 1), (20, math.nan), (30, 1), (40, math.inf)), 60, 8, unicode=False
    )
    assert "2 not finite" in text
    row = next(line for line in text.split("\n") if "*" in line)[12:]
    assert " " in row.strip()


@pytest.mark.parametrize(
    "some",
    [
        series(),
        series((5, 1.0)),
        series((5, math.nan)),
        series((0, 3.0), (1, 3.0)),
        series((-1e300, -1.7e308), (1e300, 1.7e308)),
        series((0, 5e-324), (1, 0.0)),
        series((2**62, 1e-5), (2**62 + 4096, -1.2345e-105)),
    ],
    ids=lambda some: str(list(zip(some.steps, some.values, strict=True))),
)
@pytest.mark.parametrize("unicode", [True, False])
def test_the_strangest_series_still_fit(some: Series, unicode: bool) -> None:
    assert_fits(render_curve(some, 80, 10, unicode, "loss"), 80, 10, unicode)


def test_without_points_it_says_so() -> None:
    assert render_curve(series(), title="loss") == "loss  no points"


def test_a_name_can_neither_move_the_cursor_nor_push_the_values_out() -> None:
    text = render_curve(series((0, 1.0), (1, 2.0)), title="\x1b[31m\x07\n\u202e" + "损失" * 50)
    first = text.split("\n")[0]
    assert first.isprintable() and first.endswith("last 2  min 1  max 2")
    assert_fits(text, 80, 16, True)


def assert_fits(text: str, width: int, height: int, unicode: bool) -> None:
    lines = text.split("\n")
    assert len(lines) <= height
    for line in lines:
        columns = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)
        assert columns <= width and line == line.rstrip()
    assert unicode or text.isascii()


@settings(deadline=None, max_examples=150)
@given(
    st.dictionaries(st.integers(-(2**63), 2**63), st.floats(), max_size=40),
    st.integers(0, 120),
    st.integers(0, 30),
    st.booleans(),
    st.text(max_size=100),
)
def test_any_series_in_any_size_is_drawn(
    values: dict[int, float], width: int, height: int, unicode: bool, title: str
) -> None:
    text = render_curve(series(*sorted(values.items())), width, height, unicode, title)
    assert_fits(text, max(width, 24), max(height, 4), unicode)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (12.0, "12"),
        (0.30000000000000004, "0.3"),
        (-1.2345678e-105, "-1.23e-105"),
        (1e6, "1e+06"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number_text(value) == text


def test_steps_are_written_in_full() -> None:
    assert [step_text(step) for step in (0, 1_234_567, 2.5, 2.0**60)] == [
        "0",
        "1234567",
        "2.5",
        "1.15292e+18",
    ]
