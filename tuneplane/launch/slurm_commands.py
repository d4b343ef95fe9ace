"""Slurm's own commands: run with a scrubbed environment, read in their stable text forms.

Imports nothing heavy: `tp job ls` lives on this.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tuneplane.kernel.errors import Fault, OperationError

KEPT_SLURM_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER")
"""All other SLURM_* and SBATCH_* are scrubbed from calls: they would change what was reviewed."""

SCRUBBED = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SCANCEL_")

IDS_A_CALL = 500
"""How many job ids one sacct call is asked for: each is a search in a database."""

IDS_A_LOOK = 5000
"""How many job ids one squeue call is asked for: about 60 kB, and one argument may have 128 (execve(2))."""

ESTIMATE = re.compile(
    r"^Job \d+ to start at (\S+) using \d+ processors on nodes (\S+)(?: in partition (\S+))?$"
)
"""What sbatch --test-only prints where it accepts a script. The id is of no job. Source: sbatch.c."""

ANSWER_S = 60.0
"""How long a Slurm command may take. A busy controller answers within its MessageTimeout, 10 s by default."""

FINAL = frozenset(
    (
        *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"),
        *("BOOT_FAIL", "DEADLINE", "REVOKED"),
    )
)
"""Slurm's states that a job does not leave by itself. Source: squeue(1), JOB STATE CODES."""


@dataclass(frozen=True)
class SlurmJob:
    """One job as Slurm tells it."""

    job_id: str
    state: str  # PENDING, RUNNING, COMPLETED, … without suffixes
    reason: str = ""
    code: int | None = None
    nodes: str = ""
    folder: str = ""  # its working folder; empty where Slurm did not say


@dataclass(frozen=True)
class Answer:
    """What Slurm knows of the jobs that it was asked for; unknown ones are left out.

    refused: its own words where it did not answer: then a job that is not there may be there all the same.
    """

    jobs: dict[str, SlurmJob] = field(default_factory=dict)
    refused: str = ""

    def job_of(self, run_folder: Path, job_id: str) -> SlurmJob | None:
        """What is known of a run's job. An id alone is no identity: another cluster, or a controller that was
        set up anew, counts from 1 again; but the script of a run says in which folder it works.
        """
        known = self.jobs.get(job_id)
        # An element of an array works in the folder of its array, and only its own claim or tp noted it here.
        if known is None or not known.folder or "_" in job_id:
            return known
        same = os.path.realpath(known.folder) == os.path.realpath(run_folder)
        return known if same else None


FOLDER_MARK = "\x1f"
"""Before the folder in a line of squeue: neither a reason nor a folder holds it."""


QUEUE_FORMAT = f"--format=%i|%T|%N|%r{FOLDER_MARK}%Z"


def slurm_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for Slurm's commands: the caller's, without what would change the request."""
    source = os.environ if environ is None else environ
    return {n: v for n, v in source.items() if n in KEPT_SLURM_VARIABLES or not n.startswith(SCRUBBED)}


def run_slurm(argv: Sequence[str], timeout_s: float = ANSWER_S) -> str:
    """Standard output of a Slurm command. Raises OperationError with its own words when it fails."""
    result = _call(argv, timeout_s)
    if result.returncode != 0:
        words = result.stderr.strip() or result.stdout.strip() or f"exit code {result.returncode}"
        told = " ".join(line.removeprefix(f"{argv[0]}: ") for line in words.splitlines())
        raise OperationError(Fault(f"{argv[0]} refused: {told}", "Slurm"))
    return result.stdout


def submit_script(script: Path, *options: str) -> str:
    """Call `sbatch` on a rendered script; the job's id. Raises OperationError with Slurm's own words."""
    said = run_slurm(["sbatch", *options, str(script)])
    found = re.search(r"Submitted batch job (\d+)", said)
    if found is None:
        raise OperationError(Fault(f"sbatch answered without a job id: {said.strip()!r}", "Slurm"))
    return found.group(1)


def estimate_start(script: Path) -> str:
    """When and where a script would start, or why it would be refused."""
    said = test_only(script)
    found = ESTIMATE.search(said)
    if found is None:
        return said
    start, nodes, partition = found.groups()
    return f"{start.replace('T', ' ')} on {nodes}" + (f", partition {partition}" if partition else "")


def test_only(script: Path) -> str:
    """What `sbatch --test-only` says of a script, on one line. Never raises."""
    try:
        result = _call(["sbatch", "--test-only", str(script)], timeout_s=30)
    except OperationError as error:
        return f"no estimate: {error.faults[0].what}"
    return " ".join((result.stderr + result.stdout).replace("sbatch: ", "").split())


def require_sbatch(environ: Mapping[str, str]) -> None:
    """Raise OperationError where this machine could hand nothing to Slurm."""
    if shutil.which("sbatch", path=environ.get("PATH", os.defpath)) is None:
        raise OperationError(_not_here("sbatch"))


def _not_here(program: str) -> Fault:
    remedy = "run tp on a login node of the cluster, or use --profile local"
    return Fault(f"{program} is not on this machine's PATH", remedy=remedy)


def query_queue(job_ids: Sequence[str]) -> Answer:
    """Jobs that squeue knows: waiting, running, and ended within MinJobAge. Never raises.

    Slurm 22.05 passes over unknown ids among several, and fails for a single one ("Invalid job id").
    """
    jobs: dict[str, SlurmJob] = {}
    for chunk in _chunks(job_ids, IDS_A_LOOK):
        argv = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(chunk)}"]
        try:
            # --all: in partitions that are hidden, or closed to the user's group by now, too
            said = run_slurm([*argv, "--all", QUEUE_FORMAT])
        except OperationError as error:
            if "Invalid job id" in str(error):
                continue
            return Answer(jobs, error.faults[0].what)
        jobs.update(parse_squeue(said))
    return Answer(jobs)


def query_own() -> Answer:
    """Every job of this user that squeue knows, ended ones too. Never raises."""
    argv = [
        "squeue",
        f"--user={os.geteuid()}",
        "--all",
        "--noheader",
        "--array",
        "--states=all",
        QUEUE_FORMAT,
    ]
    try:
        return Answer(parse_squeue(run_slurm(argv)))
    except OperationError as error:
        return Answer(refused=error.faults[0].what)


def query_accounting(job_ids: Sequence[str]) -> Answer:
    """Jobs that sacct knows. Never raises; a site without accounting has an empty answer, not a refusal."""
    jobs: dict[str, SlurmJob] = {}
    for chunk in _chunks(job_ids, IDS_A_CALL):
        argv = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(chunk)}"]
        try:
            said = run_slurm([*argv, "--format=JobID,State,ExitCode,NodeList,Reason,WorkDir"], timeout_s=20)
        except OperationError as error:
            told = error.faults[0].what
            off = "accounting storage is disabled" in told or "is not on this machine" in told
            return Answer(jobs, "" if off else told)
        jobs.update(parse_sacct(said))
    return Answer(jobs)


def parse_squeue(said: str) -> dict[str, SlurmJob]:
    """Lines of `id|state|nodes|reason`, then the job's folder behind `FOLDER_MARK`.

    A job that has ended keeps the reason for which it last waited.
    """
    found = {}
    for told in said.split("\n"):
        line, _, folder = told.partition(FOLDER_MARK)
        if line.count("|") < 3:
            continue
        job_id, state, nodes, reason = (part.strip() for part in line.split("|", 3))
        stale = reason == "None" or state == "CANCELLED"
        found[job_id] = SlurmJob(job_id, state, "" if stale else reason, None, nodes, folder)
    return found


def parse_sacct(said: str) -> dict[str, SlurmJob]:
    """Lines of `id|state|exit code|nodes|reason|folder`: `7|CANCELLED by 1001|0:15|n1|None|/home/a/runs/…`."""
    found = {}
    for line in said.splitlines():
        if line.count("|") < 4:
            continue
        job_id, state, code, nodes, reason, *folder = (part.strip() for part in line.split("|", 5))
        word, _, by = state.partition(" by ")
        told = "" if reason == "None" else reason
        nodes = "" if nodes == "None assigned" else nodes
        why = f"by {_user(by)}" if by else told
        found[job_id] = SlurmJob(job_id, word, why, parse_code(code), nodes, "".join(folder))
    return found


FAILED_TO_START = 53
"""The signal with which slurmd says that it could not start the script or open its output: no process got it."""

OUT_OF_MEMORY = 125
"""The signal with which Slurm says that the kernel killed for memory, which is by SIGKILL."""


def parse_code(text: str) -> int | None:
    """A shell's exit code of sacct's `code:signal`: 3 for `3:0`, 137 for `0:9`. None for anything else."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text, re.ASCII)
    if found is None:
        return None
    code, number = int(found[1]), int(found[2] or 0)
    if code or not number:
        return code
    if number == FAILED_TO_START:
        return FAILED_TO_START
    return 128 + (signal.SIGKILL if number == OUT_OF_MEMORY else number)


def _call(argv: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            list(argv),
            env=slurm_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise OperationError(_not_here(argv[0])) from None
    except subprocess.TimeoutExpired:
        doubt = ", and may have queued the job all the same" if argv[0] == "sbatch" else ""
        remedy = "look with: squeue --me" if doubt else "try again when Slurm's controller answers"
        what = f"{argv[0]} did not answer within {timeout_s:g} s{doubt}"
        raise OperationError(Fault(what, "Slurm", remedy)) from None
    except OSError as error:
        raise OperationError(Fault(f"{argv[0]} cannot be run: {error.strerror}", "Slurm")) from None


def _user(text: str) -> str:
    """A user id by its name, where this machine knows it."""
    import pwd

    try:
        return pwd.getpwuid(int(text)).pw_name
    except (KeyError, ValueError, OverflowError):
        return text


def _chunks(items: Sequence[str], most: int) -> list[Sequence[str]]:
    return [items[i : i + most] for i in range(0, len(items), most)]
