"""All of `tp doctor` in its order. Each look stands for itself: what fails in one hides no other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tuneplane.doctor.check import FAIL, OK, WARN, Check
from tuneplane.doctor.cluster import SHARED, look_at_clients, look_at_images, look_at_profile
from tuneplane.doctor.machine import look_at_machine
from tuneplane.doctor.node import NODE_STORAGE, WAIT_S, look_at_node
from tuneplane.lab.marker import Lab
from tuneplane.recipes.catalog import Catalog


def check_up(
    environ: Mapping[str, str],
    *,
    profile: str | None = None,
    image: str | None = None,
    deep: bool = False,
    lab: Lab | None = None,
    catalog: Catalog | None = None,
    wait_s: float = WAIT_S,
) -> list[Check]:
    """Every check, in the order in which they are told. Raises nothing of its own."""
    root = lab.root if lab else None
    checks = look_at_machine(environ, root)
    if lab is not None and catalog is not None:
        from tuneplane.doctor.lab import look_at_lab

        checks += look_at_lab(lab, catalog)
    if profile is None:
        checks += _without_profile(environ, root, image)
        return checks
    composed, found = look_at_profile(profile, root, environ)
    checks += found
    if composed is None:
        return checks
    if composed.config.cluster.container.runtime != "none" or image is not None:
        checks += look_at_images(composed.config.site, image, environ)
    if not deep:
        return checks
    if composed.config.cluster.scheduler != "slurm":
        return [*checks, Check("node job", OK, "this profile runs on this machine: there are no other nodes")]
    failed = [c for c in found if c.level == FAIL and c.name.startswith(("Slurm", "storage"))]
    if failed:
        told = f"not tried, since {failed[0].name} failed"
        return [*checks, Check("node job", WARN, told, failed[0].remedy)]
    seen = look_at_node(composed.config, image, wait_s)
    if any(check.name == NODE_STORAGE and check.level == OK for check in seen):  # known now
        checks = [check for check in checks if check.name != SHARED]
    return checks + seen


def _without_profile(environ: Mapping[str, str], lab: Path | None, image: str | None) -> list[Check]:
    """What of a cluster can be told where no profile is named."""
    composed, found = look_at_profile("local", lab, environ)
    checks = [*found, *(look_at_images(composed.config.site, image, environ) if composed else [])]
    slurm = look_at_clients(environ)
    if any(check.name == "Slurm programs" and check.level == FAIL for check in slurm):
        return [*checks, Check("Slurm", OK, "not on this machine: runs start here with --profile local")]
    return [*checks, *slurm]
