"""How far the preparation of an image has come: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from tuneplane.cli.show import size

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

SHORT_BYTES = 200_000_000
"""A step over less than this is over before anybody wonders; only a longer one is shown."""

LINE_S = 30.0
"""Between two lines about one step where there is no terminal, as in a log."""

QUICK_S = 2.0


def image_progress() -> ImageProgress:
    """A new progress, which shows nothing before there is something to wait for."""
    return ImageProgress(sys.stderr.isatty())


class ImageProgress:
    """The progress that `tuneplane.images` tells."""

    def __init__(self, terminal: bool) -> None:
        self.terminal = terminal
        self._what = ""
        self._since = self._told = 0.0
        self._bars: Bars | None = None
        self._task: TaskID | None = None

    def __call__(self, what: str, done_bytes: int = 0, total_bytes: int = 0) -> None:
        now = time.monotonic()
        if what != self._what:
            self._close()
            self._what, self._since, self._told = what, now, 0.0
        is_long = total_bytes >= SHORT_BYTES or now - self._since >= QUICK_S
        ended = 0 < total_bytes <= done_bytes
        if self.terminal:
            self._show_bar(what, done_bytes, total_bytes, is_long, ended)
        elif is_long and not ended and (not self._told or now - self._told >= LINE_S):
            self._told = now
            far = f": {size(done_bytes)} of {size(total_bytes)}" if total_bytes else ""
            click.echo(f"{what}{far}", err=True)

    def _show_bar(self, what: str, done_bytes: int, total_bytes: int, is_long: bool, ended: bool) -> None:
        if self._bars is None:
            if ended or not is_long:
                return
            self._bars = self._open(total_bytes)
            self._task = self._bars.add_task(what, total=total_bytes or None)
        assert self._task is not None
        self._bars.update(self._task, completed=done_bytes, total=total_bytes or None)
        if ended:
            self._close()

    def _open(self, total_bytes: int) -> Bars:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        text = TextColumn("{task.description}", markup=False)
        columns = (
            (text, BarColumn(), DownloadColumn(), TimeRemainingColumn())
            if total_bytes
            else (SpinnerColumn(), text, TimeElapsedColumn())
        )
        bars = Progress(*columns, console=Console(stderr=True), transient=True)
        bars.start()
        return bars

    def _close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = self._task = None

    def __del__(self) -> None:
        self._close()
