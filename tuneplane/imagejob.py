"""An image prepared by a small job: `tp image pull` itself, on a node that reaches the registry.

`runimage` gives it to the place of images where the site says so (`site.image_job`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from tuneplane.images.place import Made
from tuneplane.images.progress import Progress
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.secret_names import is_secret_name
from tuneplane.launch.slurm_commands import slurm_environment

LOOK_S = 0.2
END_S = 30.0
"""How long Slurm may take to end the step of a job that is given up."""

LAST_LINES = 6

_TASK_ENDED = re.compile(r"srun: error: \S+: task \d+: Exited with exit code")
"""srun's own line about a step whose program said why it ended."""


def job_argv(options: Sequence[str], image: str, profile: str, *, share: bool) -> list[str]:
    """The one step: one task on one node, with the site's options last, so that they decide."""
    step = ["srun", "--quiet", "--nodes=1", "--ntasks=1", "--job-name=tp-image", *options]
    words = [sys.executable, "-m", "tuneplane.cli.main", "image", "pull", image, "--profile", profile]
    return [*step, *words, "--here", "--json", *(["--share"] if share else [])]


def pull_by_job(
    options: Sequence[str], profile: str, image: str, progress: Progress, share: bool = False
) -> Made:
    """Prepare `image` for a cluster profile by a job, and wait for it. Raises OperationError with its words."""
    argv = job_argv(options, image, profile, share=share)
    what = f"waiting for a job that prepares the image ({' '.join(options)})"
    progress(what)
    environ = {
        name: value for name, value in slurm_environment(dict(os.environ)).items() if not is_secret_name(name)
    }
    try:
        process = subprocess.Popen(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        what = f"srun cannot be started: {error.strerror}"
        raise OperationError(Fault(what, "site.image_job", "run tp on a login node of the cluster")) from None
    out, lines = _Reader(process.stdout), _Reader(process.stderr)
    try:
        while process.poll() is None:
            progress(lines.last or what)
            out.join(LOOK_S)
    except BaseException:
        _end(process)
        raise
    out.join()
    lines.join()
    if process.returncode != 0:
        raise OperationError(_failure(lines.lines))
    return _made("".join(out.lines))


class _Reader(threading.Thread):
    """Reads a pipe to its end, line by line."""

    def __init__(self, pipe: IO[str] | None) -> None:
        super().__init__(daemon=True)
        assert pipe is not None
        self.pipe, self.lines, self.last = pipe, [], ""  # type: IO[str], list[str], str
        self.start()

    def run(self) -> None:
        for line in self.pipe:
            self.lines.append(line)
            self.last = line.strip()


def _failure(lines: Sequence[str]) -> Fault:
    """What `tp` in the job, or else srun, said on standard error, as one fault with its remedy."""
    said = [text for line in lines if (text := line.strip()) and not _TASK_ENDED.match(text)][-LAST_LINES:]
    facts = [text.removeprefix("tp: ") for text in said if not text.startswith("→ ")]
    remedies = [text.removeprefix("→ ") for text in said if text.startswith("→ ")]
    what = f"the job that prepares the image failed: {' / '.join(facts) or 'it said nothing'}"
    return Fault(what, "srun", "; ".join(remedies))


def _made(text: str) -> Made:
    try:
        value: dict[str, Any] = json.loads(text)
        return Made(
            str(value["digest"]),
            str(value["path"]),
            str(value["sha256"]),
            int(value["bytes"]),
            int(value["modified_s"]),
        )
    except (ValueError, KeyError, TypeError):
        raise OperationError(Fault(f"the job that prepares the image said {text[:200]!r}", "srun")) from None


def _end(process: subprocess.Popen[str]) -> None:
    """End srun, and with it the job that is only this step."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
            return
