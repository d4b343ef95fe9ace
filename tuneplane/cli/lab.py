"""`tp init`, `tp new`, `tp ls`."""

from __future__ import annotations

from pathlib import Path

import click

from tuneplane.cli.completion import complete_methods
from tuneplane.cli.context import lab_here, load_methods
from tuneplane.cli.show import show_json, show_notices, show_table


@click.command("init")
@click.argument("lab", type=click.Path(path_type=Path))
@click.option("--name", help="The lab's name; the folder's where not given.")
def init_command(lab: Path, name: str | None) -> None:
    """Make LAB: a folder with tuneplane.yaml, experiments/, configs/ and common/, in git."""
    from tuneplane.lab.marker import init_lab

    founded = init_lab(lab, name)
    click.echo(f"lab {founded.lab.name} in {founded.lab.root}")
    if founded.git == "missing":
        show_notices(["git is not on this machine: tp submit needs it, since what is committed is what runs"])
    click.echo(f"next: cd {click.format_filename(lab)} && tp new NAME --method custom/custom")


@click.command("new")
@click.argument("name")
@click.option(
    "--method",
    required=True,
    shell_complete=complete_methods,
    help="<framework>/<recipe>; tp methods lists them.",
)
@click.option("--lab", "folder", type=click.Path(), help="A folder of the lab; here where not given.")
def new_command(name: str, method: str, folder: str | None) -> None:
    """Make experiments/NAME from a method."""
    from tuneplane.lab.experiments import new_experiment

    lab = lab_here(folder)
    path = new_experiment(lab, name, method, load_methods())
    click.echo(f"experiment {name} in {path}")
    for file in sorted(path.iterdir()):
        click.echo(f"  {file.name}")
    own = "train.sh" if (path / "train.sh").exists() else "config.yaml"
    click.echo(f"next: write {path.relative_to(lab.root)}/{own}, git add -A && git commit, tp submit {name}")


@click.command("ls")
@click.option("--lab", "folder", type=click.Path(), help="A folder of the lab; here where not given.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def ls_command(folder: str | None, as_json: bool) -> None:
    """List the lab's experiments, their method and the state of their lock."""
    from tuneplane.lab.experiments import list_experiments

    lab = lab_here(folder)
    experiments = list_experiments(lab, load_methods())
    if as_json:
        show_json(
            [
                {
                    "name": e.name,
                    "method": e.method,
                    "lock": e.state.status.value,
                    "faults": [str(f) for f in e.state.faults],
                    "advice": list(e.state.advice),
                }
                for e in experiments
            ]
        )
        return
    if not experiments:
        click.echo("no experiments yet: tp new NAME --method custom/custom")
    show_table(
        ("EXPERIMENT", "METHOD", "LOCK"),
        [(e.name, e.method or "?", e.state.status.value) for e in experiments],
    )
    show_notices(f"{e.name}: {fault.what}" for e in experiments for fault in e.state.faults)
