"""`tp job metrics -f`: curves drawn again in place on a terminal, new points as lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from shutil import get_terminal_size

import click

from tuneplane.cli.curves import CurveReader, head
from tuneplane.cli.metrics import MOST_CURVES
from tuneplane.cli.show import clock, show_notices
from tuneplane.collect.chart import Look
from tuneplane.collect.choice import is_system
from tuneplane.collect.figure import View
from tuneplane.collect.printable import number_text, printable, step_text
from tuneplane.kernel.errors import Exit
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.runs.logs import ASK_S
from tuneplane.runs.secrets import remove_secrets
from tuneplane.runs.state import RunState, read_state

POLL_S = 1.0
"""Between two looks at the files: with the writer's own 0.2 s a point is on the screen well within 5 s (C21)."""

_LEAST_CHART, _MOST_CHART = 8, 16  # lines
_MOST_ROWS = 6  # of the table below
_CHART_EACH = _LEAST_CHART + 1
FIRST = 10
"""Points of each metric that are told of what was there before, as `tail -f` does."""
_ANEW = "\x1b[2J\x1b[H"


def watch(reader: CurveReader, names: Sequence[str], view: View, look: Look) -> int:
    """Show the runs' curves until all of them have ended. Exit 3 where the first did not complete."""
    states = States(reader.folders)
    screen: Screen | Lines = Screen() if sys.stdout.isatty() else Lines()
    first = reader.folders[0]
    try:
        while True:
            final = states.ask()
            reader.refresh()
            screen.show(reader, names, states.words(), view, look)
            if final:
                break
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        show_notices([f"the run goes on: tp job metrics {first.run_id} -f, or tp job stop {first.run_id}"])
        raise
    missing = [pattern for pattern in names if not reader.choose([pattern], strict=False)]
    if missing:
        show_notices([f"no metric {printable(', '.join(missing))} came"])
    for folder in reader.folders:
        remove_secrets(folder, states.of[folder.run_id])
    state = states.of[first.run_id]
    told = f"{state.run_id}: {state.state}"
    told += f", exit code {state.code}" if state.code is not None else ""
    click.echo(f"{told}: {state.reason}" if state.reason else told, err=True)
    return Exit.DONE if state.state == "COMPLETED" else Exit.JOB_FAILED


class States:
    """How the runs are; Slurm is asked now and then, and when a run's own records tell of an end."""

    def __init__(self, folders: Sequence[RunFolder]) -> None:
        self.of: dict[str, RunState] = {}
        self._folders = folders
        self._asked_at = 0.0
        self._ends: list[object] = []

    def ask(self) -> bool:
        """Whether all have ended; what they said before that is then in their files."""
        ends = [_ends(folder) for folder in self._folders]
        if not self.of or ends != self._ends or time.monotonic() - self._asked_at >= ASK_S:
            self._ends, self._asked_at = ends, time.monotonic()
            for folder in self._folders:
                known = self.of.get(folder.run_id)
                if known is None or not known.is_final:
                    self.of[folder.run_id] = read_state(folder)
        return all(state.is_final for state in self.of.values())

    def words(self) -> Mapping[str, str]:
        """A word on each."""
        return {run_id: state.state for run_id, state in self.of.items()}


def _ends(folder: RunFolder) -> object:
    """What changes when a run's own records tell of an end, or of a new start."""
    try:
        attempts = folder.attempts()
    except OSError:
        return None
    return len(attempts), bool(attempts) and attempts[-1].end.exists()


class Screen:
    """Frames, each in place of the one before."""

    def __init__(self) -> None:
        self._lines = 0
        self._size = (0, 0)

    def show(
        self, reader: CurveReader, names: Sequence[str], states: Mapping[str, str], view: View, look: Look
    ) -> None:
        """Draw the runs as they are now, in what the terminal has room for."""
        columns, rows = size = get_terminal_size((80, 24))
        look = replace(look, width=min(columns - 1, 100))  # the last column makes some terminals wrap
        lines = frame(reader, names, states, view, look, rows - 1)
        anew = self._lines == 0 or size != self._size
        start = (_ANEW if self._lines else "") if anew else f"\x1b[{self._lines}A\r\x1b[J"
        sys.stdout.write(start + "".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
        self._lines, self._size = len(lines), size


def frame(
    reader: CurveReader, names: Sequence[str], states: Mapping[str, str], view: View, look: Look, rows: int
) -> list[str]:
    """At most `rows` lines: how the runs are, as many curves as have room, their last values."""
    lines = head(reader, states, look)[: rows - 1]
    chosen = reader.choose(names, strict=False)
    drawn = reader.to_draw(chosen, names, MOST_CURVES)
    left = rows - len(lines)
    table_rows = (
        min(len(drawn) * len(reader.folders), _MOST_ROWS) + 1 if drawn and left >= 2 * _CHART_EACH else 0
    )
    room = left - table_rows
    count = min(len(drawn), max(1, room // _CHART_EACH))
    if count and room > 5:
        height = min(_MOST_CHART, room // count)
        for chart in reader.charts(drawn[:count], view, replace(look, height=height)):
            lines += chart.split("\n")
    if table_rows:
        table = reader.table(chosen if names else drawn, look.width)[:table_rows]
        lines += table
    more = len(chosen) - count
    if more > 0 and len(lines) < rows:
        lines.append(f"{more} more metrics are not drawn: name those you want"[: look.width])
    return lines[:rows]


class Lines:
    """New points as lines of text, for a file or a program that reads along."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], tuple[int, float]] = {}
        self._said: dict[str, str] = {}

    def show(
        self, reader: CurveReader, names: Sequence[str], states: Mapping[str, str], view: View, look: Look
    ) -> None:
        """Say what came since the last call, and each new state."""
        for folder in reader.folders:
            word = states.get(folder.run_id, "")
            if self._said.get(folder.run_id) != word:
                self._said[folder.run_id] = word
                click.echo(f"{folder.run_id}: {word}", err=True)
        chosen = reader.choose(names, strict=False)
        for folder in reader.folders:
            of = f"{folder.run_id}  " if len(reader.folders) > 1 else ""
            for line in self._new(reader, folder, chosen):
                click.echo(of + line)
        sys.stdout.flush()

    def _new(self, reader: CurveReader, folder: RunFolder, chosen: Sequence[str]) -> Iterator[str]:
        """A line for each step with what it said, in the order of time."""
        found: dict[tuple[int, float, bool], tuple[float, list[str]]] = {}
        for name, series in reader.metrics(folder, chosen).series.items():
            key = (folder.run_id, name)
            last = self._last.get(key)
            oldest = 0 if key in self._last else max(0, len(series) - FIRST)
            for index in range(len(series) - 1, oldest - 1, -1):
                place = (series.attempts[index], series.steps[index])
                if last is not None and place <= last:
                    break
                time_s, parts = found.setdefault((*place, is_system(name)), (series.times_s[index], []))
                parts.append(f"{printable(name)} {number_text(series.values[index])}")
            if len(series):
                self._last[key] = (series.attempts[-1], series.steps[-1])
        for (_, step, hardware), (time_s, parts) in sorted(found.items(), key=lambda item: item[1][0]):
            yield "  ".join([clock(time_s), *([] if hardware else [f"step {step_text(step)}"]), *parts])
