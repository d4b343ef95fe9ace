"""`tp submit`, `tp render`, `tp validate`: one set of flags, one set of checks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tuneplane.cli.completion import complete_experiments, complete_profiles, complete_runs
from tuneplane.cli.context import cache_folder, lab_here, load_methods
from tuneplane.cli.progress import image_progress
from tuneplane.cli.show import show_fields, show_json, show_notices
from tuneplane.kernel.errors import Exit, Fault, UsageError

if TYPE_CHECKING:
    from tuneplane.compile import Draft, Request
    from tuneplane.findings import Findings
    from tuneplane.start import Submitted

F = TypeVar("F", bound=Callable[..., Any])

SLURM_FLAGS = {
    "time": "Walltime in Slurm's forms, 2-00:00:00.",
    "partition": "Partition.",
    "account": "Account that pays.",
    "qos": "Quality of service.",
    "constraint": "Node features.",
    "nodelist": "Nodes to run on.",
    "exclude": "Nodes to avoid.",
    "dependency": "Jobs to wait for, afterok:123.",
    "reservation": "Reservation.",
    "mail-user": "Whom Slurm mails.",
    "mail-type": "When Slurm mails, END,FAIL.",
    "job-name": "Name in squeue; the experiment's where not given.",
}


def slurm_options() -> list[Callable[[F], F]]:
    """The flags that set a directive."""
    return [
        click.option(f"--{name}", name.replace("-", "_"), help=text) for name, text in SLURM_FLAGS.items()
    ]


def request_options(command: F) -> F:
    """The flags of a submit."""
    options = [
        click.option("--profile", shell_complete=complete_profiles, help="NAME[:TOTAL_GPUS], h200:16."),
        click.option("--image", help="Container image: HOST/NAME:TAG, or a .sif path."),
        click.option("--observability-url", help="Your own tracker's address; passed on unchanged."),
        click.option(
            "--set", "sets", multiple=True, metavar="KEY=VALUE", help="A hyper-parameter; repeatable."
        ),
        click.option("--mount", "mounts", multiple=True, metavar="SRC:DST[:ro]", help="Repeatable."),
        click.option("--nodes", type=int, help="Nodes."),
        click.option("--gpus-per-node", type=int, help="GPUs on each node."),
        click.option("--model", help="Base model, for methods that bind one."),
        click.option("--train-data", help="Training data, for methods that bind it."),
        click.option("--validation-data", help="Data held out, for methods that bind it."),
        click.option("--init-from", metavar="run/RUN_ID", help="Start from the weights that a run exported."),
        click.option("--preflight", is_flag=True, help="Check the ranks' connection before training."),
        click.option(
            "--allow-dirty", is_flag=True, help="Take uncommitted files along; the JobSpec says so."
        ),
        *slurm_options(),
        click.option("--max-restarts", type=int, help="Restarts by itself in a row; 0: none."),
        click.option("--save-signal", help="To a trainer that catches it, when it is to save: USR1."),
        click.option(
            "--hang-limit",
            "hang_limit_s",
            type=float,
            metavar="SECONDS",
            help="End the run after so long without output or a point.",
        ),
        click.option("--lab", "folder", type=click.Path(), help="A folder of the lab; here where not given."),
        click.option("--json", "as_json", is_flag=True, help="For programs."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command("validate")
@click.argument("name", shell_complete=complete_experiments)
@request_options
def validate_command(name: str, folder: str | None, as_json: bool, **given: Any) -> int:
    """Run every check of a submit of NAME that needs no queue, and report all faults at once."""
    from tuneplane.submit import examine

    lab = lab_here(folder)
    request = _request(name, given, queues=True)
    _, found = examine(lab, load_methods(), request, os.environ, cache_folder(), image_progress())
    faults = [*found.faults, *(fault for error in found.refused for fault in error.faults)]
    if as_json:
        show_json(
            {
                "experiment": name,
                "faults": [{"what": f.what, "where": f.where, "remedy": f.remedy} for f in faults],
                "notices": found.notices,
                "unchecked": found.unchecked,
            }
        )
    else:
        show_notices(found.notices)
        for fault in faults:
            click.echo(str(fault), err=True)
        for told in found.unchecked:
            click.echo(f"not checked: {told}")
        click.echo(f"{name}: {len(faults)} faults" if faults else f"{name}: nothing to fault")
    if found.faults:
        return Exit.WRONG_USE
    return Exit.FAILED if faults else Exit.DONE


@click.command("render")
@click.argument("name", shell_complete=complete_experiments)
@request_options
def render_command(name: str, folder: str | None, as_json: bool, **given: Any) -> None:
    """Prepare a run of NAME, complete with its script, and queue nothing."""
    from tuneplane.submit import prepare

    draft, found = _checked(name, folder, given)
    run = prepare(draft, os.environ, image_progress())
    if as_json:
        show_json({"run_id": run.run_id, "folder": run.path, "script": run.script, "notices": found.notices})
        return
    show_notices(found.notices)
    show_fields([("run", run.run_id), ("script", str(run.script))])
    how = "bash" if draft.cluster.scheduler == "local" else "sbatch"
    click.echo(f"next: read the script, then tp submit --run {run.run_id}, or {how} it by hand")


@click.command("submit")
@click.argument("name", required=False, shell_complete=complete_experiments)
@request_options
@click.option("--run", "run_text", shell_complete=complete_runs, help="Submit a run that tp render prepared.")
@click.option("--dry-run", is_flag=True, help="Print the script; leave nothing behind.")
@click.option("--follow", is_flag=True, help="Show the log until the run ends; exit 3 if it failed.")
def submit_command(
    name: str | None,
    run_text: str | None,
    dry_run: bool,
    follow: bool,
    folder: str | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Run the committed experiment NAME."""
    from tuneplane import submit

    notices: list[str] = []
    if run_text is not None:
        _refuse_others(name, dry_run, given)
        from tuneplane.runs.index import find_run
        from tuneplane.start import start_prepared

        done = start_prepared(find_run(run_text), os.environ)
    else:
        if name is None:
            raise UsageError(
                Fault("which experiment?", "tp submit", "tp submit NAME --profile …; tp ls lists them")
            )
        draft, found = _checked(name, folder, given, dry_run=dry_run, queues=not dry_run)
        notices = found.notices
        if dry_run:
            _, script = submit.preview(draft)
            if as_json:
                show_json({"script": script, "notices": notices})
            else:
                show_notices(notices)
                click.echo(script, nl=False)
            return Exit.DONE
        done = submit.submit(draft, os.environ, image_progress())
    return show_submitted(done, notices, follow, as_json)


def show_submitted(done: Submitted, notices: list[str], follow: bool, as_json: bool, of: str = "") -> int:
    """Say which run was handed over, and follow it where that was asked for. of: the run that it is made from."""
    run_id = done.run.run_id
    if as_json:
        show_json(
            {
                "run_id": run_id,
                "job_id": done.job_id,
                "folder": done.run.path,
                "estimate": done.estimate,
                "notices": notices,
                **({"rerun_of": of} if of else {}),
            }
        )
    else:
        show_notices(notices)
        job = done.job_id if done.job_id.startswith("local-") else f"Slurm job {done.job_id}"
        fields = [("run", run_id), ("rerun of", of), ("job", job), ("folder", str(done.run.path))]
        show_fields([*fields, ("estimate", done.estimate)])
        if not follow:
            click.echo(f"next: tp job logs {run_id} -f")
    if not follow:
        return Exit.DONE
    from tuneplane.cli.logs import follow_run

    return follow_run(done.run, to_stderr=as_json)


def _checked(name: str, folder: str | None, given: dict[str, Any], **how: bool) -> tuple[Draft, Findings]:
    """how: dry_run, queues, as of `Request`."""
    from tuneplane.submit import check

    request = _request(name, given, **how)
    return check(lab_here(folder), load_methods(), request, os.environ, cache_folder(), image_progress())


def _request(name: str, given: dict[str, Any], **how: bool) -> Request:
    from tuneplane.compile import Request

    flags = {
        f"cluster.slurm.{flag.replace('-', '_')}": (f"--{flag}", given[flag.replace("-", "_")])
        for flag in SLURM_FLAGS
        if given[flag.replace("-", "_")] is not None
    }
    flags |= {
        f"cluster.{key}": (f"--{key.removesuffix('_s').replace('_', '-')}", given[key])
        for key in ("max_restarts", "save_signal", "hang_limit_s")
        if given[key] is not None
    }
    return Request(
        experiment=name,
        profile=given["profile"],
        image=given["image"],
        observability_url=given["observability_url"],
        sets=tuple(given["sets"]),
        mounts=tuple(given["mounts"]),
        nodes=given["nodes"],
        gpus_per_node=given["gpus_per_node"],
        model=given["model"],
        train_data=given["train_data"],
        validation_data=given["validation_data"],
        init_from=given["init_from"],
        preflight=given["preflight"],
        allow_dirty=given["allow_dirty"],
        flags=flags,
        **how,
    )


def _refuse_others(name: str | None, dry_run: bool, given: dict[str, Any]) -> None:
    """A prepared run is what it is: nothing can be said of it any more."""
    said = [f"--{key.replace('_', '-')}" for key, value in given.items() if value not in (None, False, ())]
    said += ["NAME"] if name else []
    said += ["--dry-run"] if dry_run else []
    if said:
        what = f"{', '.join(said)} cannot be said of a run that is prepared"
        raise UsageError(Fault(what, "--run", "render it again, or leave these away"))
