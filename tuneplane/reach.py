"""What compute nodes must reach, and what the container runtime must be able to start: told before the queue.

Compile calls it; nothing is asked of Slurm or of a node.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from tuneplane.compose import parse_mount
from tuneplane.containers import Container as Started
from tuneplane.containers import Mount as Bind
from tuneplane.containers import faults as container_faults
from tuneplane.containers import form_faults
from tuneplane.findings import Findings
from tuneplane.images import Choice, is_local
from tuneplane.images.choice import FLAG
from tuneplane.images.local import ImageFile, inspect
from tuneplane.inputs import Inputs, flag_of
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.node.environment import data_folders
from tuneplane.site import Cluster
from tuneplane.spec import Spec


def check_storage(found: Findings, cluster: Cluster, of_run: Path | None = None) -> None:
    """C31: compute nodes must reach the run folder, and so the ingest folder in it.

    of_run: the storage root of the run that an operation works on, and is made beside, whatever the profile says.
    """
    if cluster.scheduler == "local" and not os.access(cluster.scratch, os.W_OK | os.X_OK):
        what = f"scratch folder {cluster.scratch} cannot be written"
        where = f"profile {cluster.name}, scratch"
        found.refused.append(OperationError(Fault(what, where, "choose another folder of this machine")))
    outside = cluster.outside_shared(of_run or Path(cluster.storage_root).expanduser())
    if outside:
        what = f"storage root {outside}: compute nodes would not reach the run's folder"
        where = f"profile {cluster.name}, storage_root"
        remedy = "choose one below a shared folder"
        if of_run is not None:
            where, remedy = "--profile", "name a profile whose nodes see the folder of the run worked on"
        found.faults.append(Fault(what, where, remedy))


def check_reach(
    found: Findings,
    cluster: Cluster,
    inputs: Inputs,
    image: Choice | None = None,
    mounts: Collection[str] = (),
) -> None:
    """What a user named for the run must lie where compute nodes see it: data, model, image, mounted folders.

    mounts: those of `--mount`. What a site or a profile mounts or sets as image is its own to know, and so is what
    lies below such a mount; the scratch folder is on each node's own disk and may be mounted from there.
    """
    mounted = {text: parse_mount(text) for text in cluster.mounts}
    known = [mount.source for text, mount in mounted.items() if text not in mounts]
    seen = [*known, *(mount.target for mount in mounted.values())]
    paths = [(value, flag_of(name), seen) for name, value in inputs.bindings.items() if value.startswith("/")]
    local = [*known, cluster.scratch]
    paths += [(mount.source, "--mount", local) for text, mount in mounted.items() if text in mounts]
    if image and image.source == FLAG and is_local(image.image):
        paths.append((str(Path.cwd() / Path(image.image).expanduser()), FLAG, known))
    for path, where, apart in paths:
        outside = cluster.outside_shared(Path(path))
        if outside and not any(Path(path).is_relative_to(folder) for folder in apart):
            own = (
                "; what each node has by itself, the profile mounts: cluster.mounts"
                if where == "--mount"
                else ""
            )
            found.faults.append(Fault(outside, where, f"copy it below a shared folder{own}"))


def check_start(found: Findings, spec: Spec, root: Path) -> None:
    """What the container runtime could not be told, found before the queue and not after it."""
    container = spec.container
    sample = Started(
        runtime=container.runtime,
        binary=container.binary,
        image=container.image.path if container.image else "",
        options=tuple(container.options),
        gpus=spec.resources.device == "gpu",
        workdir=spec.node.scratch,
        tmp_dir=f"{spec.node.scratch}/tmp",
        home_dir=f"{spec.node.scratch}/home",
        state_dir=f"{spec.node.scratch}/runtime",
    )
    binds = [Bind(m.source, m.target, m.read_only) for m in container.mounts]
    if container.runtime != "none":  # what each start mounts besides: the run's folders, the site's data
        runs = str(root / "runs")
        targets = {bind.target for bind in binds}
        folders = dict.fromkeys([runs, *data_folders(spec.node.environment)])
        binds += [Bind(folder, folder) for folder in folders if folder not in targets]
    found.faults += container_faults(sample, ["bash"], spec.node.environment, binds)
    image = container.image
    file = inspect(image.path, None, trusted=True) if image else None
    if image and isinstance(file, ImageFile):  # one that is fetched later is made for this runtime
        found.faults += form_faults(container.runtime, file.format, image.path, image.source)
