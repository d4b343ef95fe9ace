"""What Slurm lets this user have at once: limits of the partition, of the user's accounts and of their QOS.

Told and not judged: `sbatch --test-only` judges (`cluster.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from tuneplane.discover.slurm import Site
from tuneplane.doctor.check import OK, Check
from tuneplane.kernel.errors import TunePlaneError
from tuneplane.launch.slurm_commands import run_slurm

ANSWER_S = 20.0

ASSOCIATION = {
    "MaxJobs": "{} jobs at once",
    "MaxSubmitJobs": "{} jobs in the queue",
    "MaxWall": "{} for a job",
    "MaxTRES": "{} a job",
    "GrpTRES": "{} for all its jobs together",
}
"""Fields of sacctmgr(1), LIST/SHOW ASSOCIATION FORMAT OPTIONS, and what each limits."""

QOS = {
    "MaxWall": "{} for a job",
    "MaxJobsPU": "{} jobs of a user at once",
    "MaxTRESPU": "{} of a user at once",
    "MaxTRES": "{} a job",
    "GrpTRES": "{} for all its jobs together",
}
"""Fields of sacctmgr(1), LIST/SHOW QOS FORMAT OPTIONS."""


def look_at_limits(site: Site, user: str, partition: str | None) -> list[Check]:
    """One line: what is limited, and by whom. Nothing where Slurm says nothing."""
    told = [_partition(site, partition)]
    accounts = ",".join(dict.fromkeys(a.account for a in site.associations))
    qos = ",".join(dict.fromkeys(q for a in site.associations for q in a.qos))
    if accounts:
        told += read_limits(["assoc", f"account={accounts}", "user="], "account", "Account", ASSOCIATION)
        told += read_limits(["assoc", f"user={user}"], "you in account", "Account", ASSOCIATION)
    if qos:
        told += read_limits(["qos", "where", f"name={qos}"], "QOS", "Name", QOS)
    said = [text for text in told if text]
    return [Check("limits", OK, "; ".join(said) if said else "none that Slurm tells")]


def _partition(site: Site, name: str | None) -> str:
    found = next((p for p in site.partitions if (p.name == name if name else p.is_default)), None)
    if found is None:
        return ""
    longest = found.settings.get("MaxTime", "")
    nodes = found.settings.get("MaxNodes", "UNLIMITED")
    told = [f"{longest} a job"] if longest not in ("", "UNLIMITED") else []
    told += [f"{nodes} nodes a job"] if nodes.isdecimal() else []
    return f"partition {found.name}: {', '.join(told)}" if told else ""


def read_limits(
    what: list[str],
    kind: str,
    name: str,
    fields: dict[str, str],
    run: Callable[[list[str]], str] | None = None,
) -> list[str]:
    """Limits of accounts or QOS, a phrase for each that has any; none where sacctmgr does not answer.

    what: the words after `sacctmgr show`. fields: what to ask for, and how to say it.
    """
    argv = ["sacctmgr", "--noheader", "--parsable2", "--readonly", "show", *what]
    argv.append(f"format={','.join([name, *fields])}")
    try:
        said = run(argv) if run else run_slurm(argv, timeout_s=ANSWER_S)
    except TunePlaneError:
        return []
    found = []
    for line in said.splitlines():
        row = line.split("|")
        pairs = zip(row[1:], fields.values(), strict=False)
        limits = [meaning.format(value) for value, meaning in pairs if value]
        if limits:
            found.append(f"{kind} {row[0]}: {', '.join(limits)}")
    return list(dict.fromkeys(found))
