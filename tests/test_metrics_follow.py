"""`tp job metrics -f`: curves drawn again in place on a terminal, lines elsewhere, until the run has ended."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from metric_runs import MetricRun
from run_fixture import wait_until

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]

FOLLOW = [sys.executable, "-m", "tuneplane.cli.main", "job", "metrics"]


class LiveRun(MetricRun):
    """A run whose job is a process of this test."""

    def __init__(self, home: Path) -> None:
        self.job = subprocess.Popen(["sleep", "100"])
        super().__init__(home, job=f"local-{self.job.pid}")
        self.attempt(0)

    def say(self, first: int, last: int, **more: float) -> None:
        """Points of these steps, of just now."""
        values = ((s, {"train/loss": 1 / (s + 1), **more}) for s in range(first, last))
        self.log(values, time_s=time.time() - last)

    def end(self, code: int) -> None:
        self.job.kill()
        self.job.wait()
        self.attempt(0, code)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LiveRun]:
    run = LiveRun(tmp_path)
    yield run
    run.job.kill()
    run.job.wait()


def environment(home: Path) -> dict[str, str]:
    store = {"TUNEPLANE_STORE_DIR": str(home / "store")}
    return {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", "TERM": "xterm", **store}


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, words: list[str], environ: dict[str, str], rows: int = 24, columns: int = 80) -> None:
        self.text = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.execve(words[0], words, environ)
        self.resize(rows, columns)
        threading.Thread(target=self._read, daemon=True).start()

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        try:
            while data := os.read(self._terminal, 1 << 16):
                self.text += data.decode("utf-8", "replace")
        except OSError:  # it ended
            pass

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def frames(self) -> list[list[str]]:
        """What stood on the screen, one after another."""
        parts = re.split(r"\x1b\[\d+A\r\x1b\[J|\x1b\[2J\x1b\[H", self.text)
        return [part.replace("\r", "").rstrip("\n").split("\n") for part in parts]


def bare(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


@pytest.mark.contract("C21")
def test_a_new_point_is_on_the_screen_within_five_seconds_and_the_screen_ends_with_the_run(
    run: LiveRun,
) -> None:
    run.say(0, 30)
    screen = Terminal([*FOLLOW, run.run_id, "-f"], environment(run.folder.path.parents[4]))
    wait_until(lambda: "last 0.03333" in screen.text, "the first points")
    run.say(30, 60, **{"x\x1b[5n\n" + "y" * 300: 1.0})
    logged_at = time.monotonic()
    wait_until(lambda: "last 0.01667" in screen.text, "the next points")
    assert time.monotonic() - logged_at < 5
    run.end(0)
    assert screen.wait() == 0
    assert f"{run.run_id}: COMPLETED, exit code 0" in screen.text
    frames = screen.frames()
    assert len(frames) >= 2
    for frame in frames[:-1]:
        assert len(frame) < 24 and all(len(bare(line)) < 80 for line in frame)
        assert frame[0].startswith(f"{run.run_id}  RUNNING  newest point ")
    assert "\x1b[5n" not in screen.text


def test_a_window_that_changes_its_size_is_drawn_anew(run: LiveRun) -> None:
    run.say(0, 30)
    screen = Terminal([*FOLLOW, run.run_id, "-f"], environment(run.folder.path.parents[4]), 40, 100)
    wait_until(lambda: "last 0.03333" in screen.text, "the first points")
    screen.resize(12, 40)
    wait_until(lambda: "\x1b[2J" in screen.text, "a new drawing")
    run.end(3)
    assert screen.wait() == 3
    small = screen.text.partition("\x1b[2J\x1b[H")[2].partition("\x1b")[0].replace("\r", "").split("\n")
    assert len(small) <= 12 and all(len(bare(line)) < 40 for line in small if "tp job" not in line)


def test_ctrl_c_leaves_the_run_alone_and_says_so(run: LiveRun) -> None:
    run.say(0, 3)
    screen = Terminal([*FOLLOW, run.run_id, "-f"], environment(run.folder.path.parents[4]))
    wait_until(lambda: "last 0.3333" in screen.text, "the first points")
    os.kill(screen.pid, signal.SIGINT)
    assert screen.wait() == 130
    wait_until(lambda: "the run goes on: tp job metrics" in screen.text, "a word")
    assert run.job.poll() is None


def test_in_a_file_there_is_a_line_for_each_step(run: LiveRun, tmp_path: Path) -> None:
    run.say(0, 30)
    out = tmp_path / "followed.txt"
    with out.open("w") as file:
        follow = subprocess.Popen(
            [*FOLLOW, run.run_id, "train/loss", "val/acc", "-f"],
            env=environment(run.folder.path.parents[4]),
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
        )
    has: Callable[[str], bool] = lambda text: text in out.read_text()  # noqa: E731
    wait_until(lambda: has("step 29  train/loss 0.03333"), "the newest that was there")
    run.say(30, 33, **{"val/acc": 0.5, "other": 1.0})
    wait_until(lambda: has("step 32  "), "what came")
    run.end(0)
    _, said = follow.communicate(timeout=20)
    lines = out.read_text().splitlines()
    assert [re.sub(r"^\S+ \S+  ", "", line) for line in lines[-3:]] == [
        f"step {s}  train/loss {1 / (s + 1):.4g}  val/acc 0.5" for s in (30, 31, 32)
    ]
    assert len(lines) == 13 and not any("\x1b" in line for line in lines), (
        "ten that were there, three that came"
    )
    assert follow.returncode == 0 and said.splitlines()[-1] == f"{run.run_id}: COMPLETED, exit code 0"
