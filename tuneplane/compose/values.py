"""Which rule each key's value has, and which keys must agree. Compose asks for all faults of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from tuneplane.compose.mounts import parse_mount
from tuneplane.compose.paths import is_folder_variable
from tuneplane.compose.rules import (
    Rule,
    absolute_path,
    at_least,
    directive_name,
    environment_name,
    matching,
    mount,
    one_of,
    registry,
    search_path,
    secret_name,
    slurm_dependency,
    slurm_mail_type,
    slurm_memory,
    slurm_time,
    step_option,
    unprintable,
)
from tuneplane.compose.schema import Key, dotted
from tuneplane.compose.tree import BUILT_IN, MISSING, Statement, Tree
from tuneplane.containers import RUNTIMES
from tuneplane.kernel.errors import Fault
from tuneplane.site import Config
from tuneplane.slurmforms import time_s
from tuneplane.spec import SAVE_SIGNALS

_WORD = matching(r"\S+", "one word")
_IMAGE = matching(r".+", "an image")
_METHOD = matching(r"\*|[a-z0-9][a-z0-9._-]*/[a-z0-9][a-z0-9._-]*", "a method (framework/recipe) or *")

VALUES: dict[str, Rule] = {
    "site.name": matching(r".+", "a name"),
    "site.contact": matching(r".+", "whom to ask"),
    "site.capsule_limit_mb": at_least(1),
    "site.image_cache": absolute_path,
    "site.image_scratch": absolute_path,
    "site.run_folder_mode": one_of("0700", "0750"),
    "site.caps.nodes": at_least(1),
    "site.caps.gpus": at_least(1),
    "site.caps.gpus_in_flight": at_least(1),
    "site.caps.walltime": slurm_time,
    "cluster.scheduler": one_of("slurm", "local"),
    "cluster.device": one_of("gpu", "cpu"),
    "cluster.gpus_per_node": at_least(1, 4096),
    "cluster.default_gpus": at_least(1),
    "cluster.max_nodes": at_least(1),
    "cluster.cpus_per_node": at_least(1),
    "cluster.memory_per_node": slurm_memory,
    "cluster.architecture": matching(
        r"[a-z0-9]{1,20}", "an architecture as images have it, like amd64 or arm64"
    ),
    "cluster.storage_root": absolute_path,
    "cluster.scratch": absolute_path,
    "cluster.python": absolute_path,
    "cluster.path": search_path,
    "cluster.heartbeat_s": at_least(0.1, 3600),
    "cluster.stop_grace_s": at_least(0, 3600),
    "cluster.save_s": at_least(0, 65535),
    "cluster.hang_limit_s": at_least(0, 604800),
    "cluster.save_signal": one_of(*filter(None, SAVE_SIGNALS)),
    "cluster.max_restarts": at_least(0, 1000),
    "cluster.restart_way": one_of("requeue", "successor"),
    "cluster.slurm.partition": _WORD,
    "cluster.slurm.account": _WORD,
    "cluster.slurm.qos": _WORD,
    "cluster.slurm.reservation": _WORD,
    "cluster.slurm.constraint": _WORD,
    "cluster.slurm.time": slurm_time,
    "cluster.slurm.nodelist": _WORD,
    "cluster.slurm.exclude": _WORD,
    "cluster.slurm.dependency": slurm_dependency,
    "cluster.slurm.mail_user": _WORD,
    "cluster.slurm.mail_type": slurm_mail_type,
    "cluster.slurm.job_name": matching(r".{1,200}", "1 to 200 characters"),
    "cluster.slurm.gpu_request": one_of("gpus-per-node", "gres", "none"),
    "cluster.slurm.gpu_type": matching(
        r"[A-Za-z0-9][A-Za-z0-9_.-]*", "a type of Slurm's gres.conf, like h200"
    ),
    "cluster.slurm.signal_before_end_s": at_least(1, 65535),  # sbatch(1), --signal
    "cluster.container.runtime": one_of(*RUNTIMES),
    "cluster.container.binary": matching(
        r"|/[^\0]*|[A-Za-z0-9][A-Za-z0-9._+-]*", "a program's name or absolute path"
    ),
}
"""Key → rule of its value; null passes where the type allows it."""

ITEMS: dict[str, Rule] = {
    "site.allowed_registries": registry,
    "site.image_folders": absolute_path,
    "site.insecure_registries": registry,
    "site.image_job": matching(
        r"--?[A-Za-z].*", "an option of srun, value included, like --partition=online"
    ),
    "site.secrets": secret_name,
    "cluster.shared": absolute_path,
    "cluster.mounts": mount,
    "cluster.slurm.modules": matching(r"[A-Za-z0-9][A-Za-z0-9_.+/=@:-]*", "the name of a module"),
    "cluster.slurm.srun_options": step_option,
    "cluster.container.options": matching(r".+", "one argument an item"),
}
"""Key → rule of each item of its list."""

NAMES: dict[str, Rule] = {
    "site.default_images": _METHOD,
    "site.runtime_images": _WORD,
    "site.environment": environment_name,
    "cluster.environment": environment_name,
    "cluster.slurm.extra_directives": directive_name,
}
"""Key → rule of each name of its mapping."""

ENTRIES: dict[str, Rule] = {"site.default_images": _IMAGE, "site.runtime_images": _IMAGE}
"""Key → rule of each value of its mapping."""


def value_faults(tree: Tree) -> dict[Key, list[Fault]]:
    """What is wrong with single values, each by itself."""
    faults: dict[Key, list[Fault]] = {}
    for key, statement in tree.items():
        if statement.value in (None, MISSING):
            continue
        found = [Fault(text, statement.where) for text in _problems(key, statement)]
        if found:
            faults[key] = found
    return faults


def agreement_faults(config: Config, tree: Tree, contact: str, told: Sequence[str]) -> Iterator[Fault]:
    """What is wrong with values together, in a configuration whose values are each right.

    told: what was said about keys already; such a key is not reported as left out.
    """

    def fault(key: str, what: str, remedy: str = "") -> Fault:
        return Fault(f"{key} {what}", tree[tuple(key.split("."))].where, remedy)

    yield from _required(config, tree, told)
    yield from _sizes(config, fault)
    yield from _names(config, fault)
    limit, asked = config.site.caps.walltime, config.cluster.slurm.time
    if limit is not None and asked is not None and _longer(asked, limit):
        yield fault(
            "cluster.slurm.time",
            f"is {asked}: the site allows {limit} a run",
            f"ask for less, or ask {contact}",
        )


_Complain = Callable[..., Fault]


def _required(config: Config, tree: Tree, told: Sequence[str]) -> Iterator[Fault]:
    wanted = ["cluster.scheduler", "cluster.device"]
    if config.cluster.scheduler == "slurm":
        wanted.append("cluster.gpus_per_node")
    for key in wanted:
        if tree[tuple(key.split("."))].where == BUILT_IN and not any(what.startswith(key) for what in told):
            name = config.cluster.name
            yield Fault(f"{key} is set by no file of profile {name}", f"cluster/{name}.yaml", "set it there")


def _sizes(config: Config, fault: _Complain) -> Iterator[Fault]:
    cluster = config.cluster
    most = cluster.gpus_per_node * (cluster.max_nodes or 1)
    if cluster.default_gpus is not None:
        whole_nodes = cluster.default_gpus % cluster.gpus_per_node == 0
        if cluster.default_gpus > cluster.gpus_per_node and not whole_nodes:
            yield fault(
                "cluster.default_gpus",
                f"is {cluster.default_gpus}: neither part of one node of {cluster.gpus_per_node} nor whole nodes",
            )
        elif cluster.default_gpus > most and (cluster.max_nodes or cluster.scheduler == "local"):
            yield fault("cluster.default_gpus", f"is {cluster.default_gpus}: the profile has {most} in all")
    if cluster.scheduler == "local" and (cluster.max_nodes or 1) > 1:
        yield fault("cluster.max_nodes", f"is {cluster.max_nodes}: this machine is one node")
    if cluster.request_memory and cluster.memory_per_node is None and cluster.scheduler == "slurm":
        yield fault("cluster.request_memory", "needs cluster.memory_per_node: how much a node has")
    if cluster.container.runtime == "none" and cluster.container.options:
        yield fault("cluster.container.options", "have no meaning where cluster.container.runtime is none")
    if cluster.container.runtime == "pyxis" and cluster.scheduler != "slurm":
        yield fault(
            "cluster.container.runtime", "is pyxis, a plugin of Slurm: here enroot starts the same images"
        )


def _names(config: Config, fault: _Complain) -> Iterator[Fault]:
    for name in {*config.site.environment, *config.cluster.environment} & set(config.site.secrets):
        yield fault("site.secrets", f"and an environment both set {name}", "keep it in one of them")
    targets: dict[str, str] = {}
    for text in config.cluster.mounts:
        target = parse_mount(text).target.rstrip("/")
        if target in targets:
            yield fault("cluster.mounts", f"mount two things at {target}: {targets[target]} and {text}")
        targets[target] = text
    asked = config.cluster.slurm
    also = {
        "gres": asked.gpu_request == "gres",
        "mem-per-cpu": config.cluster.request_memory,
        "mem-per-gpu": config.cluster.request_memory,
        "cpus-per-gpu": config.cluster.request_cpus and config.cluster.cpus_per_node is not None,
    }
    for name in asked.extra_directives:
        if also.get(name):
            yield fault(
                f"cluster.slurm.extra_directives.{name}",
                "says again what gpu_request, request_memory or request_cpus has TunePlane ask for",
                "keep one of them",
            )


def _longer(asked: str, limit: str) -> bool:
    asked_s, limit_s = time_s(asked), time_s(limit)
    return limit_s is not None and (asked_s is None or asked_s > limit_s)


def _problems(key: Key, statement: Statement) -> Iterator[str]:
    value, name = statement.value, dotted(key)
    above, own = dotted(key[:-1]), key[-1]
    shown = f"{name} is {value!r}:"
    texts: Iterable[str] = value if isinstance(value, list) else [value] if isinstance(value, str) else []
    problem = unprintable([*texts, own])
    if problem is not None:
        yield f"{name} {problem}"
    elif above in NAMES and (problem := NAMES[above](own)) is not None:
        yield f"{name}: {own!r} {problem}"  # without the value: a secret's name is one of the problems
    elif above in ENTRIES and (problem := ENTRIES[above](value)) is not None:
        yield f"{shown} {problem}"
    elif above.endswith("environment") and is_folder_variable(own) and not value.startswith("/"):
        yield f"{shown} must be an absolute path: the folder is mounted"
    elif name in VALUES and (problem := VALUES[name](value)) is not None:
        yield f"{shown} {problem}"
    elif name in ITEMS:
        for item in value:
            if (problem := ITEMS[name](item)) is not None:
                yield f"{name}: {item!r} {problem}"
