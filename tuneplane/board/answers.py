"""What the page is told of runs, as plain values. Pure but for `read_config`; called by `app`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

from tuneplane import spec as jobspec
from tuneplane.board.watch import Known, Listed, States, metric_id
from tuneplane.collect.overview import Overview
from tuneplane.kernel.errors import TunePlaneError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.runs.attempts import read_attempts
from tuneplane.runs.evaluation import read_evaluation
from tuneplane.runs.logs import MASK, known_secrets

MAX_METRICS = 5_000
"""Of one run; the names of more would not be read by anybody, and a bug in a trainer makes 100,000."""

MAX_FILES = 20
"""Files that were not read and are named one by one."""


def runs_answer(states: States, known: Mapping[str, Known], notice: str = "") -> dict[str, Any]:
    """All runs with their states. Ages are the page's to count, from `now_s`.

    notice: why the board keeps nothing of what it reads; empty where it does.
    """
    return {
        "now_s": time.time(),
        "read_at_s": states.read_at,
        "fault": states.fault,
        "notice": notice,
        "runs": [_row(listed, known.get(listed.state.run_id)) for listed in states.runs],
    }


def _row(listed: Listed, known: Known | None) -> dict[str, Any]:
    state = listed.state
    overview = known.overview if known else Overview()
    return {
        "id": state.run_id,
        "experiment": state.experiment,
        "state": state.state,
        "final": state.is_final,
        "reason": state.reason.partition("\n")[0],
        "code": state.code,
        "profile": state.profile,
        "attempts": state.attempts,
        "submitted_s": state.submitted_at,
        "started_s": state.started_at,
        "ended_s": state.ended_at,
        "newest_s": overview.newest_s,
        "metrics": len(overview.metrics) if known and known.read_at else None,
        "notices": len(notices(overview)),
    }


def overview_answer(run_id: str, known: Known, seen: str) -> dict[str, Any]:
    """A run's metrics without points; only that nothing is new, where `seen` is the stamp of what there is."""
    if seen and seen == known.stamp:
        return {"id": run_id, "stamp": seen, "same": True}
    overview = known.overview
    names = sorted(overview.metrics)
    return {
        "id": run_id,
        "stamp": known.stamp,
        "read": known.read_at > 0,
        "newest_s": overview.newest_s,
        "origin_s": known.origin_s,
        "attempts": overview.attempts,
        "notices": notices(overview),
        "metrics_left_out": max(0, len(names) - MAX_METRICS),
        "metrics": [
            {
                "id": metric_id(name),
                "name": name,
                "last": value.last,
                "last_step": value.last_step,
                "min": value.min,
                "max": value.max,
                "points": value.points,
                "hidden": value.hidden,
            }
            for name, value in ((name, overview.metrics[name]) for name in names[:MAX_METRICS])
        ],
    }


def notices(overview: Overview) -> list[str]:
    """Why the run could not be read, and what of it was lost."""
    fault = [overview.fault] if overview.fault else []
    return fault + overview.losses(most_files=MAX_FILES)


def read_details(listed: Listed, overview: Overview) -> dict[str, Any]:
    """One run whole, but for its metrics: state, attempts, nodes, configuration, evaluation. Raises OSError."""
    state, run = listed.state, listed.folder
    attempts = read_attempts(run, state) if state.state != "UNKNOWN" or state.attempts else []
    masks = known_secrets(run)
    details = {
        "state": {**state.as_dict(), "nodes": [dataclasses.asdict(node) for node in state.nodes]},
        "attempts": [attempt.as_dict() for attempt in attempts],
        "config": read_config(run),
        "hparams": flat(overview.hparams),
        "notices": notices(overview),
        "report": read_evaluation(run).as_dict(),
    }
    masked: dict[str, Any] = _masked(details, masks)
    return masked


def read_config(run: RunFolder) -> dict[str, Any]:
    """What of the JobSpec tells runs apart, flat. Empty where job.json cannot be read."""
    try:
        job = jobspec.read(run.job)
    except (OSError, TunePlaneError):
        return {}
    spec, metadata = job.spec, job.metadata
    image = spec.container.image
    chosen: dict[str, Any] = {
        "set": spec.hyperparams,
        "lab": metadata.lab,
        "commit": metadata.commit,
        "uncommitted files": len(metadata.dirty),
        "user": metadata.user,
        "recipe": f"{spec.recipe.name} {spec.recipe.version}",
        "framework": f"{spec.framework.kind} {spec.framework.version}",
        "entrypoint": spec.entrypoint,
        "bindings": spec.bindings,
        "image": (image.digest and f"{image.reference} {image.digest}") or image.reference if image else "",
        "resources": dataclasses.asdict(spec.resources),
        "slurm": dataclasses.asdict(spec.slurm) if spec.slurm else {},
        "restart": dataclasses.asdict(spec.restart),
        "environment": spec.node.environment,
        "plugins": {plugin.id: plugin.version for plugin in spec.plugins},
        "capsule": spec.capsule.digest,
        "tuneplane": metadata.tuneplane,
        "created": metadata.created_at,
    }
    # 0 equals False and goes too; but what the user set is told whatever it is.
    nothing: tuple[object, ...] = (None, "", [], {}, False)
    return {
        key: value for key, value in flat(chosen).items() if key.startswith("set.") or value not in nothing
    }


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots; lists stay as they are."""
    found: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            found.update(flat(inner, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = inner
    return found


def _masked(value: Any, masks: Iterable[str]) -> Any:
    """Without the secrets that are known: a trainer may have reported one among its hyper-parameters."""
    if isinstance(value, str):
        for mask in masks:
            value = value.replace(mask, MASK)
        return value
    if isinstance(value, dict):
        return {_masked(key, masks): _masked(inner, masks) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(inner, masks) for inner in value]
    return value
