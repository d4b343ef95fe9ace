"""Slurm's own commands: run with a scrubbed environment, read in their stable text forms.

Imports nothing heavy: `tp job ls` lives on this.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tuneplane.kernel.errors import Fault, OperationError

KEPT_SLURM_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER")
"""All other SLURM_* and SBATCH_* are scrubbed from calls: they would change what was reviewed."""

IDS_A_CALL = 500
"""How many job ids one squeue or sacct call is asked for: far below the limit of an argument list."""


@dataclass(frozen=True)
class SlurmJob:
    """One job as Slurm tells it."""

    job_id: str
    state: str  # PENDING, RUNNING, COMPLETED, … without suffixes
    reason: str = ""
    code: int | None = None
    nodes: str = ""


def slurm_environment(environ: dict[str, str] | None = None) -> dict[str, str]:
    """The environment for Slurm's commands: the caller's, without what would change the request."""
    source = dict(os.environ) if environ is None else environ
    scrubbed = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SCANCEL_")
    return {
        name: value
        for name, value in source.items()
        if name in KEPT_SLURM_VARIABLES or not name.startswith(scrubbed)
    }


def run_slurm(argv: list[str], timeout_s: float = 60) -> str:
    """Standard output of a Slurm command. Raises OperationError with its own words when it fails."""
    try:
        result = subprocess.run(
            argv, env=slurm_environment(), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise OperationError(
            Fault(
                f"{argv[0]} is not on this machine's PATH",
                remedy="run tp on a login node of the cluster, or use --profile local",
            )
        ) from None
    except subprocess.TimeoutExpired:
        raise OperationError(Fault(f"{argv[0]} did not answer within {timeout_s:.0f} s", "Slurm")) from None
    if result.returncode != 0:
        words = (result.stderr.strip() or result.stdout.strip()).replace(f"{argv[0]}: ", "")
        raise OperationError(Fault(f"{argv[0]} refused: {words}", "Slurm"))
    return result.stdout


def submit_script(script: Path) -> str:
    """Call `sbatch` on a rendered script; the job's id. Raises OperationError with Slurm's own words."""
    said = run_slurm(["sbatch", str(script)])
    found = re.search(r"Submitted batch job (\d+)", said)
    if found is None:
        raise OperationError(Fault(f"sbatch answered without a job id: {said.strip()!r}", "Slurm"))
    return found.group(1)


def estimate_start(script: Path) -> str:
    """What `sbatch --test-only` says of a script: when it would start, or why it would be refused."""
    try:
        result = subprocess.run(
            ["sbatch", "--test-only", str(script)],
            env=slurm_environment(),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no estimate: {error}"
    return " ".join((result.stderr + result.stdout).replace("sbatch: ", "").split())


def query_jobs(job_ids: list[str], *, ask_accounting: bool = True) -> dict[str, SlurmJob]:
    """What Slurm knows of jobs: squeue first, sacct for those it forgot. Unknown ones are left out.

    Never raises: where Slurm does not answer, our own records must do.
    """
    found: dict[str, SlurmJob] = {}
    for chunk in _chunks(job_ids):
        found.update(_squeue(chunk))
    forgotten = [job_id for job_id in job_ids if job_id not in found]
    if forgotten and ask_accounting:
        for chunk in _chunks(forgotten):
            found.update(_sacct(chunk))
    return found


def _squeue(job_ids: list[str]) -> dict[str, SlurmJob]:
    # An unknown id among many fails the whole call in no version tried; a single unknown one does.
    form = "--format=%i|%T|%r|%N"
    try:
        said = run_slurm(["squeue", "--noheader", "--states=all", f"--jobs={','.join(job_ids)}", form])
    except OperationError:
        return {}
    found = {}
    for line in said.splitlines():
        job_id, state, reason, nodes = (*line.split("|"), "", "", "", "")[:4]
        found[job_id] = SlurmJob(job_id, state, "" if reason == "None" else reason, None, nodes)
    return found


def _sacct(job_ids: list[str]) -> dict[str, SlurmJob]:
    argv = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(job_ids)}"]
    try:
        said = run_slurm([*argv, "--format=JobID,State,ExitCode,Reason,NodeList"], timeout_s=20)
    except OperationError:
        return {}
    found = {}
    for line in said.splitlines():
        job_id, state, code, reason, nodes = (*line.split("|"), "", "", "", "", "")[:5]
        # "CANCELLED by 1001", "COMPLETED", "0:53": exit code and signal
        word = state.split(" ")[0]
        exit_code, _, signal = code.partition(":")
        number = int(exit_code) if exit_code.isdigit() else None
        if number == 0 and signal.isdigit() and int(signal):
            number = 128 + int(signal)
        told = "" if reason in ("None", "") else reason
        found[job_id] = SlurmJob(job_id, word, told or (state if " by " in state else ""), number, nodes)
    return found


def _chunks(items: list[str]) -> list[list[str]]:
    return [items[i : i + IDS_A_CALL] for i in range(0, len(items), IDS_A_CALL)]
