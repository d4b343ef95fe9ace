"""The JobSpec: everything that a run is, decided at submit and never again; `job.json` in the run folder.

Compile writes it on the login side, the script is rendered from it, the node agent obeys it.
Plain dataclasses and the standard library: it travels in the kernel.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Optional, TypeVar, Union

from tuneplane.containers import RUNTIMES
from tuneplane.kernel.errors import Fault, UsageError
from tuneplane.kernel.files import json_text

API_VERSION = "tuneplane/job/v1"

T = TypeVar("T")


SAVE_SIGNALS = ("", "USR1", "USR2", "TERM")
"""Signals that a trainer may have chosen to save by; empty: it looks for the stop marker."""

ENTRYPOINTS = ("experiment", "module")
"""Where what starts lies: in the experiment's folder, or in the image."""

OPERATIONS = ("train", "export", "eval")
"""What a run does with its recipe."""

LAUNCHES = ("each-node", "torchrun", "one-process")
"""How the node agents start it: once on every node, in every rank by torchrun, or once in all."""


@dataclass(frozen=True)
class OneOf:
    """A rule of a field: exactly one of these words."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class AtLeast:
    """A rule of a field: a number from `least` on."""

    least: float


@dataclass(frozen=True)
class Metadata:
    """Who submitted what, from where, with which TunePlane."""

    run_id: str  # <experiment>-<UTC date>-<time>-<4 characters>
    user: str  # who submitted
    experiment: str  # its name
    lab: str  # the lab's name, of tuneplane.yaml
    folder: str  # the run folder, absolute
    created_at: str  # UTC, ISO 8601
    tuneplane: str  # version of the submitting side
    commit: str = ""  # of the lab at submit
    dirty: list[str] = field(default_factory=list)  # files taken along uncommitted (--allow-dirty)
    rerun_of: str = ""  # the run whose capsule and JobSpec this one was made from (tp job rerun)


@dataclass(frozen=True)
class Recipe:
    """What was locked of the recipe (C3)."""

    name: str  # in full: custom/custom
    version: str  # TUNEPLANE_RECIPE_VERSION
    digest: str  # TUNEPLANE_RECIPE_DIGEST
    adapter: str  # which makes the command
    plugins: list[str] = field(default_factory=list)  # algorithms that the recipe needs (C34)


@dataclass(frozen=True)
class Framework:
    """What trains, and where its metrics go."""

    kind: str  # custom
    version: str  # of the framework, or user-managed
    runtime_id: str  # which image the recipe means
    observability: Annotated[str, OneOf(("external", "platform"))]  # whose tracker (C22)
    observability_url: Optional[str] = None  # TUNEPLANE_EXTERNAL_OBSERVABILITY_URL


@dataclass(frozen=True)
class Resources:
    """What is asked for. The node agent compares it with what was really given."""

    profile: str  # as asked: h200:8 (CLUSTER_PROFILE)
    cluster: str  # the cluster profile's name
    scheduler: Annotated[str, OneOf(("slurm", "local"))]  # Slurm, or this machine
    device: Annotated[str, OneOf(("gpu", "cpu"))]  # what gpus_per_node counts
    nodes: Annotated[int, AtLeast(1)]  # how many
    gpus_per_node: Annotated[int, AtLeast(1)]  # on a cpu device: processes a node (C9)
    cpus_per_node: Annotated[Optional[int], AtLeast(1)] = None  # --cpus-per-task; null: Slurm's default
    memory_per_node: Optional[str] = None  # in Slurm's form, 1500G


@dataclass(frozen=True)
class Slurm:
    """Directives, each only where somebody asked for it. Values in Slurm's own forms."""

    job_name: str  # --job-name
    gpu_request: Annotated[str, OneOf(("gpus-per-node", "gres", "none"))] = "none"  # option for GPUs
    gpu_type: Optional[str] = None  # h200 in --gpus-per-node=h200:8
    partition: Optional[str] = None  # --partition
    account: Optional[str] = None  # --account
    qos: Optional[str] = None  # --qos
    reservation: Optional[str] = None  # --reservation
    constraint: Optional[str] = None  # --constraint
    time: Optional[str] = None  # --time
    nodelist: Optional[str] = None  # --nodelist
    exclude: Optional[str] = None  # --exclude
    dependency: Optional[str] = None  # --dependency
    mail_user: Optional[str] = None  # --mail-user
    mail_type: Optional[str] = None  # --mail-type
    exclusive: bool = False  # --exclusive
    signal_before_end_s: Annotated[Optional[int], AtLeast(1)] = None  # --signal=B:USR2@N
    extra_directives: dict[str, str] = field(default_factory=dict)  # name without dashes → value, or ""
    modules: list[str] = field(default_factory=list)  # loaded by the batch script
    srun_options: list[str] = field(default_factory=list)  # further options of srun


@dataclass(frozen=True)
class Mount:
    """A folder or file of the node that the container sees."""

    source: str  # on the node
    target: str  # in the container
    read_only: bool = False  # whether it may not be written


@dataclass(frozen=True)
class Image:
    """The container's image, fixed at submit (C27)."""

    reference: str  # as asked
    source: str  # who chose it: --image, site default, …
    path: str  # the file that is started
    sha256: str  # of that file
    digest: str = ""  # sha256:<hex>, to which a registry's name was frozen at submit (C27)
    size_bytes: Annotated[int, AtLeast(0)] = 0  # of that file
    modified_s: int = 0  # its last change in seconds since the epoch, by which nodes see that it is the same


@dataclass(frozen=True)
class Container:
    """What the trainer runs in."""

    runtime: Annotated[str, OneOf(RUNTIMES)]  # the program that starts it
    binary: str = ""  # that program's name or path; empty: its own name
    options: list[str] = field(default_factory=list)  # further options of it
    image: Optional[Image] = None  # null where there is no container
    mounts: list[Mount] = field(default_factory=list)  # beside those that every job has


@dataclass(frozen=True)
class Node:
    """How the node agent starts and what it gives to the job."""

    python: str  # the interpreter that runs the kernel on the nodes
    path: str  # PATH of the batch script, and of the trainer where there is no container (C10)
    scratch: str  # node-local folder, below which each attempt has its own
    shared: list[str] = field(default_factory=list)  # folders that all nodes see
    environment: dict[str, str] = field(default_factory=dict)  # site's: NCCL_*, HF_HOME, *_DATA_DIR
    secrets: list[str] = field(default_factory=list)  # names that stand in secrets.env
    heartbeat_s: Annotated[float, AtLeast(0.01)] = 10.0  # between two signs of life of a node
    stop_grace_s: Annotated[float, AtLeast(0)] = 20.0  # between the trainer's TERM and KILL; KillWait is 30
    save_s: Annotated[float, AtLeast(0)] = 60.0  # between the stop marker and TERM
    save_signal: Annotated[str, OneOf(SAVE_SIGNALS)] = ""  # to processes that catch it, with the marker
    hang_limit_s: Annotated[float, AtLeast(0)] = 0.0  # without output or a point; 0: no limit


@dataclass(frozen=True)
class Restart:
    """When the run starts again by itself: after its walltime, a preemption, a dead node."""

    max_restarts: Annotated[int, AtLeast(0)] = 0  # how often, one after the other
    way: Annotated[str, OneOf(("requeue", "successor"))] = "requeue"  # scontrol requeue, or a new job


@dataclass(frozen=True)
class Reporting:
    """Ingest: where points go, and the token's digest that binds a writer to the run (C31)."""

    enabled: bool  # TUNEPLANE_JOB_ENABLED
    endpoint: str = ""  # TUNEPLANE_JOB_ENDPOINT, file:///…
    token_sha256: str = ""  # of TUNEPLANE_JOB_TOKEN, which stands nowhere else


@dataclass(frozen=True)
class Capsule:
    """The job package, and the kernel beside it."""

    digest: str  # of its content: TUNEPLANE_CAPSULE_DIGEST
    size_bytes: Annotated[int, AtLeast(0)]  # of capsule.tar
    files: Annotated[int, AtLeast(0)]  # of the lab in it
    kernel_sha256: str  # of kernel.pyz


@dataclass(frozen=True)
class Output:
    """One declared output, a glob below the output folder (C13)."""

    name: str  # checkpoints
    path: str  # checkpoints/*
    kind: Annotated[str, OneOf(("artifact", "tensorboard", "jsonl"))] = "artifact"  # how it is read
    step_key: str = ""  # of jsonl


@dataclass(frozen=True)
class Plugin:
    """An algorithm plugin, locked (C34)."""

    id: str  # <owner>/<name>
    version: str  # exact
    digest: str  # of its content


@dataclass(frozen=True)
class Subject:
    """The run that an operation works on: its output folder is the operation's too."""

    run_id: str  # of that run
    folder: str  # its run folder, absolute
    awaited: str = ""  # folder of the run to wait for, where another operation comes between


@dataclass(frozen=True)
class Spec:
    """What runs, where and how."""

    recipe: Recipe
    framework: Framework
    entrypoint: str  # a path relative to the work folder, or a module's name
    resources: Resources
    container: Container
    node: Node
    reporting: Reporting
    capsule: Capsule
    hyperparams: dict[str, Any] = field(default_factory=dict)  # --set, flat: TUNEPLANE_PARAMS_FILE
    slurm: Optional[Slurm] = None  # there where the scheduler is slurm
    restart: Restart = field(default_factory=Restart)  # when it starts again by itself
    outputs: list[Output] = field(default_factory=list)  # what is looked for below TUNEPLANE_OUT_DIR
    plugins: list[Plugin] = field(default_factory=list)  # in their order
    entrypoint_kind: Annotated[str, OneOf(ENTRYPOINTS)] = "experiment"  # a file of it, or a Python module
    launch: Annotated[str, OneOf(LAUNCHES)] = "each-node"  # how the nodes start it
    bindings: dict[str, str] = field(default_factory=dict)  # model, train_data, …: hub id or absolute path
    metrics: dict[str, list[str]] = field(default_factory=dict)  # canonical name → what frameworks say
    preflight: bool = False  # whether ranks check each other's connection before they train
    operation: Annotated[str, OneOf(OPERATIONS)] = "train"  # what is done
    subject: Optional[Subject] = None  # of an export or an eval: the run that it works on


@dataclass(frozen=True)
class JobSpec:
    """One run."""

    metadata: Metadata
    spec: Spec
    apiVersion: str = API_VERSION  # changes when a reader of this version could not read it right


def dump(job: JobSpec) -> str:
    """The text of `job.json`; the same JobSpec gives the same bytes.

    Raises UsageError for a number that JSON has no word for.
    """
    value = dataclasses.asdict(job)
    try:
        return json_text({"apiVersion": value.pop("apiVersion"), **value})
    except ValueError as error:
        raise UsageError(Fault(f"cannot be written as JSON: {error}", "spec.hyperparams")) from None


def load(text: str, where: str = "job.json") -> JobSpec:
    """The JobSpec in `text`. Raises UsageError with every unknown key, missing key and wrong value."""
    try:
        value = json.loads(
            text, object_pairs_hook=_single_keys, parse_float=_finite, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise UsageError(Fault("not JSON: nested too deeply", where)) from None
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
    found: list[str] = []
    job = _build(JobSpec, value, "", found)
    if not found and job.spec.resources.scheduler == "slurm" and job.spec.slurm is None:
        found.append("missing key spec.slurm: spec.resources.scheduler is slurm")
    if found:
        raise UsageError(*(Fault(what, where) for what in found))
    return typing.cast(JobSpec, job)


def read(path: Path) -> JobSpec:
    """The JobSpec in a file. Raises OSError, UsageError."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(Fault(f"not UTF-8: {error.reason} at byte {error.start}", str(path))) from None
    return load(text, str(path))


def _build(kind: Any, value: Any, key: str, found: list[str]) -> Any:
    """`value` as `kind`, a dataclass or one of the few typing forms used above; what is wrong goes to `found`."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(typing.cast(type[Any], kind), value, key, found)
    if kind is Any:
        return value
    if origin is Annotated:
        inner, rule = typing.get_args(kind)
        before = len(found)
        built = _build(inner, value, key, found)
        if value is not None and len(found) == before:
            found.extend(_broken(rule, value, key))
        return built
    if origin is Union:  # Optional[X]
        return None if value is None else _build(typing.get_args(kind)[0], value, key, found)
    if origin is list and isinstance(value, list):
        item = typing.get_args(kind)[0]
        return [_build(item, v, f"{key}[{i}]", found) for i, v in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        item = typing.get_args(kind)[1]
        return {k: _build(item, v, f"{key}.{k}", found) for k, v in value.items()}
    expected = origin or kind
    fits = isinstance(value, (int, float) if expected is float else expected)
    if not fits or (isinstance(value, bool) and expected is not bool):  # to Python a bool is an int
        found.append(f"{key} is {_word(type(value))}, not {_word(expected)}")
    return value


def _build_dataclass(kind: type[T], value: Any, key: str, found: list[str]) -> Optional[T]:
    if not isinstance(value, dict):
        found.append(f"{key} is {_word(type(value))}, not an object")
        return None
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    prefix = f"{key}." if key else ""
    found.extend(f"unknown key {prefix}{name}" for name in value if name not in fields)
    built: dict[str, Any] = {}
    complete = True
    for name, declared in fields.items():
        if name in value:
            built[name] = _build(hints[name], value[name], prefix + name, found)
        elif declared.default is dataclasses.MISSING and declared.default_factory is dataclasses.MISSING:
            found.append(f"missing key {prefix}{name}")
            complete = False
    return kind(**built) if complete else None


def _broken(rule: Union[OneOf, AtLeast], value: Any, key: str) -> list[str]:
    if isinstance(rule, OneOf):
        return [] if value in rule.words else [f"{key} is {value!r}, not {' or '.join(rule.words)}"]
    return [] if value >= rule.least else [f"{key} is {value}: it is at least {rule.least}"]


def _word(kind: Any) -> str:
    """A type in JSON's own words."""
    words = {str: "a string", bool: "a boolean", int: "an integer", float: "a number"}
    words.update({list: "an array", dict: "an object", type(None): "null"})
    return words[kind]


def _single_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys stand once: of two, a reader would see one and the job would have the other."""
    built = dict(pairs)
    if len(built) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return built


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large for a number")
    return number


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")
