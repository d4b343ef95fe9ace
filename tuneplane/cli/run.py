"""The argument RUN that most of `tp job` takes, and what is read of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tuneplane.cli.completion import complete_runs

if TYPE_CHECKING:
    from tuneplane.kernel.runfolder import RunFolder
    from tuneplane.runs.state import RunState
    from tuneplane.spec import JobSpec

run_argument = click.argument("run", shell_complete=complete_runs)
json_option = click.option("--json", "as_json", is_flag=True, help="For programs.")


def find(text: str) -> RunFolder:
    """The run that a user means. Raises UsageError."""
    from tuneplane.runs.index import find_run

    return find_run(text)


def read_job(folder: RunFolder) -> JobSpec:
    """Its JobSpec. Raises OSError, UsageError."""
    from tuneplane.spec import read

    return read(folder.job)


def exit_code(state: RunState) -> str:
    """A cell of a table."""
    return "" if state.code is None else str(state.code)
