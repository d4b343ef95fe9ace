"""From what a user asked to a JobSpec: recipe, lock, lab, image and cluster, every fault found at once.

`compile_request` looks and writes nothing; submit, render, validate and --dry-run all start with it (C30).
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tuneplane import __version__, clusterspec
from tuneplane.capsule import CapsuleInfo, check_capsule
from tuneplane.compose import Composed, compose, parse_mount
from tuneplane.data.check import check_inputs
from tuneplane.findings import Findings
from tuneplane.images import Choice, ChosenImage, Rules, image_faults, is_local, resolve_image
from tuneplane.images.progress import Progress, silent
from tuneplane.inputs import CONFIG_NAME, Inputs, read_inputs
from tuneplane.kernel.errors import Fault
from tuneplane.lab.experiments import find_entrypoint, find_experiment
from tuneplane.lab.marker import Lab
from tuneplane.launch.slurm_commands import require_sbatch
from tuneplane.profile import Placement, parse_profile, place
from tuneplane.reach import check_reach, check_start, check_storage
from tuneplane.recipes.adapters import Launch, check_operation, load_adapter
from tuneplane.recipes.adapters.custom import multi_node_notice
from tuneplane.recipes.catalog import Catalog
from tuneplane.recipes.compatibility import lock_state
from tuneplane.recipes.lock import LOCK_NAME, Lock
from tuneplane.recipes.outputs import OUTPUTS_NAME, all_outputs
from tuneplane.recipes.recipe import Recipe
from tuneplane.runimage import image_place, image_rules, run_choice
from tuneplane.runs.index import current_user
from tuneplane.site import Cluster, Site
from tuneplane.spec import (
    Capsule,
    Container,
    Framework,
    Image,
    Metadata,
    Reporting,
    Spec,
)
from tuneplane.spec import Recipe as LockedRecipe

URL_REQUIRED = "custom external observability requires spec.framework.observability_url"

Flags = Mapping[str, "tuple[str, object]"]
"""Dotted configuration key → the flag that set it and its value."""

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """What was said on the command line."""

    experiment: str
    profile: str | None = None
    image: str | None = None
    observability_url: str | None = None
    sets: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    nodes: int | None = None
    gpus_per_node: int | None = None
    model: str | None = None
    train_data: str | None = None
    validation_data: str | None = None
    init_from: str | None = None
    preflight: bool = False
    allow_dirty: bool = False
    dry_run: bool = False  # leave nothing behind, the digests of images neither
    queues: bool = False  # this machine is to hand it to Slurm
    flags: Flags = field(default_factory=dict)


@dataclass(frozen=True)
class Draft:
    """A compiled request: all of a JobSpec that does not depend on the run's id."""

    lab: Lab
    request: Request
    composed: Composed
    spec: Spec
    capsule: CapsuleInfo
    storage_root: Path
    image: ChosenImage | None = None

    @property
    def site(self) -> Site:
        return self.composed.config.site

    @property
    def cluster(self) -> Cluster:
        return self.composed.config.cluster

    def metadata(self, run_id: str, created_at: str, user: str, folder: Path) -> Metadata:
        return Metadata(
            run_id=run_id,
            user=user,
            experiment=self.request.experiment,
            lab=self.lab.name,
            folder=str(folder),
            created_at=created_at,
            tuneplane=__version__,
            commit=self.capsule.commit or "",
            dirty=list(self.capsule.dirty),
        )


def compile_request(
    lab: Lab,
    catalog: Catalog,
    request: Request,
    environ: Mapping[str, str],
    cache: Path,
    progress: Progress = silent,
) -> tuple[Draft | None, Findings]:
    """Check everything that needs no queue. The draft is None where anything is missing or wrong.

    cache: folder for the digests of image files; progress: told while one is read. No image is fetched.
    """
    found = Findings()
    experiment = found.attempt(find_experiment, lab, request.experiment)
    lock, recipe = _locked(found, catalog, experiment) if experiment else (None, None)
    entry = None
    if lock and recipe and recipe.entrypoint.kind == "experiment":
        entry = found.attempt(find_entrypoint, lab, request.experiment, lock, recipe.framework)
    outputs = found.attempt(all_outputs, experiment, recipe) if experiment and recipe else None
    composed = _composed(found, lab, request, environ)
    placement = _placed(found, composed, request) if composed else None
    inputs = _inputs(found, recipe, experiment, request, composed, placement)
    if recipe:
        found.attempt(check_operation, recipe.adapter, "train")
        _check_launch(found, recipe, request, placement)
        _check_observability(found, recipe, request)
    if composed is None:
        _packed(found, lab, request, None)
        _tell_uncomposed(found, request)
        return None, found
    site, cluster = composed.config.site, composed.config.cluster
    capsule = _packed(found, lab, request, site)
    if experiment and recipe and capsule:
        _check_packed(found, lab, experiment, entry, recipe, capsule)
    choice = chosen_image(found, recipe, composed, request, environ) if recipe else None
    # Of a registry's image all is known by a few small answers; a local one is read whole, and so last.
    chosen = None
    if choice and not is_local(choice[0].image):
        chosen = resolved_image(found, choice, composed, request, environ, cache, progress)
    mounts = [parse_mount(text) for text in cluster.mounts]
    check_storage(found, cluster)
    check_reach(found, cluster, inputs, choice[0] if choice else None, request.mounts)
    if cluster.scheduler == "slurm" and request.queues:
        found.attempt(require_sbatch, environ)
    if cluster.scheduler == "local" and request.flags:
        named = ", ".join(flag for flag, _ in request.flags.values())
        found.notices.append(f"profile {cluster.name} runs on this machine without Slurm: {named} not used")
    secrets = present_secrets(found, site, environ)
    if entry and placement and recipe and recipe.adapter == "custom":
        _note_apart(found, entry, placement)
    if found.faults or found.refused or found.missing or not (lock and recipe and placement and capsule):
        return None, found
    if choice and chosen is None:
        chosen = resolved_image(found, choice, composed, request, environ, cache, progress)
    if choice and chosen is None:
        return None, found
    spec = _spec_of(request, composed, placement, capsule, recipe, lock, chosen, inputs)
    spec = dataclasses.replace(
        spec,
        entrypoint=entry.relative_to(lab.root).as_posix() if entry else recipe.entrypoint.value,
        container=dataclasses.replace(spec.container, mounts=mounts),
        node=dataclasses.replace(spec.node, secrets=secrets),
        outputs=outputs or [],
    )
    root = Path(cluster.storage_root).expanduser()
    check_start(found, spec, root)
    if found.faults:
        return None, found
    return Draft(lab, request, composed, spec, capsule, root, chosen), found


def _note_apart(found: Findings, entry: Path, placement: Placement) -> None:
    """C6: a script that would train apart on several nodes is told."""
    notice = multi_node_notice(entry.read_text(errors="replace"), placement.nodes)
    found.notices += [notice] if notice else []


def _tell_uncomposed(found: Findings, request: Request) -> None:
    """What could not be checked without a cluster profile."""
    why = "was not given" if request.profile is None else "could not be composed"
    found.unchecked.append(f"the cluster, its caps and the image: --profile {why}")
    if request.profile is None:
        remedy = "say NAME[:TOTAL_GPUS], like local or h200:8"
        found.missing.append(Fault("a submit needs a cluster profile", "--profile", remedy))


def _spec_of(
    request: Request,
    composed: Composed,
    placement: Placement,
    capsule: CapsuleInfo,
    recipe: Recipe,
    lock: Lock,
    chosen: ChosenImage | None,
    inputs: Inputs,
) -> Spec:
    """All of a spec that follows from what was composed and chosen."""
    site, cluster = composed.config.site, composed.config.cluster
    return Spec(
        recipe=LockedRecipe(recipe.id, recipe.version, recipe.digest, recipe.adapter, list(recipe.plugins)),
        framework=Framework(
            kind=recipe.framework,
            version=lock.framework_version or recipe.runtime.version,
            runtime_id=lock.runtime_id or recipe.runtime.id,
            observability=recipe.observability,
            observability_url=request.observability_url,
        ),
        entrypoint=recipe.entrypoint.value,
        resources=clusterspec.resources(request.profile or cluster.name, cluster, placement),
        container=Container(
            runtime=cluster.container.runtime,
            binary=cluster.container.binary,
            options=list(cluster.container.options),
            image=Image(**dataclasses.asdict(chosen.image)) if chosen else None,
        ),
        node=clusterspec.node(site, cluster),
        reporting=Reporting(enabled=cluster.reporting),
        capsule=Capsule(capsule.digest, capsule.size_bytes, capsule.files, kernel_sha256=""),
        hyperparams=inputs.params,
        slurm=clusterspec.directives(cluster, request.experiment) if cluster.scheduler == "slurm" else None,
        restart=clusterspec.restart(cluster),
        entrypoint_kind=recipe.entrypoint.kind,
        launch=load_adapter(recipe.adapter).OPERATIONS["train"].value,
        bindings=inputs.bindings,
        metrics={name: list(aliases) for name, aliases in recipe.metrics.items()},
        preflight=request.preflight,
    )


def present_secrets(found: Findings, site: Site, environ: Mapping[str, str]) -> list[str]:
    """Names of the site's secrets that the submitting shell has; the others are told."""
    missing = [name for name in site.secrets if name not in environ]
    if missing:
        found.notices.append(f"not set in this shell, so not given to the job: {', '.join(missing)}")
    return [name for name in site.secrets if name in environ]


def _locked(found: Findings, catalog: Catalog, experiment: Path) -> tuple[Lock | None, Recipe | None]:
    state = found.attempt(lock_state, experiment, catalog)
    if state is None:
        return None, None
    found.faults += state.faults
    found.notices += state.advice
    recipe = found.attempt(catalog.find, state.lock.recipe) if state.lock else None
    return state.lock, recipe


def _composed(found: Findings, lab: Lab, request: Request, environ: Mapping[str, str]) -> Composed | None:
    if request.profile is None:
        return None
    asked = found.attempt(parse_profile, request.profile)
    if asked is None:
        return None
    flags = dict(request.flags)
    if request.mounts:
        flags["cluster.mounts"] = ("--mount", list(request.mounts))
    composed = found.attempt(compose, asked.name, lab_root=lab.root, flags=flags, environ=environ)
    if composed is None and flags:  # what else is wrong is found without them; the faults stay
        composed = Findings().attempt(compose, asked.name, lab_root=lab.root, flags={}, environ=environ)
    if composed is not None:
        found.notices += composed.notices
    return composed


def _placed(found: Findings, composed: Composed, request: Request) -> Placement | None:
    assert request.profile is not None
    total = parse_profile(request.profile).total
    config = composed.config
    return found.attempt(place, config.cluster, total, request.nodes, request.gpus_per_node, site=config.site)


def _inputs(
    found: Findings,
    recipe: Recipe | None,
    experiment: Path | None,
    request: Request,
    composed: Composed | None,
    placement: Placement | None,
) -> Inputs:
    """What file and flags say, and what they name is looked at."""
    if recipe is None or experiment is None:
        return Inputs()
    names = ("model", "train_data", "validation_data")
    flags = {name: getattr(request, name) for name in names}
    inputs = read_inputs(found, recipe, experiment, request.sets, flags, request.init_from)
    check_inputs(found, recipe, inputs, composed, placement)
    return inputs


def launch_faults(what: str, launch: Launch | None, placement: Placement) -> list[Fault]:
    """Where the nodes that were asked for do not go with how a command is started."""
    if launch is not Launch.ONE_PROCESS or placement.nodes == 1:
        return []
    told = f"{what} is one process on one node, and {placement.nodes} nodes are asked for"
    return [Fault(told, "--profile", "ask for the GPUs of one node")]


def _check_launch(found: Findings, recipe: Recipe, request: Request, placement: Placement | None) -> None:
    """Whether what was asked for goes with how the recipe is started."""
    launch = load_adapter(recipe.adapter).OPERATIONS.get("train")
    if request.preflight and launch is not Launch.TORCHRUN:
        what = f"{recipe.id} is not started by torchrun, so there are no ranks to check"
        found.faults.append(Fault(what, "--preflight", "leave it away"))
    if placement is not None:
        found.faults += launch_faults(recipe.id, launch, placement)


def _check_observability(found: Findings, recipe: Recipe, request: Request) -> None:
    """C23 and C24. Any URL is accepted; an empty one is none."""
    if recipe.observability == "external" and not request.observability_url:
        remedy = "say --observability-url with the address of your own tracker"
        if request.profile is None and request.observability_url is None:  # validate without flags
            found.unchecked.append("where your metrics go: --observability-url was not given")
            found.missing.append(Fault(URL_REQUIRED, "--observability-url", remedy))
        else:
            found.faults.append(Fault(URL_REQUIRED, "--observability-url", remedy))
    if recipe.observability == "platform" and request.observability_url is not None:
        found.faults.append(
            Fault(
                f"{recipe.id} reports to the platform itself, so --observability-url is refused",
                "--observability-url",
                "leave it away",
            )
        )


def _check_packed(
    found: Findings, lab: Lab, experiment: Path, entry: Path | None, recipe: Recipe, capsule: CapsuleInfo
) -> None:
    """What runs is what travels: an entry that git ignores is on this disk alone (C4, C26)."""
    names = [LOCK_NAME, OUTPUTS_NAME, *([] if recipe.free_parameters else [CONFIG_NAME])]
    present = [experiment / name for name in names if (experiment / name).exists()]
    for path in (*([entry] if entry else []), *present):
        relative = path.relative_to(lab.root).as_posix()
        if relative not in capsule.paths:
            what = f"{relative} is not in the commit, so it would not be in the job"
            if path == entry:
                what = f"{recipe.framework} entrypoint is missing or escapes the experiment directory: {what}"
            found.faults.append(
                Fault(what, str(path), f"git check-ignore -v {shlex.quote(relative)} says why")
            )


def _packed(found: Findings, lab: Lab, request: Request, site: Site | None) -> CapsuleInfo | None:
    limit = (site or Site()).capsule_limit_mb << 20
    checked = found.attempt(check_capsule, lab.root, allow_dirty=request.allow_dirty, limit_bytes=limit)
    if checked is None:
        return None
    faults, capsule = checked
    found.faults += faults
    if capsule and capsule.left_out:
        found.notices.append(f"never in a capsule, left out: {', '.join(capsule.left_out)}")
    if capsule and capsule.dirty:
        found.notices.append(f"taken along uncommitted (--allow-dirty): {', '.join(capsule.dirty)}")
    return capsule


def chosen_image(
    found: Findings, recipe: Recipe, composed: Composed, request: Request, environ: Mapping[str, str]
) -> tuple[Choice, Rules] | None:
    """The image and the rules that admit it; None where none is needed or it is refused."""
    cluster = composed.config.cluster
    if cluster.container.runtime == "none":
        if request.image is not None:
            found.notices.append(f"profile {cluster.name} runs without containers: --image is not used")
        return None
    choice = found.attempt(run_choice, recipe, composed.config, request.image)
    rules = found.attempt(image_rules, composed.config.site, environ)
    if choice is None or rules is None:
        return None
    faults = image_faults(choice, rules)
    found.faults += [fault for fault in faults if fault not in found.faults]
    return None if faults else (choice, rules)


def resolved_image(
    found: Findings,
    choice: tuple[Choice, Rules],
    composed: Composed,
    request: Request,
    environ: Mapping[str, str],
    cache: Path,
    progress: Progress,
) -> ChosenImage | None:
    """What the image is now: frozen, its file there or to be fetched when the run is prepared."""
    place = found.attempt(image_place, composed.config, current_user(), environ)
    if place is None:
        return None
    remember = not request.dry_run
    chosen = found.attempt(resolve_image, *choice, place, environ, cache, progress, remember=remember)
    found.notices += chosen.notices if chosen else ()
    return chosen
