"""The JobSpec: everything that a run is, decided at submit and never again; `job.json` in the run folder.

Compile writes it on the login side, the script is rendered from it, the node agent obeys it.
Plain dataclasses and the standard library: it travels in the kernel.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, TypeVar, Union

from tuneplane.kernel.errors import Fault, UsageError

API_VERSION = "tuneplane/job/v1"

T = TypeVar("T")


@dataclass(frozen=True)
class Metadata:
    """Who submitted what, from where, with which TunePlane."""

    run_id: str
    user: str
    experiment: str
    lab: str
    folder: str  # the run folder, absolute
    created_at: str  # UTC, ISO 8601
    tuneplane: str  # version of the submitting side
    commit: str = ""  # of the lab at submit
    dirty: list[str] = field(default_factory=list)  # files taken along uncommitted (--allow-dirty)


@dataclass(frozen=True)
class Recipe:
    """What was locked of the recipe (C3)."""

    name: str  # in full: custom/custom
    version: str
    digest: str
    adapter: str
    plugins: list[str] = field(default_factory=list)  # algorithms that the recipe needs (C34)


@dataclass(frozen=True)
class Framework:
    kind: str
    version: str
    runtime_id: str
    observability: str  # external | platform (C22)
    observability_url: Optional[str] = None


@dataclass(frozen=True)
class Resources:
    """What is asked for. The node agent compares it with what was really given."""

    profile: str  # as asked: h200:8 (CLUSTER_PROFILE)
    cluster: str  # the cluster profile's name
    scheduler: str  # slurm | local
    device: str  # gpu | cpu
    nodes: int
    gpus_per_node: int  # on a cpu device: processes a node, at least 1 (C9)
    cpus_per_node: Optional[int] = None
    memory_per_node: Optional[str] = None  # in Slurm's form, 1500G


@dataclass(frozen=True)
class Slurm:
    """Directives, each only where somebody asked for it. Values in Slurm's own forms."""

    job_name: str
    gpu_request: str = "none"  # gpus-per-node | gres | none
    gpu_type: Optional[str] = None
    partition: Optional[str] = None
    account: Optional[str] = None
    qos: Optional[str] = None
    reservation: Optional[str] = None
    constraint: Optional[str] = None
    time: Optional[str] = None
    nodelist: Optional[str] = None
    exclude: Optional[str] = None
    dependency: Optional[str] = None
    mail_user: Optional[str] = None
    mail_type: Optional[str] = None
    exclusive: bool = False
    signal_before_end_s: Optional[int] = None  # --signal=B:USR2@N
    extra_directives: dict[str, str] = field(
        default_factory=dict
    )  # name without dashes → value, "" for a flag
    modules: list[str] = field(default_factory=list)
    srun_options: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Mount:
    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Image:
    reference: str  # as asked
    source: str  # who chose it: --image, site default, …
    path: str  # the file that is started
    sha256: str


@dataclass(frozen=True)
class Container:
    runtime: str  # apptainer | none
    binary: str = ""
    options: list[str] = field(default_factory=list)
    image: Optional[Image] = None
    mounts: list[Mount] = field(default_factory=list)


@dataclass(frozen=True)
class Node:
    """How the node agent starts and what it gives to the job."""

    python: str  # the interpreter that runs the kernel on the nodes
    path: str  # PATH of the batch script, and of the trainer where there is no container (C10)
    scratch: str  # node-local folder, below which each attempt has its own
    shared: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)  # site's: NCCL_*, HF_HOME, *_DATA_DIR
    secrets: list[str] = field(default_factory=list)  # names that stand in secrets.env
    heartbeat_s: float = 10.0
    stop_grace_s: float = 20.0  # between TERM and KILL of the trainer; Slurm's KillWait is 30


@dataclass(frozen=True)
class Reporting:
    """Ingest: where points go, and the token's digest that binds a writer to the run (C31)."""

    enabled: bool
    endpoint: str = ""
    token_sha256: str = ""


@dataclass(frozen=True)
class Capsule:
    digest: str
    size_bytes: int
    files: int
    kernel_sha256: str  # of kernel.pyz


@dataclass(frozen=True)
class Output:
    """One declared output, a glob below the output folder (C13)."""

    name: str
    path: str
    kind: str = "artifact"  # artifact | tensorboard | jsonl
    step_key: str = ""  # of jsonl


@dataclass(frozen=True)
class Plugin:
    id: str
    version: str
    digest: str


@dataclass(frozen=True)
class Spec:
    recipe: Recipe
    framework: Framework
    entrypoint: str  # relative to the work folder
    resources: Resources
    container: Container
    node: Node
    reporting: Reporting
    capsule: Capsule
    hyperparams: dict[str, Any] = field(default_factory=dict)
    slurm: Optional[Slurm] = None
    outputs: list[Output] = field(default_factory=list)
    plugins: list[Plugin] = field(default_factory=list)


@dataclass(frozen=True)
class JobSpec:
    metadata: Metadata
    spec: Spec
    apiVersion: str = API_VERSION


def dump(job: JobSpec) -> str:
    """The text of `job.json`; the same JobSpec gives the same bytes."""
    value = dataclasses.asdict(job)
    ordered = {"apiVersion": value.pop("apiVersion"), **value}
    return json.dumps(ordered, indent=2, ensure_ascii=False) + "\n"


def load(text: str, where: str = "job.json") -> JobSpec:
    """The JobSpec in `text`. Raises UsageError with every unknown key, missing key and wrong type."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(Fault(f"not JSON: {error}", where)) from None
    if not isinstance(value, dict):
        raise UsageError(Fault("a JobSpec is a JSON object", where))
    version = value.get("apiVersion")
    if version != API_VERSION:
        raise UsageError(
            Fault(
                f"apiVersion {version!r} is not {API_VERSION!r}",
                where,
                "use the TunePlane version that wrote this run, or submit the experiment again",
            )
        )
    faults: list[Fault] = []
    job = _build(JobSpec, value, "", where, faults)
    if faults:
        raise UsageError(*faults)
    return typing.cast(JobSpec, job)


def read(path: Path) -> JobSpec:
    """The JobSpec in a file. Raises OSError, UsageError."""
    return load(path.read_text(encoding="utf-8"), str(path))


def _build(kind: Any, value: Any, key: str, where: str, faults: list[Fault]) -> Any:
    """`value` as `kind`, a dataclass or one of the few typing forms used above; faults are collected."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(typing.cast(type[Any], kind), value, key, where, faults)
    if kind is Any:
        return value
    if origin is Union:  # Optional[X]
        if value is None:
            return None
        return _build(typing.get_args(kind)[0], value, key, where, faults)
    if origin is list and isinstance(value, list):
        item = typing.get_args(kind)[0]
        return [_build(item, v, f"{key}[{i}]", where, faults) for i, v in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        item = typing.get_args(kind)[1]
        return {k: _build(item, v, f"{key}.{k}", where, faults) for k, v in value.items()}
    accepted = {float: (int, float)}.get(kind, kind) if origin is None else origin
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        name = getattr(kind, "__name__", str(kind)) if origin is None else origin.__name__
        faults.append(Fault(f"{key} is {type(value).__name__}, not {name}", where))
    return value


def _build_dataclass(kind: type[T], value: Any, key: str, where: str, faults: list[Fault]) -> Optional[T]:
    label = key or "the JobSpec"
    if not isinstance(value, dict):
        faults.append(Fault(f"{label} is {type(value).__name__}, not an object", where))
        return None
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    prefix = f"{key}." if key else ""
    faults.extend(Fault(f"unknown key {prefix}{name}", where) for name in value if name not in fields)
    built: dict[str, Any] = {}
    complete = True
    for name, declared in fields.items():
        if name in value:
            built[name] = _build(hints[name], value[name], prefix + name, where, faults)
        elif declared.default is dataclasses.MISSING and declared.default_factory is dataclasses.MISSING:
            faults.append(Fault(f"missing key {prefix}{name}", where))
            complete = False
    return kind(**built) if complete else None
