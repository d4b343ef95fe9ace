"""Operations on a run, `export` and `eval`: what they are, every check before anything is made.

They are runs of their own, with the code that their subject froze. `operate.py` makes and queues them.
"""

from __future__ import annotations

import dataclasses
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tuneplane import clusterspec
from tuneplane.compile import (
    Draft,
    Request,
    chosen_image,
    launch_faults,
    present_secrets,
    resolved_image,
)
from tuneplane.compose import Composed, parse_mount
from tuneplane.findings import Findings
from tuneplane.frozen import (
    asked_directives,
    compose_frozen,
    image_file_faults,
    read_frozen,
)
from tuneplane.images import Choice, ChosenImage, image_faults
from tuneplane.images.choice import FLAG
from tuneplane.images.progress import Progress, silent
from tuneplane.inputs import Inputs
from tuneplane.kernel.errors import Fault, OperationError, TunePlaneError, UsageError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.lab.experiments import find_experiment
from tuneplane.lab.marker import Lab
from tuneplane.launch.render import script_of
from tuneplane.launch.slurm_commands import require_sbatch
from tuneplane.profile import parse_profile, place
from tuneplane.reach import check_reach, check_start, check_storage
from tuneplane.recipes.adapters import check_operation, load_adapter
from tuneplane.recipes.catalog import Catalog
from tuneplane.recipes.compatibility import lock_state
from tuneplane.recipes.parameters import Override, check_parameters, parse_sets
from tuneplane.recipes.recipe import Recipe
from tuneplane.runimage import image_rules, run_choice
from tuneplane.runs.folder import new_run_id
from tuneplane.runs.state import read_state
from tuneplane.site import Cluster, Site
from tuneplane.spec import Container, Framework, Image, JobSpec, Mount, Reporting, Spec, Subject
from tuneplane.spec import Recipe as LockedRecipe
from tuneplane.submit import job_of, refuse_secrets_in

EXPORT, EVAL = "export", "eval"

BENCHMARK = "evalkit/benchmark"
"""The recipe that evaluates what runs export."""

NOT_TAKEN = ("nodelist", "dependency", "job_name")
"""Directives that were said of the training and are none of an operation's: nodes for so many, jobs now over."""

KERNEL = ".tuneplane/kernel/tuneplane/evalkit/__main__.py"
"""In a capsule: what evaluates. Those of earlier versions have none."""


@dataclass(frozen=True)
class Asked:
    """What was said of an operation. flags: names of Slurm's directives → values. From `sets` on: of an eval."""

    operation: str
    profile: str | None = None
    image: str | None = None
    gpus_per_node: int | None = None
    mounts: tuple[str, ...] = ()
    flags: Mapping[str, str] = field(default_factory=dict)
    sets: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    include_path: str | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Planned:
    """An operation that passed every check. `job`: with the run's id and folder still those of its subject.

    chosen: its image, yet to be fetched; None: none, or the subject's own. after: a Slurm job that it waits for.
    """

    operation: str
    job: JobSpec
    site: Site
    chosen: ChosenImage | None = None
    own_image: bool = False
    after: str = ""
    notices: list[str] = field(default_factory=list)


def check_declared(recipe: Recipe, operation: str) -> None:
    """Raise UsageError where a recipe's runs are not exported, or not evaluated (C7)."""
    check_operation(recipe.adapter, operation)
    if operation not in recipe.operations:
        raise UsageError(
            Fault(
                f"{recipe.id} declares no operation {operation}",
                f"tp {operation}",
                "do it in the experiment's own code, or use a method that declares it: tp methods",
            )
        )


def plan(
    run: RunFolder,
    asked: Asked,
    catalog: Catalog,
    environ: Mapping[str, str],
    cache: Path,
    progress: Progress = silent,
) -> Planned:
    """Check an operation on a run that is there, writing nothing. Raises one error with all that is wrong."""
    found = Findings()
    job = read_frozen(run)
    found.attempt(_check_subject, run, job)
    recipe = found.attempt(catalog.find, job.spec.recipe.name)
    if recipe is not None:
        found.attempt(check_declared, recipe, asked.operation)
    found.raise_all()
    assert recipe is not None
    if asked.operation == EVAL:
        found.attempt(_check_kernel, run)
    composed = found.attempt(_composed, run, job, asked, environ)
    planned = plan_on(found, job, asked, composed, catalog, environ, cache, progress)
    if planned and planned.own_image and job.spec.container.image is not None:
        found.faults += image_file_faults(job.spec.container.image)
    after = found.attempt(_awaited_job, run, planned.job.spec.resources.scheduler) if planned else ""
    found.raise_all()
    assert planned is not None
    return dataclasses.replace(planned, after=after or "", notices=found.notices)


def plan_then(
    found: Findings,
    lab: Lab,
    draft: Draft | None,
    experiment: str,
    then: Sequence[Asked],
    catalog: Catalog,
    environ: Mapping[str, str],
    cache: Path,
    progress: Progress = silent,
) -> list[Planned]:
    """Check the operations behind a run that is yet to be made. What is wrong is in `found`.

    draft: None where the submit itself is at fault; what needs none of it is checked all the same.
    """
    operations = [asked.operation for asked in then]
    if operations not in ([EXPORT], [EVAL], [EXPORT, EVAL]):
        told = " then ".join(operations)
        remedy = "say --then export, --then eval, or both in this order"
        found.faults.append(
            Fault(f"{told}: an export comes before the eval of it, each once", "--then", remedy)
        )
        return []
    recipe = _recipe_of(lab, experiment, catalog)
    planned = []
    for asked in then:
        before = len(found.faults)
        if recipe is not None:
            found.attempt(check_declared, recipe, asked.operation)
        if draft is None or len(found.faults) > before:
            if asked.operation == EVAL:
                benchmark_parameters(found, catalog, asked)
            continue
        one = plan_on(found, _job_of(draft), asked, draft.composed, catalog, environ, cache, progress)
        planned += [one] if one else []
    return planned


def _recipe_of(lab: Lab, experiment: str, catalog: Catalog) -> Recipe | None:
    """The recipe of an experiment; what is wrong with its lock the submit's own checks have told."""
    try:
        lock = lock_state(find_experiment(lab, experiment), catalog).lock
        return catalog.find(lock.recipe) if lock else None
    except TunePlaneError:
        return None


def plan_on(
    found: Findings,
    subject: JobSpec,
    asked: Asked,
    composed: Composed | None,
    catalog: Catalog,
    environ: Mapping[str, str],
    cache: Path,
    progress: Progress,
) -> Planned | None:
    """An operation on a subject, by what its profile's configuration says. None where anything is wrong."""
    recipe = found.attempt(catalog.find, BENCHMARK if asked.operation == EVAL else subject.spec.recipe.name)
    params = subject.spec.hyperparams
    bindings = subject.spec.bindings
    if asked.operation == EVAL and recipe is not None:
        params = benchmark_parameters(found, catalog, asked)
        folder = str(params.get("include_path") or "")
        bindings = {"include_path": folder} if folder else {}
    elif asked.sets or asked.tasks:
        found.faults.append(Fault("an export has no parameters", "--set", "they are those of the run"))
    if recipe is None or composed is None:
        return None
    site, cluster = composed.config.site, composed.config.cluster
    profile = asked.profile or _share(subject, asked)
    total = parse_profile(profile).total
    placement = found.attempt(place, cluster, total, None, asked.gpus_per_node, site=site)
    launch = load_adapter(recipe.adapter).OPERATIONS[asked.operation]
    if placement is not None:
        found.faults += launch_faults(f"tp {asked.operation}", launch, placement)
    root = Path(subject.metadata.folder).parents[3]
    check_storage(found, cluster, root)
    image_asked = Choice(asked.image, FLAG) if asked.image else None
    check_reach(found, cluster, Inputs(bindings=bindings), image_asked)
    if cluster.scheduler == "slurm":
        found.attempt(require_sbatch, environ)
    secrets = present_secrets(Findings(), site, environ)
    image, chosen = _image(found, recipe, subject, asked, composed, environ, cache, progress)
    if found.faults or found.refused or placement is None:
        return None
    spec = Spec(
        recipe=subject.spec.recipe if asked.operation == EXPORT else _locked(recipe),
        framework=subject.spec.framework if asked.operation == EXPORT else _framework(recipe),
        entrypoint=subject.spec.entrypoint if asked.operation == EXPORT else recipe.entrypoint.value,
        entrypoint_kind=subject.spec.entrypoint_kind if asked.operation == EXPORT else recipe.entrypoint.kind,
        launch=launch.value,
        resources=clusterspec.resources(profile, cluster, placement),
        container=Container(
            runtime=cluster.container.runtime,
            binary=cluster.container.binary,
            options=list(cluster.container.options),
            image=image,
            mounts=_mounts(subject, cluster),
        ),
        node=clusterspec.node(site, cluster, secrets),
        reporting=Reporting(enabled=cluster.reporting),
        capsule=subject.spec.capsule,
        hyperparams=dict(params),
        slurm=None,
        restart=clusterspec.restart(cluster),
        outputs=list(subject.spec.outputs),
        plugins=list(subject.spec.plugins) if asked.operation == EXPORT else [],
        bindings=dict(bindings),
        operation=asked.operation,
        subject=Subject(subject.metadata.run_id, subject.metadata.folder),
    )
    if cluster.scheduler == "slurm":
        name = f"{subject.metadata.experiment}-{asked.operation}"
        slurm = dataclasses.replace(
            clusterspec.directives(cluster, name),
            job_name=asked.flags.get("job_name", name),
            dependency=asked.flags.get("dependency"),
            nodelist=asked.flags.get("nodelist"),
        )
        spec = dataclasses.replace(spec, slurm=slurm)
    check_start(found, spec, root)
    job = JobSpec(dataclasses.replace(subject.metadata, rerun_of=""), spec)
    found.attempt(refuse_secrets_in, job, site.secrets, environ)
    found.attempt(script_of, job)
    if found.faults or found.refused:
        return None
    return Planned(asked.operation, job, site, chosen, own_image=image is not None and chosen is None)


def benchmark_parameters(found: Findings, catalog: Catalog, asked: Asked) -> dict[str, object]:
    """Parameters of an evaluation, of `--set`, `--tasks` and the like. What is wrong is in `found`."""
    recipe = found.attempt(catalog.find, BENCHMARK)
    if recipe is None:
        return {}
    faults, overrides = parse_sets(asked.sets)
    found.faults += faults
    tasks = [task for text in asked.tasks for task in map(str.strip, text.split(",")) if task]
    said: list[tuple[str, object, str]] = []
    if tasks:
        said.append(("tasks", tasks, "--tasks"))
    if asked.limit is not None:
        said.append(("limit", asked.limit, "--limit"))
    if asked.include_path is not None:
        folder = found.attempt(_task_folder, asked.include_path)
        said += [("include_path", folder, "--include-path")] if folder else []
    overrides += [Override(key, value, None, where) for key, value, where in said]
    if not any(override.key == "tasks" and override.value for override in overrides):
        remedy = "say --tasks hellaswag,arc_easy; lm-eval ls tasks lists what it knows"
        found.faults.append(Fault("which tasks are to be evaluated?", "--tasks", remedy))
        overrides.append(Override("tasks", [], None, "--tasks"))
    faults, params = check_parameters(recipe, overrides)
    found.faults += faults
    return params


def _task_folder(text: str) -> str:
    try:
        path = Path(text).expanduser().absolute()
        if text and path.is_dir():
            return str(path)
    except (RuntimeError, OSError):  # `~` of a user whom this host does not know; a name too long
        pass
    remedy = "name the folder of your task files"
    raise UsageError(Fault(f"{text!r} is no folder", "--include-path", remedy))


def _job_of(draft: Draft) -> JobSpec:
    """The run of a draft as a subject, under an id that no run has."""
    return job_of(draft, new_run_id(draft.request.experiment), "", "")


def _check_subject(run: RunFolder, job: JobSpec) -> None:
    if job.spec.subject is not None:
        what = f"{run.run_id} is an {job.spec.operation} itself, of {job.spec.subject.run_id}"
        raise UsageError(Fault(what, "RUN", f"name that run: {job.spec.subject.run_id}"))


def _check_kernel(run: RunFolder) -> None:
    """Raise UsageError where the capsule is of a version that could not evaluate."""
    try:
        with tarfile.open(run.capsule) as archive:
            archive.getmember(KERNEL)
    except KeyError:
        what = f"the capsule of {run.run_id} is of an earlier TunePlane, which had no evaluation"
        remedy = f"evaluate its export as an experiment of its own: tp new NAME --method {BENCHMARK}"
        raise UsageError(Fault(what, "RUN", remedy)) from None
    except (OSError, tarfile.TarError) as error:
        raise OperationError(Fault(f"the capsule cannot be read: {error}", str(run.capsule))) from None


def _composed(run: RunFolder, job: JobSpec, asked: Asked, environ: Mapping[str, str]) -> Composed:
    """The profile's configuration: the subject's, with the directives that were said of it, or another."""
    own = parse_profile(job.spec.resources.profile).name
    name = parse_profile(asked.profile).name if asked.profile is not None else own
    said: dict[str, tuple[str, object]] = {}
    if name == own:
        said = {
            f"cluster.slurm.{key}": (f"job.json of {run.run_id}", value)
            for key, value in asked_directives(job.spec).items()
            if key not in NOT_TAKEN
        }
    if asked.mounts:
        said["cluster.mounts"] = ("--mount", list(asked.mounts))
    said |= {f"cluster.slurm.{key}": (f"--{key.replace('_', '-')}", v) for key, v in asked.flags.items()}
    return compose_frozen(run.capsule, name, said, environ)


def _mounts(subject: JobSpec, cluster: Cluster) -> list[Mount]:
    """The profile's, and on the subject's own profile what that was submitted with."""
    mounts = [parse_mount(text) for text in cluster.mounts]
    same = subject.spec.resources.cluster == cluster.name
    targets = {mount.target for mount in mounts}
    return mounts + [m for m in subject.spec.container.mounts if same and m.target not in targets]


def _share(subject: JobSpec, asked: Asked) -> str:
    """The subject's profile, one GPU of it, or as many as `--gpus-per-node` says."""
    name = parse_profile(subject.spec.resources.profile).name
    return name if asked.gpus_per_node is not None else f"{name}:1"


def _image(
    found: Findings,
    recipe: Recipe,
    subject: JobSpec,
    asked: Asked,
    composed: Composed,
    environ: Mapping[str, str],
    cache: Path,
    progress: Progress,
) -> tuple[Image | None, ChosenImage | None]:
    """The image, and what is to be fetched of it: `--image`, for an eval the site's, else the subject's own."""
    cluster = composed.config.cluster
    own = subject.spec.container.image
    sites = Findings().attempt(run_choice, recipe, composed.config, None) if asked.operation == EVAL else None
    if cluster.container.runtime == "none" or asked.image is not None or sites is not None or own is None:
        request = Request(subject.metadata.experiment, asked.profile, asked.image)
        choice = chosen_image(found, recipe, composed, request, environ)
        if choice is None:
            return None, None
        chosen = resolved_image(found, choice, composed, request, environ, cache, progress)
        return (Image(**dataclasses.asdict(chosen.image)), chosen) if chosen else (None, None)
    rules = found.attempt(image_rules, composed.config.site, environ)
    if rules is not None:
        found.faults += image_faults(Choice(own.reference, own.source), rules)
    return own, None


def _locked(recipe: Recipe) -> LockedRecipe:
    return LockedRecipe(recipe.id, recipe.version, recipe.digest, recipe.adapter)


def _framework(recipe: Recipe) -> Framework:
    return Framework(recipe.framework, recipe.runtime.version, recipe.runtime.id, recipe.observability)


def _awaited_job(run: RunFolder, scheduler: str) -> str:
    """The Slurm job that is to end first; empty where the run is complete. Raises UsageError for any other end."""
    state = read_state(run)
    if state.state == "COMPLETED":
        return ""
    if state.is_final or not state.job_id:
        remedy = f"tp job resume {run.run_id} or tp job retry {run.run_id} lets it go on"
        raise UsageError(Fault(f"{run.run_id} is {state.state}, not COMPLETED", "RUN", remedy))
    local = state.job_id.startswith("local-")
    if local != (scheduler == "local"):
        where = "on this machine" if local else "by Slurm"
        what = f"{run.run_id} still runs {where}, and this profile is of another place"
        raise UsageError(
            Fault(what, "--profile", "wait until it has ended, or name a profile of the same place")
        )
    return "" if local else state.job_id
