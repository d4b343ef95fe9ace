"""Ending a run for sure: asked through Slurm or by signal, then looked at until it is gone."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from tuneplane.kernel.files import write_atomic
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import Submission, read_submissions
from tuneplane.launch.slurm_commands import query_jobs, run_slurm
from tuneplane.runs.state import FINAL, RunState, read_state

LOCAL_GRACE_S = 40.0
"""Longer than the agent's own grace, so that KILL reaches the agent only when it does not answer."""


def stop_run(run: RunFolder, wait_s: float = 120.0) -> RunState:
    """End every job of a run and wait until it is gone or `wait_s` is over. Raises OperationError.

    The secrets file goes with it: what was stopped does not start again by itself.
    """
    deadline = time.monotonic() + wait_s
    if read_state(run).is_final:
        return read_state(run)
    write_atomic(run.stopped, "tp job stop\n", 0o600)
    for submission in read_submissions(run):
        if submission.is_local:
            _stop_local(submission)
        else:
            _stop_slurm(submission, deadline)
    state = read_state(run)
    if state.is_final:
        run.secrets.unlink(missing_ok=True)
    return state


def _stop_slurm(submission: Submission, deadline: float) -> None:
    known = query_jobs([submission.job_id], ask_accounting=False).get(submission.job_id)
    if known is None or known.state in FINAL:
        return
    run_slurm(["scancel", submission.job_id])
    while time.monotonic() < deadline:
        known = query_jobs([submission.job_id], ask_accounting=False).get(submission.job_id)
        if known is None or known.state in FINAL:
            return
        time.sleep(0.3)


def _stop_local(submission: Submission) -> None:
    if not submission.is_alive_here():
        return
    with suppress(ProcessLookupError):
        os.kill(submission.pid, signal.SIGTERM)
    deadline = time.monotonic() + LOCAL_GRACE_S
    while submission.is_alive_here():
        if time.monotonic() > deadline:
            with suppress(ProcessLookupError):
                os.killpg(submission.pid, signal.SIGKILL)
            return
        time.sleep(0.1)
