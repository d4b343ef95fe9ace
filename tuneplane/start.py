"""Handing a prepared run over: its first start and every later one, by one path with one set of checks.

What was rendered is verified, the site's cap asked, the secrets written; what Slurm refuses leaves no trace
but its own words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuneplane.compose import compose
from tuneplane.kernel import env
from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.kernel.files import write_atomic
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import read_submissions, record_submission
from tuneplane.launch.inflight import check_in_flight
from tuneplane.launch.local import start_local
from tuneplane.launch.slurm_commands import estimate_start, run_slurm, submit_script
from tuneplane.node.environment import render_secrets
from tuneplane.runs.adopt import note_unknown_jobs
from tuneplane.runs.folder import check_own
from tuneplane.runs.index import state_folder
from tuneplane.runs.state import read_state
from tuneplane.runs.token import known_token
from tuneplane.site import Site
from tuneplane.spec import JobSpec, Resources, read
from tuneplane.verify import check_prepared


@dataclass(frozen=True)
class Submitted:
    """What became of a run that was handed over."""

    run: RunFolder
    job_id: str
    estimate: str = ""


def start_prepared(run: RunFolder, environ: Mapping[str, str]) -> Submitted:
    """`tp submit --run`: the first start of a run that `tp render` prepared."""
    check_own(run)
    note_unknown_jobs([run])
    if read_submissions(run):
        raise UsageError(
            Fault(
                f"{run.run_id} was submitted already",
                "--run",
                f"tp job status {run.run_id}; tp job retry {run.run_id} starts it again once it has ended",
            )
        )
    check_prepared(run)
    job = read(run.job)
    check_room(job.spec.resources, _site(environ))
    return hand_over(run, job)


def retry(run: RunFolder, environ: Mapping[str, str]) -> Submitted:
    """`tp job retry`: start an ended run again as its next attempt; secrets written anew, the same script."""
    check_own(run)
    state = read_state(run)
    if not state.is_final and state.state != "PREPARED":
        raise UsageError(Fault(f"{run.run_id} is {state.state}", "RUN", f"tp job stop {run.run_id} ends it"))
    check_prepared(run)
    job = read(run.job)
    missing = [name for name in job.spec.node.secrets if name not in environ]
    if missing:
        raise UsageError(
            Fault(f"{', '.join(missing)} not set in this shell", "environment", "export them, as at submit")
        )
    check_room(job.spec.resources, _site(environ))
    had_secrets = run.secrets.exists()
    write_secrets(run, job, environ)
    try:
        return hand_over(run, job)
    except OperationError:
        if not had_secrets:
            run.secrets.unlink(missing_ok=True)
        raise


def hand_over(run: RunFolder, job: JobSpec) -> Submitted:
    """Submit a complete run's very script. Raises OperationError; the run is then marked never submitted."""
    if job.spec.resources.scheduler == "local":
        return Submitted(run, start_local(run))
    estimate = estimate_start(run.script)
    try:
        job_id = submit_script(run.script)
    except OperationError as error:
        again = f"nothing was queued; tp submit --run {run.run_id} tries the same script again"
        told = [Fault(f.what, f.where, f.remedy or again) for f in error.faults]
        try:
            write_atomic(run.submit_error, "\n".join(fault.what for fault in error.faults) + "\n", 0o600)
        except OSError as full:  # Slurm's words matter more
            told.append(Fault(f"not noted: {full.strerror}", str(run.submit_error)))
        raise OperationError(*told) from None
    try:
        record_submission(run, job_id, "tp")
        run.submit_error.unlink(missing_ok=True)
    except OSError as error:
        raise _taken_back(run, job_id, error) from None
    return Submitted(run, job_id, estimate)


def check_room(resources: Resources, site: Site) -> None:
    """The site's cap on a user's GPUs in flight: the one check that asks the queue (C45)."""
    cap = site.caps.gpus_in_flight
    if cap is not None and resources.scheduler == "slurm" and resources.device == "gpu":
        check_in_flight(cap, resources.nodes * resources.gpus_per_node, site.contact)


def write_secrets(run: RunFolder, job: JobSpec, environ: Mapping[str, str]) -> None:
    """`secrets.env`, 0600: the site's secrets from this shell, and the run's token."""
    secrets = {name: environ[name] for name in job.spec.node.secrets}
    if job.spec.reporting.enabled:
        token = known_token(job.metadata.run_id, job.spec.reporting.token_sha256)
        if token is None:
            what = f"your key is not the one that {job.metadata.run_id} was submitted with"
            raise UsageError(
                Fault(what, str(state_folder() / "key"), "put it back, or submit the experiment anew")
            )
        secrets[env.TOKEN] = token
    if secrets:
        write_atomic(run.secrets, render_secrets(secrets), 0o600)


def _site(environ: Mapping[str, str]) -> Site:
    """What the site says today; it is the same under every profile."""
    return compose("local", lab_root=None, flags={}, environ=environ).config.site


def _taken_back(run: RunFolder, job_id: str, error: OSError) -> OperationError:
    """A job that could not be noted is cancelled, and where that fails its id is told all the same."""
    what = f"Slurm took the run as job {job_id}, and that could not be noted: {error.strerror}"
    try:
        run_slurm(["scancel", job_id])
    except OperationError:
        return OperationError(Fault(what, str(run.submissions), f"free space, then: scancel {job_id}"))
    return OperationError(
        Fault(
            f"{what}; it was cancelled",
            str(run.submissions),
            f"free space, then: tp submit --run {run.run_id}",
        )
    )
