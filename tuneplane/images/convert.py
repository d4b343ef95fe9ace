"""From an OCI layout on this disk to the file that a runtime starts, by the runtime's own program.

Pull calls `check_room` before anything is fetched and `convert` afterwards. The program sees neither the
registry nor a login: everything it reads is there and was checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tuneplane.images.folder import SIF
from tuneplane.images.manifest import ARCHITECTURES, Manifest
from tuneplane.images.place import Builder
from tuneplane.images.progress import Progress
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.secret_names import is_secret_name

IMAGE_FACTOR = 1.2
"""A SIF or squashfs beside the compressed layers that it is made of: gzip against gzip, and its own tables."""

SCRATCH_FACTOR = 5.0
"""Scratch of a build beside the compressed layers: a copy of them (1), unpacked (2 to 3), squashed (1)."""

POLL_S = 0.2
END_S = 10.0
NICE = 10
"""Login nodes are shared: a build gives way to whoever types there."""

LAST_LINES = 4


def check_program(builder: Builder, reference: str) -> None:
    """Raise OperationError where the program that builds is not on this machine."""
    if shutil.which(builder.program) is None:
        end = "sif" if builder.form == SIF else "sqsh"
        raise OperationError(
            Fault(
                f"{builder.program} is not on this machine's PATH, so {reference} cannot be prepared here",
                "cluster.container.binary",
                f"module load it, or prepare the image where it is and say --image NAME.{end}",
            )
        )


def check_room(folder: Path, missing_bytes: int, manifest: Manifest, builder: Builder) -> None:
    """Raise OperationError where the disk has no room for what is still to come."""
    needs: dict[int, tuple[float, Path, str]] = {}
    size = manifest.size_bytes
    wanted = (
        (folder, missing_bytes + size * IMAGE_FACTOR, "set storage_root of the cluster profile"),
        (builder.scratch, size * SCRATCH_FACTOR, "set site.image_scratch, or APPTAINER_TMPDIR for yourself"),
    )
    for path, need_bytes, remedy in wanted:
        device = _existing(path).stat().st_dev
        before = needs.get(device)
        needs[device] = (need_bytes + before[0], path, remedy) if before else (need_bytes, path, remedy)
    faults = []
    for need_bytes, path, remedy in needs.values():
        free_bytes = shutil.disk_usage(_existing(path)).free
        if free_bytes < need_bytes:
            faults.append(
                Fault(
                    f"preparing the image needs about {_gb(need_bytes)}, and {_gb(free_bytes)} are free",
                    str(path),
                    f"free some there, or {remedy}",
                )
            )
    if faults:
        raise OperationError(*faults)


def convert(layout: Path, target: Path, architecture: str, builder: Builder, progress: Progress) -> None:
    """Build `target` from the one image in `layout`. Raises OperationError with the program's own last words."""
    with _scratch(builder.scratch, layout) as scratch:
        if builder.form == SIF:
            argv = sif_argv(builder.program, target, layout.name, architecture)
            _run(argv, layout.parent, _environment(scratch), progress, scratch / "log")
        else:
            from tuneplane.images.serve import serve_layout

            with serve_layout(layout) as served:
                argv = sqsh_argv(builder.program, target, served.uri, architecture)
                environ = {**_environment(scratch), **served.environment(scratch)}
                _run(argv, layout.parent, environ, progress, scratch / "log")
    if not target.is_file() or target.stat().st_size == 0:
        raise OperationError(Fault(f"{builder.program} ended well and made no image", str(target)))


def sif_argv(program: str, target: Path, layout: str, architecture: str) -> list[str]:
    """apptainer-build(1), singularity-build(1). `layout`: relative, since `oci:PATH:TAG` splits at colons."""
    return [program, "build", "--disable-cache", "--arch", architecture, str(target), f"oci:{layout}"]


def sqsh_argv(program: str, target: Path, uri: str, architecture: str) -> list[str]:
    """enroot's page of `import`; its architectures are uname's words."""
    machine = next((name for name, go in ARCHITECTURES.items() if go == architecture), architecture)
    return [program, "import", "--arch", machine, "--output", str(target), uri]


def _environment(scratch: Path) -> dict[str, str]:
    """This process's, without secrets and without what would change the build."""
    changing = ("APPTAINER_", "APPTAINERENV_", "SINGULARITY_", "SINGULARITYENV_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(changing) and not is_secret_name(name)
    }
    folder = str(scratch)
    places = dict.fromkeys(
        ("TMPDIR", "APPTAINER_TMPDIR", "APPTAINER_CACHEDIR", "SINGULARITY_TMPDIR", "SINGULARITY_CACHEDIR"),
        folder,
    )
    return {**kept, **places}


def _run(argv: list[str], cwd: Path, environ: dict[str, str], progress: Progress, log: Path) -> None:
    words = [*_prefix(), *argv]
    started = time.monotonic()
    what = f"converting with {Path(argv[0]).name}"
    progress(what)
    with log.open("wb") as sink:
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
        try:
            while True:
                progress(what)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
                    break
        except BaseException:
            _end(process)
            raise
    if process.returncode != 0:
        raise _failure(argv[0], f"{process.returncode} after {time.monotonic() - started:.0f} s", cwd, log)


def _failure(program: str, code: str, cwd: Path, log: Path) -> OperationError:
    said = _last_words(log)
    remedy = "try again once that is mended"
    if re.search("no space left on device|disk quota exceeded", said, re.IGNORECASE):
        remedy = (
            f"free some in {log.parent.parent} or {cwd.parent}, or have it unpacked elsewhere: "
            "site.image_scratch, or APPTAINER_TMPDIR for yourself"
        )
    what = f"{Path(program).name} could not make the image (exit code {code}): {said}"
    return OperationError(Fault(what, str(cwd), f"what was fetched is kept; {remedy}"))


def _prefix() -> list[str]:
    """Give way to others, and end with this process even when it is killed."""
    words: list[str] = []
    if shutil.which("setpriv"):
        words += ["setpriv", "--pdeathsig", "TERM"]
    if shutil.which("nice"):
        words += ["nice", "-n", str(NICE)]
    return words


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)


def _last_words(log: Path) -> str:
    """The lines of a log that say why, without colours; the runtime warns by thousands of lines before them."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 65536))
        text = file.read().decode("utf-8", "replace")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.match(r"(FATAL|ERROR|\[ERROR\])", line)] or lines
    words = " / ".join(telling[-LAST_LINES:]) or "it said nothing"
    return "".join(c if c.isprintable() else " " for c in words)[:1000]


@contextlib.contextmanager
def _scratch(base: Path, layout: Path) -> Iterator[Path]:
    """A folder of this build's own, 0700, gone afterwards. Those that killed builds of it left go first."""
    key = hashlib.sha256(os.fsencode(os.path.realpath(layout))).hexdigest()[:16]
    prefix = f"tuneplane-image-{os.getuid()}-{key}."
    try:
        base.mkdir(parents=True, exist_ok=True)
        for old in base.glob(f"{prefix}*"):
            if old.lstat().st_uid == os.getuid() and not old.is_symlink():
                remove_tree(old)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    except OSError as error:
        what = f"no folder for building images can be made: {error.strerror}"
        raise OperationError(Fault(what, str(base), "set site.image_scratch, or APPTAINER_TMPDIR")) from None
    try:
        yield folder
    finally:
        remove_tree(folder)


def remove_tree(folder: Path) -> None:
    """Remove a folder with all in it, also where an image's own folders have modes that forbid it."""
    for parent, names, _ in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with contextlib.suppress(OSError):
                if not path.is_symlink() and path.stat().st_mode & 0o700 != 0o700:
                    path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _existing(path: Path) -> Path:
    """The nearest folder above that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _gb(count_bytes: float) -> str:
    return f"{count_bytes / 1e9:.1f} GB" if count_bytes >= 1e8 else f"{count_bytes / 1e6:.0f} MB"
