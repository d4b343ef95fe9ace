"""Why a command may have ended at once: the image is asked what it has, and the answer goes to the node's log.

The agent calls `explain` where a command in a container failed early and nothing was reported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time

from tuneplane import __version__
from tuneplane.containers import Launch
from tuneplane.node.process import descendants, reap, signal_all
from tuneplane.node.scratch import Scratch
from tuneplane.node.signals import Signals
from tuneplane.spec import Spec

EARLY_S = 60.0
"""A command that lives longer was no victim of a missing program or package, as a rule."""

ASK_S = 20.0
"""How long the image may take to start once more. A run that has failed ends this much later at most."""

STOP_S = 2.0


def explain(spec: Spec, started: Launch, scratch: Scratch, signals: Signals) -> list[str]:
    """Lines for the log; none where the image gives no answer in time, or the agent is told to end."""
    # Late: a node that starts well never needs it, and each import delays the user's program.
    from tuneplane.containers.probe import UNCHECKED, judge, probe_argv, read_answer

    answer = read_answer(_ask([*started.enter, *probe_argv()], started, scratch, signals))
    if answer is None:
        return []
    findings = judge(
        answer,
        __version__,
        custom=spec.recipe.adapter == "custom",
        in_capsule=spec.framework.observability == "platform",
    )
    shown = [f"  {found.level:<5} {found.what}" for found in findings if found.level != UNCHECKED]
    return ["the command failed at once; what its image has:", *shown]


def _ask(argv: list[str], started: Launch, scratch: Scratch, signals: Signals) -> str:
    output = scratch.runtime / "probe"
    deadline = time.monotonic() + ASK_S
    with output.open("wb") as file:
        process = subprocess.Popen(
            argv,
            env=started.environ,
            cwd=started.cwd,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    while process.poll() is None and time.monotonic() < deadline and not signals.told:
        signals.wait(min(0.5, max(0.0, deadline - time.monotonic())))
    if process.returncode is None:
        process.terminate()  # srun then ends its step
        while process.poll() is None and time.monotonic() < deadline + STOP_S:
            signals.wait(STOP_S / 10)
    signal_all(descendants(os.getpid()), signal.SIGKILL)
    reap()
    return output.read_text(encoding="utf-8", errors="replace")
