"""`tp job verify`: every digest of a run derived again from its folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tuneplane.capsule import verify_run
from tuneplane.kernel.errors import Fault, TunePlaneError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.spec import JobSpec, read
from tuneplane.submit import script_of


def verify(run: RunFolder) -> tuple[list[str], list[Fault]]:
    """What was checked, and what differs. Raises UsageError where job.json cannot be read at all."""
    job = read(run.job)
    faults: list[Fault] = []
    checked = ["job.json against SHA256SUMS"]
    faults += _check_sums(run)
    checked.append("job.sbatch against what job.json renders to")
    faults += _check_script(run, job)
    checked.append("capsule.tar and kernel.pyz against job.json")
    faults += verify_run(run, job.spec.capsule.digest, job.spec.capsule.kernel_sha256)
    image = job.spec.container.image
    if image is not None:
        checked.append(f"image {image.path}")
        faults += _check_file(Path(image.path), image.sha256, "the image")
    return checked, faults


def _check_sums(run: RunFolder) -> list[Fault]:
    try:
        lines = run.sums.read_text().splitlines()
    except OSError as error:
        return [Fault(f"cannot be read: {error.strerror}", str(run.sums))]
    faults = []
    for line in lines:
        digest, _, name = line.partition("  ")
        faults += _check_file(run.path / name, digest, name)
    return faults


def _check_script(run: RunFolder, job: JobSpec) -> list[Fault]:
    try:
        text = run.script.read_text(encoding="utf-8")
        rendered = script_of(job)
    except (OSError, TunePlaneError) as error:
        return [Fault(f"cannot be read: {error}", str(run.script))]
    if text != rendered:
        return [Fault("is not the script that job.json renders to", str(run.script))]
    return []


def _check_file(path: Path, expected: str, what: str) -> list[Fault]:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        return [Fault(f"cannot be read: {error.strerror}", str(path))]
    if digest.hexdigest() != expected:
        return [Fault(f"{what}: sha256 is {digest.hexdigest()}, not {expected} as recorded", str(path))]
    return []
