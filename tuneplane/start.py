"""Handing a prepared run over: its first start and every later one, by one path with one set of checks.

`tp submit --run`, `tp job retry` and `tp job resume` come here, one at a time for a run (`runs.starting`).

What was rendered is verified, the site's cap asked, the secrets written; what Slurm refuses leaves no trace
but its own words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tuneplane.compose import compose
from tuneplane.kernel import env
from tuneplane.kernel.errors import Fault, OperationError, UsageError
from tuneplane.kernel.files import room_or_right, write_atomic
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import read_submissions, record_submission
from tuneplane.launch.inflight import check_in_flight
from tuneplane.launch.local import start_local
from tuneplane.launch.slurm_commands import estimate_start, run_slurm, submit_script
from tuneplane.node.environment import render_secrets
from tuneplane.node.restart import TOO_FEW_NODES
from tuneplane.runs.adopt import note_unknown_jobs
from tuneplane.runs.folder import check_own
from tuneplane.runs.index import state_folder
from tuneplane.runs.records import excluded_nodes, note_restarted, paused_jobs
from tuneplane.runs.starting import starting
from tuneplane.runs.state import HELD, WAITING, RunState, read_state
from tuneplane.runs.stop import look, write_note
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
    released: bool = False  # a job that was held, and no new one


def start_prepared(run: RunFolder, environ: Mapping[str, str]) -> Submitted:
    """`tp submit --run`: the first start of a run that `tp render` prepared."""
    check_own(run)
    with starting(run):
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
    with starting(run):
        state = _present_state(run)
        if not state.is_final and state.state != "PREPARED":
            raise UsageError(_not_ended(run, state))
        return _start_again(run, environ, state)


def resume(run: RunFolder, environ: Mapping[str, str]) -> Submitted:
    """`tp job resume`: let a held run go on, or start the next attempt of one that ended before it was complete.

    A restart that was decided and not carried out is carried out. Raises UsageError where nothing is to go on.
    """
    check_own(run)
    with starting(run):
        state = _present_state(run)
        if state.job_id in paused_jobs(run) and state.state in WAITING:
            return _release(run, state)
        if not state.is_final:
            raise UsageError(_not_ended(run, state, "resume"))
        again = f"tp job retry {run.run_id} starts it again all the same"
        if state.state == "COMPLETED":
            raise UsageError(Fault(f"{run.run_id} is complete", "RUN", again))
        if state.state == "NOT_SUBMITTED":
            remedy = f"tp submit --run {run.run_id} tries it again"
            raise UsageError(Fault(f"{run.run_id} was never submitted: {state.reason}", "RUN", remedy))
        return _start_again(run, environ, state, keep_secrets=True)


def _present_state(run: RunFolder) -> RunState:
    """The state, a job considered that was queued by a `tp` which was killed before it could note it.

    Raises UsageError where `tp job gc` left nothing that could be started.
    """
    if any(not job.is_local for job in read_submissions(run)):
        known = {job.job_id for job in read_submissions(run)}
        for job_id in look(run).active.keys() - known:
            record_submission(run, job_id, "tp")
    state = read_state(run)
    if state.cleared:
        what = f"{run.run_id} was cleared by tp job gc: its code and its script are gone"
        raise UsageError(Fault(what, "RUN", "submit the experiment again"))
    return state


def _not_ended(run: RunFolder, state: RunState, act: str = "retry") -> Fault:
    """Why a run cannot be started again now, and what can be done instead."""
    run_id = run.run_id
    if state.state == "INCOMPLETE":
        return Fault(f"{run_id} was never complete: {state.reason}", "RUN", "submit the experiment again")
    if state.state == "PREPARED":
        return Fault(f"{run_id} was never submitted", "RUN", f"tp submit --run {run_id}")
    if state.state == "UNKNOWN":
        return Fault(f"how {run_id} is cannot be told: {state.reason}", "RUN", "ask again in a while")
    reason = f" ({state.reason})" if state.reason else ""
    what = f"{run_id} is {state.state}{reason}"
    if state.reason == HELD:
        return Fault(what, "RUN", f"tp job resume {run_id} releases it")
    if state.job_id in paused_jobs(run):
        return Fault(what, "RUN", f"say tp job {act} {run_id} again once it is PAUSED")
    return Fault(what, "RUN", f"tp job stop {run_id} ends it")


def _release(run: RunFolder, state: RunState) -> Submitted:
    """Let a held job go on; the note goes first, so that the job does not begin as a paused one.

    A job that is not held, because a `tp job pause` was killed before it came so far, needs no more than that.
    """
    noted = paused_jobs(run)
    write_note(run.paused, noted - {state.job_id})
    try:
        if state.reason == HELD:
            run_slurm(["scontrol", "release", state.job_id])
    except OperationError:
        write_note(run.paused, noted)
        raise
    return Submitted(run, state.job_id, released=True)


def _start_again(
    run: RunFolder, environ: Mapping[str, str], state: RunState, *, keep_secrets: bool = False
) -> Submitted:
    """The next attempt. keep_secrets: where this shell lacks one, those that are still in the folder do."""
    check_prepared(run)
    job = read(run.job)
    had_secrets = run.secrets.exists()
    missing = [name for name in job.spec.node.secrets if name not in environ]
    kept = keep_secrets and had_secrets and bool(missing)
    if missing and not kept:
        raise UsageError(
            Fault(f"{', '.join(missing)} not set in this shell", "environment", "export them, as at submit")
        )
    check_room(job.spec.resources, _site(environ))
    if not kept:
        write_secrets(run, job, environ)
    noted = paused_jobs(run)
    write_note(run.paused, ())
    last = run.attempts()[-1:]
    exclude = excluded_nodes(last[0]) if last else []
    try:
        done = hand_over(run, job, exclude, f"tp job retry {run.run_id}")
    except (OperationError, OSError):
        write_note(run.paused, noted)
        if not had_secrets:
            run.secrets.unlink(missing_ok=True)
        raise
    if last:
        note_restarted(last[0], done.job_id)
    return done


def hand_over(
    run: RunFolder, job: JobSpec, exclude: Sequence[str] = (), again: str = "", after: str = ""
) -> Submitted:
    """Submit a complete run's very script. Raises OperationError; the run is then marked never submitted.

    exclude: nodes that the job is to avoid besides those that its script names, where the others are enough.
    again: the command that tries it again. after: a Slurm job whose end it waits for.
    """
    if job.spec.resources.scheduler == "local":
        return Submitted(run, start_local(run))
    estimate = estimate_start(run.script)
    try:
        own = job.spec.slurm.dependency if job.spec.slurm else None  # the option takes its directive's place
        options = [f"--dependency={','.join(filter(None, (own, f'afterany:{after}')))}"] if after else []
        job_id = _submit_avoiding(run, job, exclude, options)
    except OperationError as error:
        command = again or f"tp submit --run {run.run_id}"
        remedy = f"nothing was queued; {command} tries the same script again"
        told = [Fault(f.what, f.where, f.remedy or remedy) for f in error.faults]
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


def _submit_avoiding(
    run: RunFolder, job: JobSpec, exclude: Sequence[str], options: Sequence[str] = ()
) -> str:
    """The job's id. Nodes that were once found dead may be back: without them there may be too few for ever."""
    named = job.spec.slurm.exclude if job.spec.slurm else None
    avoided = ",".join([*([named] if named else []), *exclude])
    if not exclude:
        return submit_script(run.script, *options)
    try:
        return submit_script(run.script, *options, f"--exclude={avoided}")
    except OperationError as error:
        if not any(TOO_FEW_NODES.search(fault.what) for fault in error.faults):
            raise
        return submit_script(run.script, *options)


def check_room(resources: Resources, site: Site, behind: Iterable[Resources] = ()) -> None:
    """The site's cap on a user's GPUs in flight: the one check that asks the queue (C45).

    behind: of operations that are queued with it.
    """
    cap = site.caps.gpus_in_flight
    asked = [r for r in (resources, *behind) if r.scheduler == "slurm" and r.device == "gpu"]
    if cap is not None and asked:
        check_in_flight(cap, sum(r.nodes * r.gpus_per_node for r in asked), site.contact)


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
        return OperationError(
            Fault(what, str(run.submissions), f"{room_or_right(error)}, then: scancel {job_id}")
        )
    return OperationError(
        Fault(
            f"{what}; it was cancelled",
            str(run.submissions),
            f"{room_or_right(error)}, then: tp submit --run {run.run_id}",
        )
    )
