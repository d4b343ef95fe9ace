"""The user's `SBATCH_*` variables: read at compose, where they are shown, and scrubbed from the sbatch call.

Names are those of sbatch(1), "input environment variables". Compose calls it for Slurm profiles.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuneplane.compose.tree import Statement

LAYER = "environment"

_SLURM_KEYS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_JOB_NAME": "job_name",
}
_DIRECTIVES = {"SBATCH_WCKEY": "wckey"}
_EXCLUSIVE = "SBATCH_EXCLUSIVE"
_WHOLE_NODES = frozenset({"exclusive", "1", "yes", "true"})
"""Slurm's other values, `user` and `mcs`, share nodes in ways that no key here says."""


def read_slurm_environment(environ: Mapping[str, str]) -> tuple[list[Statement], list[str]]:
    """What the environment says about a submission, and a notice for each variable that has no effect.

    An empty variable says nothing.
    """
    said: list[Statement] = []
    notices: list[str] = []
    for name in sorted(n for n in environ if n.startswith("SBATCH_") and environ[n]):
        value = environ[name]
        if name in _SLURM_KEYS:
            said.append(Statement(("cluster", "slurm", _SLURM_KEYS[name]), value, f"${name}", LAYER))
        elif name in _DIRECTIVES:
            key = ("cluster", "slurm", "extra_directives", _DIRECTIVES[name])
            said.append(Statement(key, value, f"${name}", LAYER))
        elif name == _EXCLUSIVE and value.lower() in _WHOLE_NODES:
            said.append(Statement(("cluster", "slurm", "exclusive"), True, f"${name}", LAYER))
        else:
            notices.append(
                f"${name}={value!r} in your environment has no effect: TunePlane does not pass it to sbatch"
            )
    return said, notices
