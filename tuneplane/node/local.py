"""A run on this machine: waits for its share of GPUs or CPUs, then the very same attempt and agent."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tuneplane.kernel.files import read_json
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import record_submission
from tuneplane.node.agent import NodeRun
from tuneplane.node.attempt import claim, wait_or_refuse
from tuneplane.node.leftovers import end_leftovers
from tuneplane.node.operation import wait_here
from tuneplane.node.outcome import end
from tuneplane.node.scratch import make_user_folder
from tuneplane.node.signals import ENDING, Signals
from tuneplane.node.slots import machine_shares, take_shares
from tuneplane.spec import JobSpec


def run_local(job: JobSpec, environ: Mapping[str, str]) -> int:
    """Claim, run and end one attempt here. Returns the attempt's exit code."""
    run = RunFolder(Path(job.metadata.folder))
    for earlier in run.attempts()[-1:]:
        wait_or_refuse(earlier, job)  # before it waits behind that very attempt
    record_submission(run, f"local-{os.getpid()}", "hand", os.getpid())
    for number in (*ENDING, signal.SIGUSR2):
        signal.signal(number, _leave)  # a wait for a lock ends by an exception alone
    wait_here(run, job, f"local-{os.getpid()}", environ)
    given = dict(environ)
    with ExitStack() as held:
        shares = machine_shares(job, environ)
        folder = make_user_folder(job) / "shares"
        taken = take_shares(folder, shares, job.spec.resources.gpus_per_node, held)
        if job.spec.resources.device == "gpu":
            given["CUDA_VISIBLE_DEVICES"] = ",".join(taken)
        signals = Signals()
        signals.listen()
        attempt = claim(run, job, ["127.0.0.1"], given)
        assert attempt is not None  # nothing starts a local run but a hand and tp
        if attempt.number:
            end_leftovers(job.metadata.run_id, attempt.number)
        start = read_json(attempt.start)
        code = NodeRun(job, attempt.number, start["address"], int(start["port"]), given, signals).run()
        return end(run, attempt.number, code, given)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    print("tuneplane: told to end while it waited for its share of this machine", file=sys.stderr)
    raise SystemExit(128 + number)
