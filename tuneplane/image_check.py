"""Starts an image once, here, and says what it has of what a run needs. `tp image check` calls `check_image`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tuneplane import __version__
from tuneplane.containers import NEVER_RUN_HERE, SIF, Container, form_faults, launch
from tuneplane.containers.probe import FAIL, OK, Answer, Finding, judge, probe_argv, read_answer
from tuneplane.images.progress import Progress, silent
from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.kernel.files import write_atomic
from tuneplane.kernel.process import members
from tuneplane.recipes.recipe import Recipe
from tuneplane.site import ContainerRuntime

START_S = 300.0
"""How long a large image on a cold filesystem may take to start and to answer."""

LOOK_S = 0.2
LAST_LINES = 5

ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""What of a job's environment decides which packages its Python finds."""


@dataclass(frozen=True)
class Check:
    """What was found. runtime: of the profile; started_by: what started the image here."""

    runtime: str
    started_by: str
    findings: list[Finding]

    @property
    def failed(self) -> bool:
        return any(finding.level == FAIL for finding in self.findings)

    @property
    def never_run_here(self) -> bool:
        """Whether the profile's runtime is one that this project's own tests never start."""
        return self.runtime in NEVER_RUN_HERE


def runtime_for(form: str, environ: Mapping[str, str]) -> ContainerRuntime:
    """A runtime on this host's PATH for an image of this form. Raises OperationError where there is none."""
    names = ["apptainer", "singularity"] if form == SIF else ["enroot", "apptainer", "singularity"]
    for name in names:
        if shutil.which(name, path=environ.get("PATH")):
            return ContainerRuntime(runtime=name)
    raise _nothing_here(" or ".join(names))


def check_image(
    path: str,
    form: str,
    runtime: ContainerRuntime,
    recipe: Recipe | None,
    environ: Mapping[str, str],
    progress: Progress = silent,
) -> Check:
    """Start the image by a profile's runtime on this host and look at it.

    form: SIF or SQUASHFS. recipe: whose packages are wanted; None: of a script of the user's own. progress: told
    again and again until the image has answered. Raises UsageError where the runtime cannot start such a file,
    OperationError where it is not on this host.
    """
    faults = form_faults(runtime.runtime, form, path, "IMAGE")
    if faults:
        raise UsageError(*faults)
    starter = runtime
    if runtime.runtime == "pyxis":  # it starts images in Slurm steps alone, by the enroot below it
        starter = ContainerRuntime(runtime="enroot")
    if shutil.which(starter.binary or starter.runtime, path=environ.get("PATH")) is None:
        raise _nothing_here(starter.binary or starter.runtime)
    requirements = recipe.runtime.requirements if recipe else ()
    said, code = _start(path, starter, _names(requirements), environ, progress)
    answer = read_answer(said)
    if answer is None:
        return Check(runtime.runtime, starter.runtime, [_not_started(said, code)])
    findings = judge(
        answer,
        __version__,
        custom=recipe is None or recipe.adapter == "custom",
        in_capsule=recipe is not None and recipe.observability == "platform",
    )
    return Check(runtime.runtime, starter.runtime, [*findings, *package_findings(requirements, answer)])


def package_findings(requirements: Sequence[str], answer: Answer) -> list[Finding]:
    """A recipe's requirements (`torch>=2.6`) beside what the image's Python has."""
    from packaging.requirements import Requirement

    if answer.interpreter is None:
        return []
    found = []
    for text in requirements:
        wanted = Requirement(text)
        version = answer.interpreter.packages.get(wanted.name)
        remedy = f"install {text} in the image"
        if version is None:
            found.append(
                Finding(FAIL, f"{wanted.name} is not installed, and the method needs {text}", remedy)
            )
        elif not wanted.specifier.contains(version, prereleases=True):
            found.append(Finding(FAIL, f"{wanted.name} is {version}, and the method needs {text}", remedy))
        else:
            found.append(Finding(OK, f"{wanted.name} {version}"))
    return found


def _names(requirements: Sequence[str]) -> list[str]:
    from packaging.requirements import Requirement

    return [Requirement(text).name for text in requirements]


def _start(
    path: str,
    runtime: ContainerRuntime,
    packages: Sequence[str],
    environ: Mapping[str, str],
    progress: Progress,
) -> tuple[str, int]:
    """What the container printed, and its exit code."""
    with tempfile.TemporaryDirectory(prefix="tuneplane-check-") as folder:
        places = {name: Path(folder, name) for name in ("tmp", "home", "runtime")}
        for place in places.values():
            place.mkdir()
        container = Container(
            runtime=runtime.runtime,
            binary=runtime.binary,
            options=tuple(runtime.options),
            image=path,
            gpus=any(Path("/dev").glob("nvidia[0-9]*")),
            tmp_dir=str(places["tmp"]),
            home_dir=str(places["home"]),
            state_dir=str(places["runtime"]),
        )
        started = launch(container, probe_argv(packages), ENVIRONMENT, (), {**environ, "TMPDIR": folder})
        for name, text in started.files.items():
            write_atomic(Path(name), text, 0o600)
        try:
            process = subprocess.Popen(
                started.argv,
                env=started.environ,
                cwd=started.cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            what = f"{started.argv[0]} cannot be started: {error.strerror}"
            raise OperationError(Fault(what, "cluster.container.binary")) from None
        try:
            said, late = _wait(process, partial(progress, f"waiting for {runtime.runtime} to start {path}"))
            if late:
                return f"{said}\nit did not answer within {START_S:.0f} s", 124
        finally:
            # Of an image that hangs, or that the user has no patience with, nothing is to go on.
            # By the session: what serves the image's files has a process group of its own.
            for pid in members(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        return said, process.returncode


def _wait(process: subprocess.Popen[bytes], tell: Callable[[], None]) -> tuple[str, bool]:
    """What a process printed until its end, and whether that did not come within START_S."""
    until = time.monotonic() + START_S
    said = b""
    while time.monotonic() < until:
        try:
            return process.communicate(timeout=LOOK_S)[0].decode("utf-8", "replace"), False
        except subprocess.TimeoutExpired as early:
            said = early.stdout or b""
        tell()
    return said.decode("utf-8", "replace"), True


def _not_started(said: str, code: int) -> Finding:
    lines = [line.strip() for line in said.splitlines() if line.strip()][-LAST_LINES:]
    words = "; ".join(lines) or "it said nothing"
    return Finding(FAIL, f"the image does not start (exit code {code}): {words}", "build it again")


def _nothing_here(program: str) -> OperationError:
    return OperationError(
        Fault(
            f"nothing was checked: {program} is not on this host ({os.uname().nodename})",
            "PATH",
            "say it on a node, in a small job: srun --pty tp image check …",
        )
    )
