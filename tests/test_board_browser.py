"""The board in a real browser, as its user sees it."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from board_browser import Browser, browser
from board_runs import (
    TOKEN,
    begin_attempt,
    end_attempt,
    hardware,
    make_run,
    write_points,
)
from board_server import BoardServer, board

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

STARTED = 1_768_383_010.0
SLOW = "mnist-20260114-093010-aaaa"
FAST = "mnist-20260114-103010-bbbb"
TWICE = "mnist-20260114-113010-cccc"
ODD = "odd-20260113-093010-dddd"
EMPTY = "new-20260113-093010-eeee"
MARKUP = "<img src=x onerror=document.title='hacked'>"


def fill(root: Path) -> None:
    """The runs that the tests look at, and two hundred older ones."""
    lr = {"lr": 0.001, "model": {"layers": 2}}
    slow = make_run(root, SLOW, STARTED, spec__hyperparams={"seed": 1})
    write_points(
        slow, [(s, STARTED + 2 * s, {"train/loss": 100.0 - s, "lr": 0.5}) for s in range(101)], hparams=lr
    )
    fast = make_run(root, FAST, STARTED + 3600, spec__hyperparams={"seed": 2})
    rows = [(s, STARTED + 3600 + s, {"train/loss": 50.0 - s / 4}) for s in range(101)]
    write_points(fast, rows, hparams={**lr, "lr": 0.01}, dropped=3)
    write_points(fast, hardware(1, STARTED + 3600, 40, gpus=2), rank=1)
    twice = make_run(root, TWICE, STARTED + 7200)
    begin_attempt(twice, 1, STARTED + 8000)
    end_attempt(twice, 1, STARTED + 9000, 0)
    write_points(twice, [(s, STARTED + 7200 + s, {"train/loss": 60.0}) for s in range(60)])
    write_points(twice, [(s, STARTED + 8000 + s, {"train/loss": 20.0}) for s in range(40, 101)], attempt=1)
    odd = make_run(root, ODD, STARTED - 9000, code=1, spec__hyperparams={MARKUP: MARKUP})
    values = {
        MARKUP: 1.0,
        "a\nb": 2.0,
        "losses/\u202egnp": 3.0,
        "x" * 3000: 4.0,
        "nan": math.nan,
        "inf": math.inf,
    }
    write_points(odd, [(s, STARTED - 9000 + s, values) for s in range(3)], hparams={MARKUP: {MARKUP: MARKUP}})
    report = {
        "schema": "tuneplane/eval-report/v1",
        "harness": {"name": MARKUP, "version": "1"},
        "results": [{"task": MARKUP, "metric": "acc", "value": 0.4375, "stderr": 0.125, "samples": 16}, 7],
    }
    (odd.out / "eval").mkdir(parents=True)
    (odd.out / "eval/report.json").write_text(json.dumps(report))
    odd.attempt(0).node_log(0).write_text(f"\x1b[31m{MARKUP}\x1b[0m\nsecond line\n")
    make_run(root, EMPTY, STARTED - 9500)
    for number in range(200):
        run_id = f"older-20260{1 + number % 9}01-{number // 60:02}{number % 60:02}00-zzzz".replace(
            "20260", "20250"
        )
        make_run(root, run_id, STARTED - 1e7 - number)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BoardServer]:
    home = tmp_path_factory.mktemp("home")
    fill(home / "tuneplane")
    with board(home) as running:
        yield running


@pytest.fixture(scope="module")
def window(server: BoardServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        opened.open(server.link)
        yield opened


@pytest.fixture
def page(window: Browser) -> Iterator[Browser]:
    """The one window; whatever a test does in it, the console stays empty."""
    window.complaints()
    yield window
    assert window.complaints() == []


def test_the_link_signs_in_and_leaves_the_address_and_the_newest_run_is_shown(page: Browser) -> None:
    page.card("loss")
    assert "token" not in page.driver.current_url and page.fragment == f"runs={TWICE}"
    assert page.run("return document.cookie") == "", "the cookie is not for scripts"
    assert page.texts(".live") == ["live"]
    asked = page.run("return performance.getEntriesByType('resource').map((e) => new URL(e.name).origin)")
    assert set(asked) == {page.run("return location.origin")}, "everything comes from the board itself"


def test_a_chart_is_drawn_and_a_points_value_is_read(page: Browser) -> None:
    page.show(f"runs={SLOW}")
    card = page.card("loss")
    (ink,) = page.inked(card).values()
    assert ink > 100
    told = page.hover(card, 0.25)
    assert "step 25" in told and "75" in told and SLOW in told
    assert "2026-01-14" in told
    assert "step 100" in page.hover(card, 0.999)
    card.find_element("css selector", ".plot").click()
    page.press("\ue011", "\ue014", "\ue014")  # Home, right, right
    assert "step 2" in page.text(".tooltip") and "98" in page.text(".tooltip")
    page.press("\ue00c")


def test_runs_are_compared(page: Browser) -> None:
    page.show(f"runs={SLOW}")
    page.card("loss")
    page.type(".side input[type=search]", "mnist.*bbbb")
    page.wait(lambda: len(page.all(".run")) == 1, "the list is filtered")
    page.click(".run-box")
    page.wait(lambda: page.fragment.startswith(f"runs={SLOW},{FAST}"), "the address has both")
    card = page.card("loss")
    page.wait(lambda: len(page.inked(card)) == 2, "two lines of two colours")
    told = page.hover(card, 0.5, 0.9)
    assert told.index(FAST) < told.index(SLOW), "the nearer one first"
    assert "37.5" in told and "50" in told
    assert page.texts(".chip-name") == [SLOW, FAST]
    assert f"{FAST}: 3 points were dropped by the job" in page.text(".notices")


def test_filters_are_regular_expressions_and_a_bad_one_is_told(page: Browser) -> None:
    page.show(f"runs={SLOW}")
    page.card("lr")
    page.type(".toolbar input[type=search]", "^train/l.ss$")
    page.wait(lambda: page.texts(".card-title") == ["loss"], "one chart is left")
    page.type(".toolbar input[type=search]", "(")
    page.wait(lambda: "not a regular expression" in page.text("#metric-fault"), "the fault is told")
    assert len(page.texts(".card-title")) == 2, "and hides nothing"
    page.type(".toolbar input[type=search]", "nothing at all")
    page.wait(lambda: "No metric matches" in page.text(".view .empty"), "an empty page says why")
    page.type(".side input[type=search]", "[")
    page.wait(lambda: "not a regular expression" in page.text("#run-fault"), "of runs too")


def test_zoom_by_dragging_and_back(page: Browser) -> None:
    page.show(f"runs={SLOW}")
    card = page.card("loss")
    page.drag(card, 0.2, 0.6)
    page.wait(lambda: "zoom=" in page.fragment, "the address has the part")
    low, high = (float(x) for x in page.fragment.partition("zoom=")[2].partition("&")[0].split("%7E"))
    assert abs(low - 20) < 2 and abs(high - 60) < 2
    told = page.wait(lambda: "step 40" in page.hover(card, 0.5) and page.text(".tooltip"), "zoomed")
    assert "60" in told
    page.press("z")
    page.wait(lambda: "zoom=" not in page.fragment, "whole again")


def test_the_address_brings_everything_back(page: Browser) -> None:
    page.show(
        f"runs={SLOW},{FAST}&x=relative&smooth=0.9&log=1&metrics=loss&find=mnist&sort=name&wide=train/loss"
    )
    card = page.card("loss")
    assert "wide" in card.get_attribute("class")
    assert page.run("return document.querySelector('.smooth input').value") == "0.9"
    assert page.texts("[aria-checked=true]") == ["time since start"]
    assert page.run("return document.querySelector('.toolbar .check input').checked")
    assert page.texts(".run-name") == [SLOW, FAST, TWICE]
    told = page.wait(
        lambda: "raw" in page.hover(card, 0.5) and page.text(".tooltip"), "smoothed and raw values"
    )
    assert "1:40" in told, "half of 200 s"


def test_keys_do_what_the_help_says(page: Browser) -> None:
    page.show(f"runs={SLOW}")
    page.card("loss")
    page.press("?")
    assert "filter runs" in page.one("dialog").text
    page.press("\ue00c")
    page.press("l")
    page.wait(lambda: "log=1" in page.fragment, "log")
    page.press("x")
    page.wait(lambda: "x=relative" in page.fragment, "axis")
    page.press("/")
    assert page.run("return document.activeElement.placeholder").startswith("Filter runs")
    page.press("\ue00c", "r", "\ue015", " ")  # Esc, the list, down, space
    page.wait(lambda: len(page.all(".chip")) == 2, "a second run by keyboard")
    page.press("\ue00c", "3")
    page.wait(lambda: "tab=config" in page.fragment, "third tab")


def test_a_runs_names_are_shown_and_never_obeyed(page: Browser) -> None:
    page.show(f"runs={ODD}")
    page.wait(lambda: MARKUP in page.texts(".card-title"), "the name as text")
    assert any("x" * 50 in title for title in page.texts(".card-title"))
    page.wait(lambda: "no finite value" in page.text(".card-note"), "a line of NaN alone says so")
    page.hover(page.card(MARKUP), 0.5)
    for tab in ("config", "log", "summary"):
        page.show(f"runs={ODD}&tab={tab}")
        page.wait(lambda: MARKUP in page.text("#view"), f"the name on {tab}")
    page.show(f"runs={ODD}&metrics=%3Cimg&find=%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E")
    page.card(MARKUP)
    assert page.all("img") == [] and "hacked" not in page.driver.title
    page.show(f"runs=%3Cimg%20src%3Dx%3E,{SLOW}")
    page.wait(lambda: "<img src=x>" in page.text(".missing"), "a run that is not there")


def test_attempts_logs_config_system_and_summary(page: Browser) -> None:
    page.show(f"runs={TWICE}")
    told = page.wait(
        lambda: "attempt 1" in page.hover(page.card("loss"), 0.5) and page.text(".tooltip"), "attempt"
    )
    assert "20" in told
    page.show(f"runs={ODD}&tab=log")
    page.wait(lambda: page.text(".log-text") == f"{MARKUP}\nsecond line", "the log without escapes")
    page.type(".log input[type=search]", "^second")
    page.wait(lambda: page.text(".log-text") == "second line", "its lines filtered")
    page.show(f"runs={SLOW},{FAST}&tab=config")
    page.wait(lambda: "set.seed" in page.text(".differs"), "what differs")
    assert "model.layers" not in page.text(".compare")
    page.one(".config .check input").click()
    page.wait(lambda: "model.layers" in page.text(".compare"), "what is the same")
    page.show(f"runs={FAST}&tab=system")
    card = page.card("gpu/utilization_percent")
    page.wait(lambda: len(page.inked(card)) == 2, "a line for each GPU")
    told = page.hover(card, 0.5)
    assert "gpu0" in told and "gpu1" in told and "%" in told
    page.show(f"runs={TWICE}&tab=summary")
    page.wait(lambda: "attempt" in page.text(".summary table"), "its attempts")
    page.wait(lambda: "train/loss" in page.texts(".summary .compare th"), "its metrics")
    parts = "return [...document.querySelectorAll('.summary .compare th')].map((cell) => cell.innerHTML)"
    assert "train/<wbr>loss" in page.run(parts)
    page.show(f"runs={EMPTY}")
    page.wait(
        lambda: f"tp job why {EMPTY}" in page.text(".view .empty"), "a run without points says what to do"
    )


def test_what_an_evaluation_found_is_shown_as_text(page: Browser) -> None:
    page.show(f"runs={ODD}&tab=summary")
    page.wait(lambda: "Evaluation" in page.text(".summary"), "its evaluation")
    for words in (MARKUP, "0.4375", "0.125", "16", "report.json: 1 of its rows cannot be read"):
        assert words in page.text(".summary")


def test_csv_and_png_of_a_chart(page: Browser) -> None:
    folder = Path(page.driver.capabilities["chrome"]["userDataDir"]).parent / "downloads"
    page.show(f"runs={SLOW}")
    card = page.card("loss")
    page.hover(card, 0.5)
    for label, name in (("CSV", f"{SLOW}-train-loss.csv"), ("PNG", f"{SLOW}-train-loss.png")):
        card.find_element("css selector", f"button[aria-label*={label}]").click()
        page.wait((folder / name).exists, f"{label} saved")
    rows = list(csv.DictReader((folder / f"{SLOW}-train-loss.csv").open()))
    assert len(rows) == 101 and rows[25]["value"] == "75"
    assert (folder / f"{SLOW}-train-loss.png").read_bytes().startswith(b"\x89PNG")


def test_two_hundred_runs_are_a_list_that_stays_quick(page: Browser) -> None:
    page.show(f"runs={SLOW}")
    page.wait(lambda: "205 runs" in page.text(".side-foot"), "all are counted")
    assert len(page.all(".run")) < 60, "only what is in sight is in the document"
    page.type(".side input[type=search]", "^older.*zzzz completed")
    page.wait(lambda: "200 of 205" in page.text(".side-foot"), "all the older ones")
    page.one(".side .link").click()
    page.wait(lambda: "200 shown" in page.text(".side-foot"), "compared at once")
    page.wait(lambda: "and 192 more" in page.text(".chips"), "and told in short")
    page.wait(lambda: page.texts(".live") == ["live"] and "No points" in page.text(".view"), "answered")


def test_light_and_dark(page: Browser) -> None:
    page.show(f"runs={SLOW}")
    card = page.card("loss")
    background = "return getComputedStyle(document.body).backgroundColor"
    light, ink = page.run(background), page.inked(card)
    page.emulate("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.wait(lambda: page.run(background) != light, "as the system says")
    page.wait(lambda: page.inked(card) and page.inked(card).keys() != ink.keys(), "the line is drawn anew")
    page.press("t")
    page.wait(lambda: page.run(background) == light, "light, whatever the system says")
    page.press("t", "t")
    page.emulate("Emulation.setEmulatedMedia", features=[])


def test_a_narrow_window_has_its_runs_behind_a_button(page: Browser) -> None:
    page.emulate(
        "Emulation.setDeviceMetricsOverride", width=420, height=800, deviceScaleFactor=2, mobile=False
    )
    page.show(f"runs={SLOW}")
    page.card("loss")
    assert not page.all(".run")[0].is_displayed()
    assert page.run("return document.documentElement.scrollWidth") <= 420
    page.one(".menu").click()
    page.wait(page.one(".run").is_displayed, "the list")
    page.press("\ue00c")
    page.emulate("Emulation.clearDeviceMetricsOverride")


@pytest.mark.contract("C21")
def test_a_point_is_on_the_board_within_five_seconds_of_log(page: Browser, server: BoardServer) -> None:
    home = server.home
    run = make_run(home / "tuneplane", "live-20260115-093010-ffff", time.time(), code=None)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        "TUNEPLANE_JOB_ENABLED": "1",
        "TUNEPLANE_JOB_ENDPOINT": run.ingest.as_uri(),
        "TUNEPLANE_JOB_RUN_ID": run.run_id,
        "TUNEPLANE_JOB_TOKEN": TOKEN,
        "TUNEPLANE_JOB_ATTEMPT": "0",
        "TUNEPLANE_MACHINE_RANK": "0",
    }
    program = (
        "import sys\nfrom tuneplane.report import log\n"
        "for line in sys.stdin: log({'live/value': float(line)})"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, text=True
    )
    assert trainer.stdin is not None
    try:
        page.show(f"runs={run.run_id}")
        for value in (11, 22, 33, 44):
            logged = time.monotonic()
            trainer.stdin.write(f"{value}\n")
            trainer.stdin.flush()
            drawn = f"{run.run_id} {value}."  # what a screen reader is told of the chart
            page.wait(
                lambda drawn=drawn: (
                    drawn in str(page.run("return document.querySelector('.plot')?.ariaLabel"))
                ),
                f"{value} is drawn",
                5.0 if value > 11 else 10.0,  # the run itself is new to the board at first
            )
            print(f"{value}: {time.monotonic() - logged:.1f} s after log()")
    finally:
        trainer.stdin.close()
        trainer.wait(timeout=10)


def test_an_end_of_the_board_is_said_once_and_it_comes_back(tmp_path: Path) -> None:
    make_run(tmp_path / "tuneplane", SLOW, STARTED)
    with browser(tmp_path / "chromium") as page:
        with board(tmp_path, TUNEPLANE_STORE_DIR="not/absolute") as server:
            page.open(server.link)
            page.wait(lambda: page.texts(".live") == ["live"], "live")
            page.wait(lambda: "TUNEPLANE_STORE_DIR is no absolute path" in page.text(".notices"), "no cache")
            port = server.port
            assert server.end() == 0
        page.wait(lambda: page.texts(".live") == ["not connected"], "not connected")
        time.sleep(2.5)
        assert len(page.all(".banner")) == 1 and "does not answer" in page.text(".banner")
        with board(tmp_path, "--port", str(port)):
            page.wait(
                lambda: "open the link that it prints" in page.text(".banner"), "another board, not ours"
            )
