"""What a run froze, taken for another run: its capsule, its lab's configuration, its image.

`tp job rerun` and operations (`tp export`, `tp eval`) build on it; neither looks at the lab.
"""

from __future__ import annotations

import dataclasses
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from tuneplane import __version__
from tuneplane.capsule import kernel_application
from tuneplane.compose import Composed, compose
from tuneplane.images.folder import ImageFolder
from tuneplane.kernel.digests import sha256_bytes
from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.unpack import verify_capsule
from tuneplane.runs.folder import check_own, make_run_folder, new_run_id, run_path
from tuneplane.runs.index import current_user, remember_root
from tuneplane.runs.token import run_token
from tuneplane.site import Site
from tuneplane.spec import Image, JobSpec, Spec, read
from tuneplane.submit import bound_spec, created_at, remove_unfinished, write_run
from tuneplane.verify import check_recorded

CONFIGS = "configs"
"""The lab's folder of configuration, as a capsule has it."""

LARGEST_CONFIG_BYTES = 1 << 20

DIRECTIVES = frozenset(
    (
        *("time", "partition", "account", "qos", "constraint", "nodelist", "exclude", "dependency"),
        *("reservation", "mail_user", "mail_type", "job_name"),
    )
)
"""Those of one text each that a flag of submit sets."""


def read_frozen(run: RunFolder) -> JobSpec:
    """The JobSpec of a run whose capsule is there and is what was submitted. Raises UsageError."""
    check_own(run)
    if not run.capsule.exists():
        what = f"{run.run_id} has no capsule any more: tp job gc cleared it, or it was never complete"
        raise UsageError(Fault(what, "RUN", "submit the experiment again"))
    check_recorded(run)
    return read(run.job)


def asked_directives(spec: Spec) -> dict[str, Any]:
    """The run's Slurm directives of one text each, as flags say them."""
    slurm = spec.slurm
    if slurm is None:
        return {}
    values = dataclasses.asdict(slurm)
    return {name: value for name, value in values.items() if isinstance(value, str) and name in DIRECTIVES}


def compose_frozen(
    capsule: Path, name: str, said: Mapping[str, tuple[str, object]], environ: Mapping[str, str]
) -> Composed:
    """What site, user and the lab's frozen files say today of the profile `name`. Raises UsageError.

    said: dotted configuration key → what set it, and the value.
    """
    plain = {name: value for name, value in environ.items() if not name.startswith("SBATCH_")}
    with tempfile.TemporaryDirectory(prefix="tuneplane-configs-") as folder:
        _extract_configs(capsule, Path(folder))
        try:
            return compose(name, lab_root=Path(folder), flags=dict(said), environ=plain)
        except UsageError as error:
            inside = f"{capsule}: "
            faults = [
                dataclasses.replace(f, where=f.where.replace(f"{folder}/", inside)) for f in error.faults
            ]
            raise UsageError(*faults) from None


def image_file_faults(image: Image) -> list[Fault]:
    """What was frozen is what is started, by size and time as each node compares them (C27)."""
    remedy = "submit the experiment again, which prepares the image anew"
    try:
        status = Path(image.path).stat()
    except OSError as error:
        return [Fault(f"the run's image is not there any more: {error.strerror}", image.path, remedy)]
    if image.size_bytes and (status.st_size, int(status.st_mtime)) != (image.size_bytes, image.modified_s):
        return [Fault("the image is not the one that the run was submitted with", image.path, remedy)]
    return []


def preview_copy(job: JobSpec, root: Path) -> JobSpec:
    """The JobSpec of a run that is never made."""
    return _job_of(job, root, new_run_id(job.metadata.experiment), sha256_bytes(kernel_application()), "")


def prepare_copy(
    job: JobSpec, capsule: Path, root: Path, site: Site, environ: Mapping[str, str]
) -> tuple[RunFolder, JobSpec]:
    """Make the folder of a new run, complete, with another run's capsule; what depends on the run's id is anew.

    Raises OperationError; a half-made folder is then removed.
    """
    user, experiment = current_user(), job.metadata.experiment
    run_id = new_run_id(experiment)
    kernel = kernel_application()
    token = run_token(run_id) if job.spec.reporting.enabled else ""
    made = _job_of(job, root, run_id, sha256_bytes(kernel), token)
    run = make_run_folder(root, user, experiment, run_id, int(site.run_folder_mode, 8))
    try:
        shutil.copyfile(capsule, run.capsule)
        run.capsule.chmod(0o444)
        verify_capsule(run.capsule, made.spec.capsule.digest)
        write_run(run, made, kernel, environ)
        remember_root(root)
    except BaseException as error:
        remove_unfinished(run)
        if isinstance(error, OSError):
            where = str(error.filename2 or error.filename or run.path)
            raise OperationError(Fault(f"run folder not written: {error.strerror}", where)) from None
        raise
    image = made.spec.container.image
    if image is not None:
        ImageFolder(Path(image.path).parent).note_use(Path(image.path))
    return run, made


def _job_of(job: JobSpec, root: Path, run_id: str, kernel_sha256: str, token: str) -> JobSpec:
    """The JobSpec of one run; the kernel is today's, which today's script calls."""
    user = current_user()
    folder = run_path(root, user, job.metadata.experiment, run_id)
    metadata = dataclasses.replace(
        job.metadata,
        run_id=run_id,
        user=user,
        folder=str(folder),
        created_at=created_at(run_id),
        tuneplane=__version__,
    )
    return JobSpec(metadata, bound_spec(job.spec, folder, kernel_sha256, token))


def _extract_configs(capsule: Path, folder: Path) -> None:
    """The lab's `configs/` as the run froze it: plain YAML files alone, below `folder`. Raises OperationError."""
    try:
        with tarfile.open(capsule) as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                plain = member.isfile() and path.parts[:1] == (CONFIGS,) and ".." not in path.parts
                if not plain or path.suffix != ".yaml" or member.size > LARGEST_CONFIG_BYTES:
                    continue
                content = archive.extractfile(member)
                assert content is not None  # it is a file
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError), target.open("xb") as file:
                    file.write(content.read())
    except (OSError, tarfile.TarError) as error:
        raise OperationError(Fault(f"the capsule cannot be read: {error}", str(capsule))) from None
