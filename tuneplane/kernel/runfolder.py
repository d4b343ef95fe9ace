"""The run folder: the one place where login side and node side meet.

Names only, and who writes what.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]*-\d{8}-\d{6}-[0-9a-z]{4}", re.ASCII)
_ATTEMPT = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class AttemptFolder:
    """`attempts/<n>/`: one start of the run, claimed by an exclusive mkdir in the batch script."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def start(self) -> Path:
        """Written once by the batch script's claim: Slurm id, host, head address, port, time."""
        return self.path / "start.json"

    @property
    def end(self) -> Path:
        """Written once by the batch script when every node has ended: exit code and time."""
        return self.path / "end.json"

    @property
    def params(self) -> Path:
        """`spec.hyperparams`, flat, written at the claim: `TUNEPLANE_PARAMS_FILE`."""
        return self.path / "params.json"

    @property
    def stop_marker(self) -> Path:
        """Appears when the run is asked to save and end: `TUNEPLANE_STOP_FILE`."""
        return self.path / "stop"

    @property
    def fence(self) -> Path:
        """Made once, by the node that found others silent: which, and since when."""
        return self.path / "fence.json"

    @property
    def hang(self) -> Path:
        """Made once, by node 0's agent, where nothing was printed or reported for as long as the limit says."""
        return self.path / "hang.json"

    @property
    def restart(self) -> Path:
        """The intent to start the run again, made once, before anything is done about it."""
        return self.path / "restart.json"

    @property
    def restarted(self) -> Path:
        """How that intent was carried out."""
        return self.path / "restarted.json"

    @property
    def restart_error(self) -> Path:
        """Slurm's words where it could not be carried out."""
        return self.path / "restart-error.txt"

    def node_log(self, rank: int) -> Path:
        """What the user's program printed on that node."""
        return self.path / f"node-{rank}.log"

    def node_record(self, rank: int) -> Path:
        """State and exit record of a node, replaced by rename by its agent."""
        return self.path / f"node-{rank}.json"

    def node_beat(self, rank: int) -> Path:
        """Heartbeat of a node, written in place by its agent."""
        return self.path / f"node-{rank}.beat"


def noted_jobs(path: Path) -> frozenset[str]:
    """The job ids that a note like `stopped` or `paused` names, one a line; none where it cannot be read."""
    try:
        return frozenset(path.read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return frozenset()


def is_hardware_file(name: str) -> bool:
    """Whether an ingest file is a hardware sampler's: it goes on while the training itself says nothing."""
    fields = name.split("-")  # the host's own hyphens are underscores there
    return len(fields) > 2 and fields[2].startswith("hardware")


@dataclass(frozen=True)
class RunFolder:
    """`<storage root>/runs/<user>/<experiment>/<run_id>/`, mode 0700."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def job(self) -> Path:
        """The JobSpec, 0444."""
        return self.path / "job.json"

    @property
    def script(self) -> Path:
        """The batch script, 0444; the same text whether `tp` or a hand starts it (`bash` runs a local one)."""
        return self.path / "job.sbatch"

    @property
    def capsule(self) -> Path:
        """The lab's files and the kernel, 0444."""
        return self.path / "capsule.tar"

    @property
    def kernel(self) -> Path:
        """The kernel as a zip application, 0444: what the batch script starts on each node."""
        return self.path / "kernel.pyz"

    @property
    def secrets(self) -> Path:
        """Secrets and the run's token, 0600, removed when the run has ended for good."""
        return self.path / "secrets.env"

    @property
    def sums(self) -> Path:
        """`sha256sum --check` form of job.json and kernel.pyz, 0444: what was reviewed is what runs."""
        return self.path / "SHA256SUMS"

    @property
    def canary(self) -> Path:
        """Written at submit, looked for at the job's start: is the shared storage really shared?"""
        return self.path / "ingest" / ".canary"

    @property
    def ingest(self) -> Path:
        """Points, `<attempt>-<host>-<rank>-<pid>-….jsonl`, one writer a file: `TUNEPLANE_JOB_ENDPOINT`. A hardware
        sampler's have `hardware<node>` in the rank's place."""
        return self.path / "ingest"

    @property
    def out(self) -> Path:
        """`TUNEPLANE_OUT_DIR`."""
        return self.path / "out"

    @property
    def slurm(self) -> Path:
        """Slurm's own output, `<slurm id>.out`."""
        return self.path / "slurm"

    @property
    def submissions(self) -> Path:
        """`<slurm id>.json`: which jobs belong to this run, created by whoever knew first."""
        return self.path / "submissions"

    @property
    def submit_error(self) -> Path:
        """Slurm's own words where `sbatch` refused the script: the run was never submitted."""
        return self.path / "submit-error.txt"

    @property
    def stopped(self) -> Path:
        """Written by `tp job stop` before it asks Slurm: a line for each job that it ends."""
        return self.path / "stopped"

    @property
    def paused(self) -> Path:
        """Written by `tp job pause` before it asks Slurm: a line for each job that it holds or ends. A later start
        by `tp` removes it."""
        return self.path / "paused"

    @property
    def not_run(self) -> Path:
        """Of an operation: why it ended without an attempt, and which job found so. Written as that claims."""
        return self.path / "not-run.json"

    @property
    def handed_on(self) -> Path:
        """Of an operation whose run goes on: the job that found so, and the one that waits in its place."""
        return self.path / "handed-on.json"

    @property
    def attempts_folder(self) -> Path:
        return self.path / "attempts"

    def attempt(self, number: int) -> AttemptFolder:
        return AttemptFolder(self.attempts_folder / str(number))

    def attempts(self) -> list[AttemptFolder]:
        """Every claimed attempt, oldest first. Raises OSError where the folder cannot be read."""
        try:
            names = [p for p in self.attempts_folder.iterdir() if _ATTEMPT.fullmatch(p.name)]
        except FileNotFoundError:
            return []
        return [AttemptFolder(p) for p in sorted(names, key=lambda p: int(p.name))]
