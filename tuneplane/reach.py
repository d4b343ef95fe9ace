"""What compute nodes must reach, and what the container runtime must be able to start: told before the queue.

Compile calls it; nothing is asked of Slurm or of a node.
"""

from __future__ import annotations

import os
from pathlib import Path

from tuneplane.compose import parse_mount
from tuneplane.containers import Container as Started
from tuneplane.containers import Mount as Bind
from tuneplane.containers import faults as container_faults
from tuneplane.containers import form_faults
from tuneplane.findings import Findings
from tuneplane.images.local import ImageFile, inspect
from tuneplane.inputs import Inputs, flag_of
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.node.environment import data_folders
from tuneplane.site import Cluster
from tuneplane.spec import Spec


def check_storage(found: Findings, cluster: Cluster) -> None:
    """C31: compute nodes must reach the run folder, and so the ingest folder in it."""
    if cluster.scheduler == "local" and not os.access(cluster.scratch, os.W_OK | os.X_OK):
        what = f"scratch folder {cluster.scratch} cannot be written"
        where = f"profile {cluster.name}, scratch"
        found.refused.append(OperationError(Fault(what, where, "choose another folder of this machine")))
    root = Path(os.path.realpath(Path(cluster.storage_root).expanduser()))
    if cluster.scheduler != "slurm" or not cluster.shared:
        return
    shared = [Path(os.path.realpath(path)) for path in cluster.shared]
    if not any(root.is_relative_to(path) for path in shared):
        found.faults.append(
            Fault(
                f"storage root {root} is outside what the site calls shared ({', '.join(map(str, shared))}): "
                "compute nodes would not reach the run's folder",
                f"profile {cluster.name}, storage_root",
                "choose one below a shared folder",
            )
        )


def check_reach(found: Findings, cluster: Cluster, inputs: Inputs) -> None:
    """What the run reads must lie where compute nodes see it."""
    if cluster.scheduler != "slurm" or not cluster.shared:
        return
    seen = [*cluster.shared, *(parse_mount(text).target for text in cluster.mounts)]
    for name, value in inputs.bindings.items():
        if value.startswith("/") and not any(Path(value).is_relative_to(path) for path in seen):
            what = f"{value} is outside what the site calls shared ({', '.join(cluster.shared)})"
            found.faults.append(Fault(what, flag_of(name), "copy it below a shared folder"))


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
