"""`tp job verify`: every digest of a run derived again from its folder."""

from __future__ import annotations

from pathlib import Path

from tuneplane.capsule import verify_run
from tuneplane.kernel.digests import sha256_file
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
        lines = run.sums.read_text(encoding="ascii").splitlines()
    except OSError as error:
        return [Fault(f"cannot be read: {error.strerror}", str(run.sums))]
    except UnicodeDecodeError:
        return [Fault("is not what submit wrote", str(run.sums))]
    recorded = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    names = {run.job.name, run.kernel.name}
    if set(recorded) != names or len(lines) != len(names):
        return [Fault(f"does not hold the sums of {' and '.join(sorted(names))} alone", str(run.sums))]
    return [f for name in sorted(names) for f in _check_file(run.path / name, recorded[name], name)]


def _check_script(run: RunFolder, job: JobSpec) -> list[Fault]:
    if job.metadata.run_id != run.run_id:
        return [Fault(f"is of run {job.metadata.run_id}, not of {run.run_id}", str(run.job))]
    try:
        script = run.script.read_bytes()
        rendered = script_of(job).encode("utf-8", "surrogateescape")
    except OSError as error:
        return [Fault(f"cannot be read: {error.strerror}", str(run.script))]
    except TunePlaneError as error:
        return list(error.faults)
    return [] if script == rendered else [Fault("is not what job.json renders to", str(run.script))]


def _check_file(path: Path, expected: str, what: str) -> list[Fault]:
    try:
        digest = sha256_file(path)
    except OSError as error:
        return [Fault(f"cannot be read: {error.strerror}", str(path))]
    if digest != expected:
        return [Fault(f"{what}: sha256 is {digest}, not {expected} as recorded", str(path))]
    return []
