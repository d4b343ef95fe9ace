"""How long the board takes to show 100 runs in one chart, in a real Chromium. Part of `make bench`."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from board_browser import Browser, browser
from board_runs import make_run, write_points
from board_server import BoardServer, board

Row = tuple[str, str, str, str, str, bool]
"""What, measured, floor, figure, target, whether it holds."""

RUNS, POINTS, REPEATS = 100, 1_000, 7
TARGET_MS = 300

BARE = """
const [lines, points] = arguments;
const canvas = document.createElement("canvas");
[canvas.width, canvas.height] = [1000, 400];
document.body.append(canvas);
const context = canvas.getContext("2d");
const values = Array.from({ length: points }, () => Math.random());
const begun = performance.now();
for (let line = 0; line < lines; line++) {
  context.beginPath();
  for (let i = 0; i < points; i++) context.lineTo(i, line + 300 * values[i]);
  context.stroke();
}
context.getImageData(0, 0, 1, 1);
canvas.remove();
return performance.now() - begun;
"""
"""As many lines on a canvas with nothing around them."""

MEASURED = """
return performance.getEntriesByType("measure")
  .filter((entry) => entry.name === arguments[0] + " train/loss").map((entry) => entry.duration).pop();
"""


def fill(root: Path) -> list[str]:
    """So many runs, each of them different; their ids."""
    ids = []
    for number in range(RUNS):
        run_id = f"bench-20260114-{number // 60:02}{number % 60:02}00-aaaa"
        rows = [
            (
                step,
                1.768e9 + step,
                {"train/loss": 1 / (1 + step / (number + 20)) + number % 7 * step % 11 / 1000},
            )
            for step in range(POINTS)
        ]
        write_points(make_run(root, run_id, 1.768e9), rows)
        ids.append(run_id)
    return ids


def look(page: Browser, server: BoardServer, ids: list[str]) -> tuple[float, float]:
    """Open the chart anew: milliseconds from asking to the answer, and from there until it is drawn."""
    page.show("runs=" + ",".join(ids))
    page.wait(lambda: page.run(MEASURED, "draw"), "the chart is drawn", 60)
    label = page.run("return document.querySelector('.plot').ariaLabel")
    assert f"{RUNS} lines" in label, label
    return page.run(MEASURED, "fetch"), page.run(MEASURED, "draw")


def board_rows() -> list[Row]:
    """The chart drawn, and asked for and drawn, beside a bare canvas in the same browser."""
    with tempfile.TemporaryDirectory(prefix="tuneplane-bench-board-", ignore_cleanup_errors=True) as folder:
        return _measure(Path(folder))


def _measure(folder: Path) -> list[Row]:
    ids = fill(folder / "tuneplane")
    with board(folder) as server, browser(folder / "chromium") as page:
        page.open(server.link)
        looks = [look(page, server, ids) for _ in range(REPEATS + 1)][1:]  # the first one reads the runs
        time.sleep(1)
        bare = statistics.median(page.run(BARE, RUNS, POINTS) for _ in range(REPEATS))
    drawn = statistics.median(draw for _, draw in looks)
    whole = statistics.median(fetch + draw for fetch, draw in looks)
    floor, target = f"bare canvas {bare:.0f} ms", f"<= {TARGET_MS} ms"
    return [
        (
            "board: 100 lines drawn",
            f"{drawn:.0f} ms",
            floor,
            f"{drawn / bare:.1f} x",
            target,
            drawn <= TARGET_MS,
        ),
        ("board: asked and drawn", f"{whole:.0f} ms", floor, f"{whole / bare:.1f} x", "", True),
    ]


if __name__ == "__main__":
    for row in board_rows():
        print("   ".join(str(part) for part in row))
