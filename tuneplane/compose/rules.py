"""What a single value may be, beyond its type: one small rule a form. `values.py` says which key has which.

A rule takes a value and gives what is wrong with it, or None. Sources: sbatch(1), srun(1), the contract.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from tuneplane.compose.mounts import parse_mount
from tuneplane.images.reference import parse_registry
from tuneplane.kernel.env import HARDWARE_BRIDGE, MONITOR_INTERVAL, RESERVED
from tuneplane.kernel.errors import UsageError
from tuneplane.kernel.secret_names import is_secret_name
from tuneplane.slurmforms import MEMORY_FORMS, TIME_FORMS, memory_mib, time_s

Rule = Callable[[Any], "str | None"]

_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTIONAL_TUNEPLANE = re.compile(r"TUNEPLANE_JOB_(JUDGE|SANDBOX)_[A-Za-z0-9_]+")
_SLURMS_OWN = re.compile(
    r"(SLURM|SLURMD|SBATCH|SALLOC|SRUN|APPTAINER|APPTAINERENV|SINGULARITY|SINGULARITYENV)_.*"
)

_MAIL_TYPES = frozenset(
    (
        *("NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT", "ARRAY_TASKS"),
        *("TIME_LIMIT", "TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50"),
    )
)
_DEPENDENCY = re.compile(
    r"singleton|expand:[0-9]+"
    r"|after(any|burstbuffer|corr|notok|ok)?(:[0-9]+(_([0-9]+|\*))?(\+[0-9]+)?)+"
)

_OF_TUNEPLANE = "TunePlane sets it"
OWN_DIRECTIVES = {
    **dict.fromkeys(
        (
            *("output", "error", "input", "open-mode", "chdir", "export", "export-file", "get-user-env"),
            *("array", "signal", "wrap", "uid", "gid"),
            *("parsable", "test-only", "wait", "help", "usage", "version", "quiet", "verbose"),
        ),
        _OF_TUNEPLANE,
    ),
    **dict.fromkeys(
        ("nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-core", "ntasks-per-socket"),
        "the profile's size and --nodes decide it",
    ),
    **dict.fromkeys(
        ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"),
        "cluster.slurm.gpu_request and the profile's size decide it",
    ),
    **dict.fromkeys(("cpus-per-task", "mincpus"), "cluster.cpus_per_node and request_cpus decide it"),
    "mem": "cluster.memory_per_node and request_memory decide it",
    **{
        name.replace("_", "-"): f"it has a key of its own, cluster.slurm.{name}"
        for name in (
            *("partition", "account", "qos", "reservation", "constraint", "time", "nodelist", "exclude"),
            *("dependency", "mail_user", "mail_type", "job_name", "exclusive"),
        )
    },
    **dict.fromkeys(("clusters", "cluster"), "runs are followed on one cluster, that of this machine"),
    **dict.fromkeys(("container", "container-id"), "cluster.container decides it"),
    "hetjob": "this version's recipes have no roles",
}
"""Directives of sbatch(1) that `extra_directives` may not say, and who does."""

OWN_STEP_OPTIONS = frozenset(
    (
        *("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--output", "-o", "--error", "-e"),
        *("--input", "-i", "--export", "--chdir", "-D", "--label", "-l", "--wait", "-W", "--jobid"),
        *("--kill-on-bad-exit", "-K", "--signal", "--multi-prog", "--pty", "--overlap"),
    )
)
"""Options of srun(1) that the script sets itself."""


def one_of(*choices: str) -> Rule:
    """Exactly one of these."""
    return lambda value: None if value in choices else f"must be {' or '.join(choices)}"


def at_least(least: float, most: float = math.inf) -> Rule:
    """A finite number between two bounds, both included."""

    def rule(value: float) -> str | None:
        if math.isfinite(value) and least <= value <= most:
            return None
        return (
            f"must be at least {least:g}" if most == math.inf else f"must be between {least:g} and {most:g}"
        )

    return rule


def matching(pattern: str, words: str) -> Rule:
    """Text of one form."""
    compiled = re.compile(pattern)
    return lambda value: None if compiled.fullmatch(value) else f"must be {words}"


def absolute_path(value: str) -> str | None:
    """A path that means the same folder everywhere."""
    if not value.startswith("/"):
        return "must be an absolute path"
    return "must not hold '..': write the path out" if ".." in value.split("/") else None


def search_path(value: str) -> str | None:
    """Folders in the form of PATH."""
    if all(part.startswith("/") for part in value.split(":")):
        return None
    return "must be absolute paths with a colon between them"


def slurm_time(value: str) -> str | None:
    """A time in one of Slurm's forms."""
    try:
        time_s(value)
    except ValueError:
        return f"must be a time in one of Slurm's forms: {TIME_FORMS}"
    return None


def slurm_memory(value: str) -> str | None:
    """A size of memory in Slurm's form, more than nothing (to sbatch 0 means all of a node)."""
    try:
        return None if memory_mib(value) > 0 else "must be what a node has, not 0"
    except ValueError:
        return f"must be a size of memory: {MEMORY_FORMS}"


def slurm_dependency(value: str) -> str | None:
    """A list of dependencies, all (`,`) or any (`?`) of which are waited for."""
    if "," in value and "?" in value:
        return "must not mix ',' (all) and '?' (any)"
    if all(_DEPENDENCY.fullmatch(part) for part in re.split(r"[,?]", value)):
        return None
    return "must be like afterok:1234 or singleton, with ',' between several"


def slurm_mail_type(value: str) -> str | None:
    """Events of Slurm that send mail."""
    unknown = [part for part in value.split(",") if part.upper() not in _MAIL_TYPES]
    return (
        f"holds {', '.join(unknown) or 'nothing'}, not one of {', '.join(sorted(_MAIL_TYPES))}"
        if unknown
        else None
    )


def directive_name(value: str) -> str | None:
    """A directive of sbatch that has no other place."""
    if re.fullmatch(r"[a-z][a-z0-9-]*", value) is None:
        return "must be the long name of an sbatch option without its dashes"
    if value in OWN_DIRECTIVES:
        return f"must not be said here: {OWN_DIRECTIVES[value]}"
    return None


def step_option(value: str) -> str | None:
    """An option of srun that the script does not set itself."""
    name = value.partition("=")[0]
    if not value.startswith("-") or name.strip("-") == "":
        return "must be an option of srun, value included, like --mpi=none"
    if name in OWN_STEP_OPTIONS or (not name.startswith("--") and name[:2] in OWN_STEP_OPTIONS):
        return f"must not hold {name}: TunePlane sets it"
    return None


def environment_name(value: str) -> str | None:
    """A variable that a configuration may set for every job."""
    problem = _plain_environment_name(value)
    if problem is None and is_secret_name(value):
        return (
            "must not be a secret's: list the name in site.secrets, and its value comes from the user's shell"
        )
    return problem


def secret_name(value: str) -> str | None:
    """A variable that may be taken from the submitting shell."""
    if value in ("PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV") or value.startswith("CONDA_"):
        return "never reaches a job from the submitting shell"
    return _plain_environment_name(value)


def registry(value: str) -> str | None:
    """`host[:port]`, to be compared character by character."""
    try:
        parse_registry(value)
    except UsageError as error:
        what = error.faults[0].what.partition(": ")[2]
        return f"is no registry: {what}"
    return None


def mount(value: str) -> str | None:
    """`SRC:DST[:ro]`."""
    try:
        parse_mount(value)
    except ValueError as error:
        return str(error)
    return None


def unprintable(texts: Iterable[str]) -> str | None:
    """What no value may hold, since it may stand on a line of the batch script: another line, a control
    character, bytes that are no text."""
    for text in texts:
        for character in text:
            code = ord(character)
            if code < 0x20 or 0x7F <= code < 0xA0 or character in "\u2028\u2029":
                return f"holds a line break or control character ({character!r})"
            if 0xD800 <= code < 0xE000:
                return "holds bytes that are not UTF-8"
    return None


def _plain_environment_name(value: str) -> str | None:
    if _ENVIRONMENT_NAME.fullmatch(value) is None:
        return "must be a name of letters, digits and underscores"
    if value == "PATH":
        return "is set by cluster.path"
    free = value in (MONITOR_INTERVAL, HARDWARE_BRIDGE) or _OPTIONAL_TUNEPLANE.fullmatch(value)
    if value in RESERVED or (value.startswith("TUNEPLANE_") and not free) or _SLURMS_OWN.fullmatch(value):
        return "is TunePlane's or Slurm's own to set"
    return None
