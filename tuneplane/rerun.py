"""A new run from an ended one's own capsule and JobSpec, with other hyper-parameters: `tp job rerun`.

The lab is not looked at: code, image and all else stay what was frozen. What the site says today is checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneplane.compose import Composed
from tuneplane.compose.mounts import format_mount
from tuneplane.findings import Findings
from tuneplane.frozen import (
    DIRECTIVES,
    asked_directives,
    compose_frozen,
    image_file_faults,
    prepare_copy,
    preview_copy,
    read_frozen,
)
from tuneplane.images import Choice, image_faults
from tuneplane.kernel.errors import Fault
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.launch.render import script_of
from tuneplane.profile import parse_profile, place
from tuneplane.recipes.catalog import Catalog
from tuneplane.recipes.parameters import check_parameters, overrides_of, parse_sets
from tuneplane.recipes.recipe import Recipe
from tuneplane.runimage import image_rules
from tuneplane.site import Config, Site
from tuneplane.spec import JobSpec, Spec
from tuneplane.start import Submitted, check_room, hand_over
from tuneplane.submit import refuse_secrets_in


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
    job = read_frozen(run)
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
    job = preview_copy(planned.job, planned.storage_root)
    return job, script_of(job)


def rerun(planned: Plan, environ: Mapping[str, str]) -> Submitted:
    """Make the new run's folder and hand it over. Raises OperationError; a half-made folder is then removed."""
    check_room(planned.job.spec.resources, planned.site)
    run, job = prepare_copy(planned.job, planned.of.capsule, planned.storage_root, planned.site, environ)
    return hand_over(run, job)


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
    own = asked_directives(job.spec)
    said: dict[str, tuple[str, object]] = {
        f"cluster.slurm.{name}": (f"job.json of {run.run_id}", value)
        for name, value in own.items()
        if value is not None and name != "dependency"
    }
    said |= {f"cluster.slurm.{name}": (f"--{name.replace('_', '-')}", value) for name, value in flags.items()}
    name = parse_profile(job.spec.resources.profile).name
    return compose_frozen(run.capsule, name, said, environ)


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
    found.faults += image_file_faults(image)


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
        name: item for name, item in value["slurm"].items() if item is not None or name in DIRECTIVES
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
