"""A job's environment as the contract's table has it, with what is a run's own taken out, to compare two runs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tuneplane.kernel import env

SAME_EVERYWHERE = frozenset((env.ALWAYS, env.INGEST, env.URL, env.SITE, env.SLURM, env.GPU))
"""Not PATH: in a container it is the image's."""

_OF_THE_TABLE = [
    re.compile(re.escape(variable.name).replace(r"\*", ".*"))
    for variable in env.VARIABLES
    if variable.when in SAME_EVERYWHERE
]


def table(values: Mapping[str, str]) -> dict[str, str]:
    """The variables of C9 and C10, byte for byte but for paths and for what differs from run to run."""
    own = {
        values[env.WORK_DIR]: "WORK",
        values[env.OUT_DIR].removesuffix("/out"): "RUN",
        values[env.NRL_RUN_ID]: "RUN_ID",
    }
    found = {
        name: _without(value, own)
        for name, value in values.items()
        if any(pattern.fullmatch(name) for pattern in _OF_THE_TABLE)
    }
    for name in ("HOME", "TMPDIR"):
        assert found[name].startswith("/")
    of_a_run = (env.TOKEN, env.MAIN_PROCESS_PORT, "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "HOME", "TMPDIR")
    return {name: "of this run" if name in of_a_run else value for name, value in found.items()}


def _without(value: str, own: Mapping[str, str]) -> str:
    for text in sorted(own, key=len, reverse=True):
        if value == text or value.startswith(f"{text}/") or f"//{text}" in value:
            return value.replace(text, own[text], 1)
    return value
