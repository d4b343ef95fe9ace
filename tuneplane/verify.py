"""Whether a run is still what was submitted: every digest derived again from its folder.

`tp job verify` asks for all of it; every start of a prepared run for what is quick.
"""

from __future__ import annotations

from pathlib import Path

from tuneplane.capsule import verify_run
from tuneplane.kernel.digests import sha256_file
from tuneplane.kernel.errors import Fault, TunePlaneError, UsageError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.launch.render import script_of
from tuneplane.spec import JobSpec, read


def verify(run: RunFolder) -> tuple[list[str], list[Fault]]:
    """What was checked, and what differs. Raises UsageError where only job.json itself cannot be read."""
    checked, faults, job = _check_record(run)
    if job is None:
        return checked, faults
    checked.append("capsule.tar and kernel.pyz against job.json")
    faults += verify_run(run, job.spec.capsule.digest, job.spec.capsule.kernel_sha256)
    image = job.spec.container.image
    if image is not None:
        checked.append(f"image {image.path}")
        faults += _check_file(Path(image.path), image.sha256, "the image")
    return checked, faults


def check_prepared(run: RunFolder) -> None:
    """Raise UsageError where a prepared run's JobSpec, script or kernel is not what `tp render` wrote."""
    _, faults, _ = _check_record(run)
    if faults:
        remedy = "what was reviewed is what runs: render the experiment again"
        raise UsageError(*(Fault(f.what, f.where, f.remedy or remedy) for f in faults))


def check_recorded(run: RunFolder) -> None:
    """Raise UsageError where a run's JobSpec or kernel is not what was submitted, whichever `tp` that was."""
    faults = _check_sums(run)
    if faults:
        raise UsageError(*faults)


def _check_record(run: RunFolder) -> tuple[list[str], list[Fault], JobSpec | None]:
    checked, faults = ["job.json against SHA256SUMS"], _check_sums(run)
    try:
        job = read(run.job)
    except TunePlaneError as error:
        if not faults:
            raise
        return checked, [*faults, *error.faults], None
    checked.append("job.sbatch against what job.json renders to")
    return checked, [*faults, *_check_script(run, job)], job


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
