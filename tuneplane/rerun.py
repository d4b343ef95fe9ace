"""A new run from an ended one's own capsule and JobSpec, with other hyper-parameters: `tp job rerun`.

The lab is not looked at: code, image and all else stay what was frozen. What the site says today is checked.
"""

from __future__ import annotations

import dataclasses
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tuneplane import __version__
from tuneplane.capsule import kernel_application
from tuneplane.compose import Composed, compose
from tuneplane.compose.mounts import format_mount
from tuneplane.findings import Findings
from tuneplane.images import Choice, image_faults
from tuneplane.images.folder import ImageFolder
from tuneplane.kernel.digests import sha256_bytes
from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.unpack import verify_capsule
from tuneplane.launch.render import script_of
from tuneplane.profile import parse_profile, place
from tuneplane.recipes.catalog import Catalog
from tuneplane.recipes.parameters import check_parameters, overrides_of, parse_sets
from tuneplane.recipes.recipe import Recipe
from tuneplane.runimage import image_rules
from tuneplane.runs.folder import check_own, make_run_folder, new_run_id, run_path
from tuneplane.runs.index import current_user, remember_root
from tuneplane.runs.token import run_token
from tuneplane.site import Config, Site
from tuneplane.spec import Image, JobSpec, Spec, read
from tuneplane.start import Submitted, check_room, hand_over
from tuneplane.submit import bound_spec, created_at, refuse_secrets_in, remove_unfinished, write_run
from tuneplane.verify import check_recorded

CONFIGS = "configs"
"""The lab's folder of configuration, as a capsule has it."""

LARGEST_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class Plan:
    """A rerun that passed every check. `job`: with the run's id still that of the run it comes from."""

    of: RunFolder
    job: JobSpec
    site: Site
    storage_root: Path
    notices: list[str] = field(default_factory=list)


def plan(
    run: RunFolder,
    sets: tuple[str, ...],
    flags: Mapping[str, str],
    catalog: Catalog,
    environ: Mapping[str, str],
) -> Plan:
    """Check a rerun of `run`, writing nothing. Raises UsageError or OperationError with all that is wrong.

    sets: `--set` texts over the run's own parameters. flags: names of Slurm's directives (`time`) → values.
    """
    check_own(run)
    if not run.capsule.exists():
        what = f"{run.run_id} has no capsule any more: tp job gc cleared it, or it was never complete"
        raise UsageError(Fault(what, "RUN", "submit the experiment again"))
    check_recorded(run)
    job = read(run.job)
    found = Findings()
    composed = found.attempt(_compose, run, job, flags, environ)
    params = _parameters(found, job, sets, catalog)
    spec = dataclasses.replace(job.spec, hyperparams=params)
    missing = [name for name in spec.node.secrets if name not in environ]
    if missing:
        what = f"{', '.join(missing)} not set in this shell"
        found.faults.append(Fault(what, "environment", "export them, as at submit"))
    if composed is not None:
        spec = _with_flags(found, spec, composed.config, flags)
        _check_site(found, run, spec, composed, environ)
    found.raise_all()
    assert composed is not None
    planned = JobSpec(dataclasses.replace(job.metadata, rerun_of=run.run_id), spec)
    found.attempt(refuse_secrets_in, planned, composed.config.site.secrets, environ)
    found.attempt(script_of, planned)
    found.raise_all()
    root = Path(job.metadata.folder).parents[3]
    return Plan(run, planned, composed.config.site, root, found.notices)


def preview(planned: Plan) -> tuple[JobSpec, str]:
    """The JobSpec and script of a rerun that is never made."""
    job = _job_of(
        planned, new_run_id(planned.job.metadata.experiment), sha256_bytes(kernel_application()), ""
    )
    return job, script_of(job)


def rerun(planned: Plan, environ: Mapping[str, str]) -> Submitted:
    """Make the new run's folder and hand it over. Raises OperationError; a half-made folder is then removed."""
    resources, of = planned.job.spec.resources, planned.of
    check_room(resources, planned.site)
    user, experiment = current_user(), planned.job.metadata.experiment
    run_id = new_run_id(experiment)
    kernel = kernel_application()
    token = run_token(run_id) if planned.job.spec.reporting.enabled else ""
    job = _job_of(planned, run_id, sha256_bytes(kernel), token)
    mode = int(planned.site.run_folder_mode, 8)
    run = make_run_folder(planned.storage_root, user, experiment, run_id, mode)
    try:
        shutil.copyfile(of.capsule, run.capsule)
        run.capsule.chmod(0o444)
        verify_capsule(run.capsule, job.spec.capsule.digest)
        write_run(run, job, kernel, environ)
        remember_root(planned.storage_root)
    except BaseException as error:
        remove_unfinished(run)
        if isinstance(error, OSError):
            where = str(error.filename2 or error.filename or run.path)
            raise OperationError(Fault(f"run folder not written: {error.strerror}", where)) from None
        raise
    image = job.spec.container.image
    if image is not None:
        ImageFolder(Path(image.path).parent).note_use(Path(image.path))
    return hand_over(run, job)


def _job_of(planned: Plan, run_id: str, kernel_sha256: str, token: str) -> JobSpec:
    """The plan as the JobSpec of one run; the kernel is today's, which today's script calls."""
    user, meta = current_user(), planned.job.metadata
    folder = run_path(planned.storage_root, user, meta.experiment, run_id)
    metadata = dataclasses.replace(
        meta,
        run_id=run_id,
        user=user,
        folder=str(folder),
        created_at=created_at(run_id),
        tuneplane=__version__,
    )
    return JobSpec(metadata, bound_spec(planned.job.spec, folder, kernel_sha256, token))


def _parameters(found: Findings, job: JobSpec, sets: tuple[str, ...], catalog: Catalog) -> dict[str, Any]:
    """The run's parameters with what was said over them, by the recipe's own rules (C29)."""
    faults, overrides = parse_sets(sets)
    found.faults += faults
    recipe: Recipe | None = found.attempt(catalog.find, job.spec.recipe.name)
    if recipe is None:
        what = f"the catalog has no method {job.spec.recipe.name}, so its parameters cannot be checked"
        found.faults += [] if found.faults else [Fault(what, "RUN", "tp methods lists what there is")]
        return dict(job.spec.hyperparams)
    if recipe.digest != job.spec.recipe.digest:
        found.notices.append(
            f"the run has {recipe.id} {job.spec.recipe.version}; its parameters were checked against "
            f"{recipe.version} of today's catalog"
        )
    earlier = overrides_of(job.spec.hyperparams, "job.json")
    faults, params = check_parameters(recipe, [*earlier, *overrides])
    found.faults += faults
    return params


def _compose(run: RunFolder, job: JobSpec, flags: Mapping[str, str], environ: Mapping[str, str]) -> Composed:
    """What site, user and the lab's frozen files say today of the run's profile, with its own directives."""
    own = _directives(job.spec)
    said: dict[str, tuple[str, object]] = {
        f"cluster.slurm.{name}": (f"job.json of {run.run_id}", value)
        for name, value in own.items()
        if value is not None and name != "dependency"
    }
    said |= {f"cluster.slurm.{name}": (f"--{name.replace('_', '-')}", value) for name, value in flags.items()}
    plain = {name: value for name, value in environ.items() if not name.startswith("SBATCH_")}
    name = parse_profile(job.spec.resources.profile).name
    with tempfile.TemporaryDirectory(prefix="tuneplane-configs-") as folder:
        _extract_configs(run.capsule, Path(folder))
        try:
            return compose(name, lab_root=Path(folder), flags=said, environ=plain)
        except UsageError as error:
            inside = f"{run.capsule}: "
            faults = [
                dataclasses.replace(f, where=f.where.replace(f"{folder}/", inside)) for f in error.faults
            ]
            raise UsageError(*faults) from None


def _directives(spec: Spec) -> dict[str, Any]:
    """The run's Slurm directives of one text each, as flags say them."""
    slurm = spec.slurm
    if slurm is None:
        return {}
    values = dataclasses.asdict(slurm)
    return {name: value for name, value in values.items() if isinstance(value, str) and name in _FLAGS}


_FLAGS = frozenset(
    (
        *("time", "partition", "account", "qos", "constraint", "nodelist", "exclude", "dependency"),
        *("reservation", "mail_user", "mail_type", "job_name"),
    )
)


def _with_flags(found: Findings, spec: Spec, config: Config, flags: Mapping[str, str]) -> Spec:
    """The spec with the directives that were said, as compose took them."""
    if spec.slurm is None:
        if flags:
            told = ", ".join(f"--{name.replace('_', '-')}" for name in flags)
            found.notices.append(f"the run is one of this machine, without Slurm: {told} not used")
        return spec
    changed = {name: getattr(config.cluster.slurm, name) for name in flags}
    if spec.slurm.dependency is not None and "dependency" not in flags:
        found.notices.append(f"without the run's --dependency {spec.slurm.dependency}: those jobs are over")
        changed["dependency"] = None
    return dataclasses.replace(spec, slurm=dataclasses.replace(spec.slurm, **changed))


def _check_site(
    found: Findings, run: RunFolder, spec: Spec, composed: Composed, environ: Mapping[str, str]
) -> None:
    """What a submit checks of the site's: locks, caps, secrets, the image."""
    site, cluster = composed.config.site, composed.config.cluster
    found.faults += _lock_faults(run, spec, composed.config)
    resources = spec.resources
    found.attempt(place, cluster, None, resources.nodes, resources.gpus_per_node, site=site)
    gone = [name for name in spec.node.secrets if name not in site.secrets]
    if gone:
        what = f"{', '.join(gone)}: the site does not give it to jobs any more"
        found.faults.append(Fault(what, "site.secrets", "submit the experiment again"))
    if run.capsule.stat().st_size > site.capsule_limit_mb << 20:
        what = f"the capsule is larger than the site's limit of {site.capsule_limit_mb} MB"
        found.faults.append(Fault(what, "site.capsule_limit_mb", f"ask {site.contact}"))
    image = spec.container.image
    if image is None:
        return
    rules = found.attempt(image_rules, site, environ)
    if rules is not None:
        found.faults += image_faults(Choice(image.reference, image.source), rules)
    found.faults += _image_file_faults(image)


def _image_file_faults(image: Image) -> list[Fault]:
    """What was frozen is what is started, by size and time as each node compares them (C27)."""
    remedy = "submit the experiment again, which prepares the image anew"
    try:
        status = Path(image.path).stat()
    except OSError as error:
        return [Fault(f"the run's image is not there any more: {error.strerror}", image.path, remedy)]
    if image.size_bytes and (status.st_size, int(status.st_mtime)) != (image.size_bytes, image.modified_s):
        return [Fault("the image is not the one that the run was submitted with", image.path, remedy)]
    return []


def _lock_faults(run: RunFolder, spec: Spec, config: Config) -> list[Fault]:
    """Locked keys that are not as the site has them today: what was allowed at submit may not be any more."""
    today, faults = _flat(_of_cluster(config)), []
    for key, value in _flat(_of_spec(spec, config)).items():
        locked = any(f"{key}.".startswith(f"{prefix}.") for prefix in config.site.locked)
        if locked and today.get(key, value) != value:
            what = f"{key} is locked by the site: it is {today[key]!r} today, and the run has {value!r}"
            remedy = f"submit the experiment again, or ask {config.site.contact}"
            faults.append(Fault(what, f"job.json of {run.run_id}", remedy))
    return faults


def _of_cluster(config: Config) -> dict[str, Any]:
    """The site's word, with what it leaves to TunePlane left out."""
    value = dataclasses.asdict(config.cluster)
    value["slurm"] = {
        name: item for name, item in value["slurm"].items() if item is not None or name in _FLAGS
    }
    if config.cluster.slurm.job_name is None:
        del value["slurm"]["job_name"]
    return {"cluster": {name: item for name, item in value.items() if item is not None}}


def _of_spec(spec: Spec, config: Config) -> dict[str, Any]:
    """The same keys as the run has them; those that a JobSpec does not record are left out."""
    node, container = spec.node, spec.container
    given = config.cluster.environment
    found: dict[str, Any] = {
        "scheduler": spec.resources.scheduler,
        "device": spec.resources.device,
        "mounts": [format_mount(mount) for mount in container.mounts],
        "python": node.python,
        "path": node.path,
        "scratch": node.scratch,
        "shared": list(node.shared),
        "environment": {name: node.environment.get(name) for name in given},
        "heartbeat_s": node.heartbeat_s,
        "stop_grace_s": node.stop_grace_s,
        "save_s": node.save_s,
        "save_signal": node.save_signal,
        "hang_limit_s": node.hang_limit_s,
        "max_restarts": spec.restart.max_restarts,
        "restart_way": spec.restart.way,
        "reporting": spec.reporting.enabled,
        "container": {
            "runtime": container.runtime,
            "binary": container.binary,
            "options": list(container.options),
        },
    }
    if spec.slurm is not None:
        found["slurm"] = dataclasses.asdict(spec.slurm)
    return {"cluster": found}


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, Mapping) and item:
            flat |= _flat(item, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = item
    return flat


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
