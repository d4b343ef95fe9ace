"""The composed configuration as types: a site, one cluster profile, its container runtime.

Compose (Hydra) fills these and says where each value came from; compile turns them into a JobSpec.
Field comments are the reference that `docs/site.md` explains key by key.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Caps:
    """The most that one submission may ask for; None: no cap."""

    nodes: int | None = None
    gpus: int | None = None
    walltime: str | None = None  # in Slurm's time forms
    gpus_in_flight: int | None = None  # of one user, pending and running (C45)


@dataclass
class Site:
    """What holds for every cluster profile of a site."""

    name: str = "default"
    contact: str = "the administrators of this cluster"  # whom refusals tell users to ask
    locked: list[str] = field(default_factory=list)  # dotted keys that no user, lab or flag changes
    allowed_registries: list[str] | None = None  # host[:port], exact (C28); None: the environment decides
    image_folders: list[str] | None = None  # where .sif and .sqsh files may lie; None: anywhere readable
    image_cache: str | None = None  # shared folder of prepared images; None: images/ of the storage root
    image_scratch: str | None = None  # where images are unpacked while built; None: TMPDIR
    image_job: list[str] = field(default_factory=list)  # srun's options: prepare images by a job
    insecure_registries: list[str] = field(default_factory=list)  # may be asked by plain HTTP
    default_images: dict[str, str] = field(default_factory=dict)  # method, or "*" → image
    runtime_images: dict[str, str] = field(default_factory=dict)  # runtime id → image (C27)
    secrets: list[str] = field(default_factory=list)  # names taken from the submitting shell (C10)
    environment: dict[str, str] = field(default_factory=dict)  # given to every job: HF_HOME, X_DATA_DIR
    capsule_limit_mb: int = 512
    run_folder_mode: str = "0700"  # or "0750"
    caps: Caps = field(default_factory=Caps)


@dataclass
class ContainerRuntime:
    """A container runtime and what the site always passes to it."""

    runtime: str = "none"  # apptainer | singularity | enroot | pyxis | none
    binary: str = ""
    options: list[str] = field(default_factory=list)


@dataclass
class Slurm:
    """Directives; a None emits nothing. Command-line flags of the same names set these."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    time: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    dependency: str | None = None
    mail_user: str | None = None
    mail_type: str | None = None
    job_name: str | None = None
    exclusive: bool = False
    gpu_request: str = "gpus-per-node"  # gpus-per-node | gres | none
    gpu_type: str | None = None  # h200 in --gpus-per-node=h200:8
    signal_before_end_s: int | None = 120  # --signal=B:USR2@N: save and end before the walltime
    extra_directives: dict[str, str] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)  # module load, in the batch script
    srun_options: list[str] = field(default_factory=list)


@dataclass
class Cluster:
    """A cluster profile: a site's Slurm and one kind of its nodes, or this machine."""

    name: str = "local"
    description: str = ""
    scheduler: str = "local"  # slurm | local
    device: str = "cpu"  # gpu | cpu; a file may say auto on the local scheduler: compose decides
    gpus_per_node: int = 1  # GPUs a node has; on a cpu device, processes it may run; 0, local: find out
    default_gpus: int | None = None  # what the bare profile name asks for; None: one whole node, on a cpu 1
    max_nodes: int | None = None
    cpus_per_node: int | None = None  # CPUs a node has
    memory_per_node: str | None = None  # memory a node has; a share of it is asked for with part of its GPUs
    architecture: str | None = None  # of the nodes, in the images' words: amd64, arm64; None: this machine's
    request_cpus: bool = True  # say --cpus-per-task; false: leave it to Slurm's defaults
    request_memory: bool = False  # say --mem; false: leave it to Slurm's defaults
    storage_root: str = "~/tuneplane"  # runs/<user>/… below it
    shared: list[str] = field(default_factory=list)  # what compute nodes see; empty: not known
    scratch: str = "/tmp"  # node-local, for the unpacked capsule
    python: str | None = None  # runs the kernel on the nodes, >= 3.9; None: tp's base interpreter
    path: str = "/usr/local/bin:/usr/bin:/bin"
    mounts: list[str] = field(default_factory=list)  # SRC:DST[:ro]
    environment: dict[str, str] = field(default_factory=dict)  # NCCL_* and the like
    heartbeat_s: float = 10.0
    stop_grace_s: float = 20.0
    save_s: float | None = None  # None: what signal_before_end_s leaves of it
    save_signal: str | None = None  # USR1, USR2 or TERM; None: the stop marker alone
    hang_limit_s: float = 0.0  # without output or a point, after which a run has hung; 0: no limit
    max_restarts: int = 10
    restart_way: str = "requeue"  # requeue | successor
    reporting: bool = True  # bind ingest (TUNEPLANE_JOB_ENABLED)
    slurm: Slurm = field(default_factory=Slurm)
    container: ContainerRuntime = field(default_factory=ContainerRuntime)

    def outside_shared(self, path: Path) -> str:
        """That compute nodes do not see a path of this host, and what they see; empty where they may."""
        if self.scheduler != "slurm" or not self.shared:
            return ""
        real, *shared = (Path(os.path.realpath(each)) for each in [str(path), *self.shared])
        if any(real.is_relative_to(folder) for folder in shared):
            return ""
        return f"{real} is outside what the site calls shared ({', '.join(map(str, shared))})"


@dataclass
class Config:
    """The whole composed tree."""

    site: Site = field(default_factory=Site)
    cluster: Cluster = field(default_factory=Cluster)
