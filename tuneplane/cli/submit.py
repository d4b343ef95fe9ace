"""`tp submit`, `tp render`, `tp validate`: one set of flags, one set of checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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
    from tuneplane.operation import Planned
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
        click.option(
            "--then",
            multiple=True,
            type=click.Choice(("export", "eval")),
            help="What follows the run once it is complete; repeatable.",
        ),
        click.option(
            "--tasks", multiple=True, metavar="A,B", help="Of --then eval: lm-eval's tasks; repeatable."
        ),
        click.option("--include-path", metavar="FOLDER", help="Of --then eval: task files of your own."),
        click.option(
            "--eval-set",
            multiple=True,
            metavar="KEY=VALUE",
            help="Of --then eval: a parameter of it; repeatable.",
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
    _, _, found = _examined(name, folder, given, queues=True)
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
        click.echo(
            f"{name}: {len(faults)} fault{'s' * (len(faults) > 1)}" if faults else f"{name}: nothing to fault"
        )
    if found.faults:
        return Exit.WRONG_USE
    return Exit.FAILED if faults else Exit.DONE


@click.command("render")
@click.argument("name", shell_complete=complete_experiments)
@request_options
def render_command(name: str, folder: str | None, as_json: bool, **given: Any) -> None:
    """Prepare a run of NAME, complete with its script, and queue nothing."""
    from tuneplane.submit import prepare

    if given["then"]:
        what = "operations are prepared with the run that they follow, as it is submitted"
        raise UsageError(Fault(what, "--then", "tp submit … --then, or tp eval RUN once it is submitted"))
    draft, _, found = _checked(name, folder, given)
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
    behind: list[Submitted] = []
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
        draft, then, found = _checked(name, folder, given, dry_run=dry_run, queues=not dry_run)
        notices = found.notices
        if dry_run:
            _, script = submit.preview(draft)
            told = [f"then {one.operation}, on {one.job.spec.resources.profile}" for one in then]
            if as_json:
                show_json({"script": script, "notices": [*notices, *told]})
            else:
                show_notices([*notices, *told])
                click.echo(script, nl=False)
            return Exit.DONE
        if then:
            from tuneplane import operate

            done, behind = operate.submit_then(draft, then, os.environ, image_progress())
        else:
            done = submit.submit(draft, os.environ, image_progress())
    return show_submitted(done, notices, follow, as_json, behind=behind)


def show_submitted(
    done: Submitted,
    notices: list[str],
    follow: bool,
    as_json: bool,
    of: str = "",
    subject: tuple[str, str] = ("", ""),
    behind: Sequence[Submitted] = (),
) -> int:
    """Say which run was handed over, and follow it where that was asked for. of: the run that it is made from.

    subject: of an operation, what it does and on which run. behind: the operations that follow the run.
    """
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
                **({"operation": subject[0], "subject": subject[1]} if subject[1] else {}),
                **({"then": [_as_dict(one) for one in behind]} if behind else {}),
            }
        )
    else:
        show_notices(notices)
        fields = [("run", run_id), ("rerun of", of), (f"{subject[0]} of", subject[1])]
        fields += [("job", _job(done)), ("folder", str(done.run.path))]
        then = [("then", f"{one.run.run_id}, {_job(one)}") for one in behind]
        show_fields([*fields, *then, ("estimate", done.estimate)])
        if not follow:
            click.echo(f"next: tp job logs {run_id} -f")
    if not follow:
        return Exit.DONE
    from tuneplane.cli.logs import follow_run

    return follow_run(done.run, to_stderr=as_json)


def _job(done: Submitted) -> str:
    return done.job_id if done.job_id.startswith("local-") else f"Slurm job {done.job_id}"


def _as_dict(done: Submitted) -> dict[str, Any]:
    return {"run_id": done.run.run_id, "job_id": done.job_id, "folder": done.run.path}


def _checked(
    name: str, folder: str | None, given: dict[str, Any], **how: bool
) -> tuple[Draft, list[Planned], Findings]:
    """`_examined`, which must find nothing. how: dry_run, queues, as of `Request`."""
    draft, then, found = _examined(name, folder, given, **how)
    found.faults += found.missing
    found.raise_all()
    assert draft is not None  # nothing was missing and nothing wrong
    return draft, then, found


def _examined(
    name: str, folder: str | None, given: dict[str, Any], **how: bool
) -> tuple[Draft | None, list[Planned], Findings]:
    """Every check of a run and of what follows it, all faults at once (C30)."""
    from tuneplane.submit import examine

    lab, methods = lab_here(folder), load_methods()
    request = _request(name, given, **how)
    looked = (os.environ, cache_folder(), image_progress())
    draft, found = examine(lab, methods, request, *looked)
    said = [f"--{key.replace('_', '-')}" for key in ("tasks", "include_path", "eval_set") if given[key]]
    if said and "eval" not in given["then"]:
        what = f"{', '.join(said)}: of an evaluation, and none follows"
        found.faults.append(Fault(what, "--then", "say --then eval too"))
    if not given["then"]:
        return draft, [], found
    from tuneplane.operation import Asked, plan_then

    evaluation = {"tasks": given["tasks"], "include_path": given["include_path"], "sets": given["eval_set"]}
    then = [Asked(word, **(evaluation if word == "eval" else {})) for word in given["then"]]
    return draft, plan_then(found, lab, draft, name, then, methods, *looked), found


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
