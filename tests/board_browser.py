"""A real Chromium, driven by chromedriver, for tests of the board and its bench."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    # It would look for hosts that nobody can reach here.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--hide-scrollbars",
)
WAIT_S = 15.0


def needs_browser() -> tuple[str, str]:
    """Paths of Chromium and its driver. Skips where they are missing; in CI that is a failure."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser and driver:
        return browser, driver
    reason = "no chromium and chromedriver here: tests/tools/system_packages.py installs them"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


class Browser:
    """A window on the board. Elements are found by CSS selectors."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        self.driver.get(address)

    def show(self, fragment: str) -> None:
        """The board with this in its address, loaded anew."""
        base = self.driver.current_url.partition("#")[0]
        self.driver.get("about:blank")
        self.driver.get(f"{base}#{fragment}")

    @property
    def fragment(self) -> str:
        text: str = self.driver.current_url.partition("#")[2]
        return text

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a piece of JavaScript that says `return`."""
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def one(self, selector: str) -> Any:
        """The first visible element, once there is one."""
        return self.wait(lambda: next((e for e in self.all(selector) if e.is_displayed()), None), selector)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        found: list[str] = self.run(script, selector)
        return found

    def text(self, selector: str) -> str:
        return "\n".join(self.texts(selector))

    def wait(self, true: Callable[[], Any], what: str, deadline_s: float = WAIT_S) -> Any:
        """What `true` returns once that is something; fail after a while."""
        from selenium.common.exceptions import StaleElementReferenceException

        until = time.monotonic() + deadline_s
        while True:
            try:
                found = true()
            except StaleElementReferenceException:
                found = None
            if found:
                return found
            assert time.monotonic() < until, f"not within {deadline_s:.0f} s: {what}"
            time.sleep(0.05)

    def type(self, selector: str, text: str) -> None:
        field = self.one(selector)
        field.clear()
        field.send_keys(text)

    def click(self, selector: str) -> None:
        """Press and release where an element is, whatever gets it."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).move_to_element(self.one(selector)).click().perform()

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        chain = ActionChains(self.driver)
        for key in keys:
            chain.send_keys(key)
        chain.perform()

    def card(self, title: str) -> Any:
        """The chart of this title, once its lines are drawn."""
        found = (
            "return [...document.querySelectorAll('.card')].find((card) =>"
            " card.querySelector('.card-title').textContent === arguments[0] && card.querySelector('canvas')"
            " && card.querySelector('.plot').getAttribute('aria-label')) ?? null"
        )
        return self.wait(lambda: self.run(found, title), f"the chart {title}")

    def hover(self, card: Any, x: float, y: float = 0.5) -> str:
        """Put the pointer over a part (0 to 1) of a chart's area; what is then told."""
        from selenium.webdriver import ActionChains

        over = card.find_element("css selector", ".u-over")
        self.run("arguments[0].scrollIntoView({block: 'center'})", over)
        width, height = over.size["width"], over.size["height"]
        move = ActionChains(self.driver, duration=0).move_to_element_with_offset
        move(over, round((x - 0.5) * width) + 3, round((y - 0.5) * height)).perform()
        move(over, round((x - 0.5) * width), round((y - 0.5) * height)).perform()
        return self.text(".tooltip:not([hidden])")

    def drag(self, card: Any, start: float, end: float) -> None:
        from selenium.webdriver import ActionChains

        over = card.find_element("css selector", ".u-over")
        width = over.size["width"]
        chain = ActionChains(self.driver, duration=50)
        chain.move_to_element_with_offset(over, round((start - 0.5) * width), 0).click_and_hold()
        chain.move_by_offset(round((end - start) * width), 5).release().perform()

    def inked(self, card: Any) -> dict[str, int]:
        """How many pixels of the chart have each of the colours that lines have."""
        script = """
        const canvas = arguments[0].querySelector("canvas");
        const copy = document.createElement("canvas");
        [copy.width, copy.height] = [canvas.width, canvas.height];
        const context = copy.getContext("2d", { willReadFrequently: true });
        context.drawImage(canvas, 0, 0);
        const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
        const style = getComputedStyle(document.documentElement);
        const named = new Map();
        for (let i = 0; i < 12; i++) named.set(style.getPropertyValue(`--c${i}`).trim(), 0);
        for (let i = 0; i < data.length; i += 4) {
          if (data[i + 3] < 250) continue;
          const hex = "#" + [0, 1, 2].map((j) => data[i + j].toString(16).padStart(2, "0")).join("");
          if (named.has(hex)) named.set(hex, named.get(hex) + 1);
        }
        return Object.fromEntries([...named].filter(([, n]) => n > 0));
        """
        found: dict[str, int] = self.run(script, card)
        return found

    def complaints(self) -> list[str]:
        """What the console has shown since it was last asked: violated policies, exceptions, failed requests."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def emulate(self, command: str, **parameters: Any) -> None:
        """A command of the DevTools protocol."""
        self.driver.execute_cdp_cmd(command, parameters)


@contextmanager
def browser(folder: Path, width: int = 1440, height: int = 1000) -> Iterator[Browser]:
    """A browser of its own, whose profile and downloads lie in `folder`."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    program, driver = needs_browser()
    options = Options()
    options.binary_location = program
    for flag in (*FLAGS, f"--window-size={width},{height}", f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    (folder / "downloads").mkdir(parents=True)
    started = webdriver.Chrome(options=options, service=Service(driver))
    try:
        started.set_page_load_timeout(30)
        started.set_script_timeout(30)
        started.execute_cdp_cmd(
            "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder / "downloads")}
        )
        yield Browser(started)
    finally:
        started.quit()
