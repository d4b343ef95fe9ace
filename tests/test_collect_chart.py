"""Curves as text: what a user sees in a terminal, and in one that knows nothing but ASCII."""

from __future__ import annotations

import math
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuneplane.collect.chart import Look
from tuneplane.collect.figure import Shown, View, render, smoothed
from tuneplane.collect.printable import (
    cell,
    columns,
    duration_text,
    number_text,
    printable,
    shorten,
    step_text,
)
from tuneplane.collect.series import Points, Series, merge


def series(*pairs: tuple[float, float], attempts: int = 1) -> Series:
    made = Series()
    for index, (step, value) in enumerate(pairs):
        made.steps.append(step)
        made.values.append(value)
        made.times_s.append(0.0)
        made.attempts.append(index * attempts // max(1, len(pairs)))
    return made


def render_curve(
    some: Series,
    width: int = 80,
    height: int = 16,
    unicode: bool = True,
    title: str = "",
    view: View | None = None,
) -> str:
    return render(title, [Shown(some)], view, Look(width, height, unicode))


def points(*pairs: tuple[float, float]) -> Points:
    made = Points()
    for step, value in pairs:
        made.append(step, value, 1000 + step)
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


def test_what_a_restart_did_anew_is_faint_and_marked_with_its_attempt() -> None:
    first = points(*((step, 10.0) for step in range(60)))
    again = points(*((step, 5.0) for step in range(40, 100)))
    text = render_curve(merge({0: first, 1: again}), 80, 12, title="loss")
    head, *rows, axis, _ = text.split("\n")
    assert head == "loss  last 5  min 5  max 10  attempts 0–1  20 done anew"
    assert "┴1" in axis and axis.index("┴") == 12 + round(40 / 99 * 67)
    top = rows[0][12:]
    kept, hidden = top[:27], top[28:]
    assert "0" in hidden and len(hidden.replace(" ", "")) < 20 < len(kept.replace(" ", ""))


def test_runs_side_by_side_are_told_apart_by_letter_without_colour_and_without_unicode() -> None:
    runs = [Shown(series(*((s, level + s / 100) for s in range(100))), f"run-{level}") for level in (1, 2, 3)]
    text = render("loss", runs, look=Look(80, 16))
    head, a, b, c, *rows = text.split("\n")
    assert head == "loss" and "\x1b" not in text
    assert [a[:10], b[:10], c[:10]] == ["  a run-1 ", "  b run-2 ", "  c run-3 "]
    assert all(sum(letter in row[12:] for row in rows[:-2]) >= 2 for letter in "abc")
    assert_fits(text, 80, 16, True)
    plain = render("loss", runs, look=Look(80, 16, unicode=False))
    assert_fits(plain, 80, 16, False)
    assert {c for row in plain.split("\n")[4:-2] for c in row[12:]} == {" ", "a", "b", "c"}


def test_two_runs_of_the_same_values_both_show() -> None:
    same = series(*((s, 1.0) for s in range(50)))
    text = render("loss", [Shown(same, "one"), Shown(same, "two")], look=Look(80, 12))
    plot = "".join(row[12:] for row in text.split("\n")[3:-2])
    assert "a" in plot and "b" in plot


def test_colours_come_only_where_the_terminal_has_them_and_change_no_width() -> None:
    runs = [Shown(series((0, 1), (9, 2)), "one"), Shown(series((0, 2), (9, 1)), "two")]
    plain, coloured = (render("loss", runs, look=Look(80, 12, colours=has)) for has in (False, True))
    assert "\x1b[36m" in coloured and "\x1b[33m" in coloured
    assert re.sub("\x1b\\[[0-9;]*m", "", coloured) == plain


def test_powers_of_ten_are_evenly_spaced_and_what_is_not_positive_is_counted() -> None:
    text = render_curve(
        series((0, 1), (1, 10), (2, 100), (3, 0), (4, -1)), 80, 14, False, "loss", View(log=True)
    )
    rows = text.split("\n")
    assert rows[0] == "loss  last -1  min -1  max 100  2 not above 0"
    assert [row.split()[0] for row in rows[1:-2] if row[:10].strip()] == ["100", "10", "1"]
    assert (
        render_curve(series((0, 0.0)), title="x", view=View(log=True))
        == "x  last 0  min 0  max 0  1 not above 0"
    )


def test_time_below_the_curve() -> None:
    some = merge({0: points((0, 1.0), (10, 2.0), (5400, 3.0))})
    relative = render("loss", [Shown(some, began_s=1000)], View("relative"))
    assert relative.split("\n")[-1].split() == ["after", "0", "s", "90", "min"]
    clock = render("loss", [Shown(some)], View("time")).split("\n")[-1].split()
    assert len(clock) == 2 and all(re.fullmatch(r"\d\d:\d\d:\d\d", text) for text in clock)


def test_points_whose_steps_came_late_are_in_order_by_time() -> None:
    some = points((0, 1.0), (2, 3.0), (1, 9.0))
    some.times_s[2] = 5000.0
    text = render("x", [Shown(merge({0: some}), began_s=1000)], View("relative"), Look(80, 8, unicode=False))
    assert text.split("\n")[1].rstrip().endswith("*") and "after 0 s" in text


def test_smoothing_keeps_the_raw_values_faint_and_starts_where_they_start() -> None:
    assert smoothed([4.0, math.nan, 2.0], 0.5)[0] == 4.0
    assert smoothed([4.0, 2.0], 0.5)[1] == pytest.approx(8 / 3)
    assert smoothed([1.0] * 1000, 0.999)[-1] == pytest.approx(1.0)
    raw = series(*((s, float(s % 2)) for s in range(500)))
    text = render_curve(raw, 80, 14, title="loss", view=View(smooth=0.95))
    assert "smoothed 0.95" in text.split("\n")[0]
    dots = sum(bin(ord(c) - 0x2800).count("1") for c in text if "\u2800" <= c <= "\u28ff")
    everything = render_curve(raw, 80, 14)
    assert dots < sum(bin(ord(c) - 0x2800).count("1") for c in everything if "\u2800" <= c <= "\u28ff") / 2


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("\x1b[2J\n\x9b", "?[2J??"),
        ("a\u0301b", "a\u0301b"),
        ("e" + "\u0301" * 500, "e" + "\u0301" * 4),
        ("\u202eabc\u200b", "?abc?"),
        ("\ud800", "?"),
    ],
    ids=ascii,
)
def test_no_name_reaches_the_terminal_but_as_text(name: str, shown: str) -> None:
    assert printable(name) == shown
    assert printable(name, unicode=False).isascii()


@given(st.text(max_size=60), st.integers(3, 40))
def test_a_name_that_is_too_long_keeps_both_its_ends(name: str, width: int) -> None:
    short = shorten(printable(name), width)
    assert columns(short) <= width
    if columns(printable(name)) > width:
        assert "…" in short


@given(st.text(max_size=60))
def test_no_cell_is_a_formula_or_a_control_character(name: str) -> None:
    assert cell(name).isprintable() and cell(name)[:1] not in set("=+-@\t\r")


def test_durations_are_short() -> None:
    assert [duration_text(s) for s in (0, 90, 5400, 90_000, 400_000)] == [
        "0 s",
        "90 s",
        "90 min",
        "25 h",
        "4.63 d",
    ]
