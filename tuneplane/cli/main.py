"""Entry of `tp`. Commands are imported when they are named, so that help and `tp job ls` stay quick."""

from __future__ import annotations

import importlib
import os
import signal
import sys

import click

from tuneplane import __version__
from tuneplane.cli.pipe import acts, fall_silent, is_unread, open_closed, speak_on
from tuneplane.kernel.errors import Exit, TunePlaneError

COMMANDS = {
    "init": ("lab", "Make a lab: a git repository of experiments."),
    "new": ("lab", "Make an experiment from a method."),
    "ls": ("lab", "List the lab's experiments."),
    "methods": ("methods", "List the catalog's methods, or show one."),
    "recipe": ("recipe", "State and upgrade of an experiment's lock."),
    "config": ("config", "Show a profile as composed, and where each value came from."),
    "validate": ("submit", "Run every check of a submit that needs no queue."),
    "render": ("submit", "Prepare a run with its script for review; queue nothing."),
    "submit": ("submit", "Run a committed experiment."),
    "export": ("operation", "Export a trained model, where the method declares it."),
    "eval": ("operation", "Evaluate a trained model, where the method declares it."),
    "image": ("image", "Prepare images of registries for nodes; list and clear them."),
    "job": ("job", "Look at runs, end them, let them go on."),
    "collect": ("collect", "Read what runs report into this machine's cache, once or all the time."),
    "board": ("board", "Show curves of your runs in a browser."),
    "cluster": ("cluster", "Describe a site's Slurm as a cluster profile, and prove it."),
    "doctor": ("doctor", "Look whether this machine and the cluster have what runs need."),
    "completion": ("completion", "Print a script for your shell that completes tp."),
}


class LazyGroup(click.Group):
    """Commands by name, each from its own module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"tuneplane.cli.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tp")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
def cli(debug: bool) -> None:
    """Run training on Slurm: a committed experiment becomes a reviewed job, with curves and causes.

    Start with: tp init LAB, then tp new NAME --method custom/custom.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run `tp` and leave with its exit code: 0 done, 1 failed, 2 wrong use, 3 the job itself failed."""
    given = sys.argv[1:] if arguments is None else arguments
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    open_closed()
    if acts(given):
        speak_on()
    debug = "--debug" in given or bool(os.environ.get("TUNEPLANE_DEBUG"))
    try:
        code = cli.main(args=given, prog_name="tp", standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as leaving:  # click itself ends with 1 at a broken pipe, and nothing else here does
        if leaving.code == 1 and is_unread():
            fall_silent()
            sys.exit(Exit.DONE)
        raise
    except click.ClickException as error:
        error.show()
        sys.exit(Exit.WRONG_USE)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except TunePlaneError as error:
        if debug:
            _show_traceback()
        for fault in error.faults:
            click.echo(f"tp: {fault}", err=True)
        sys.exit(int(error.exit_code))
    except OSError as error:
        if isinstance(error, BrokenPipeError) and is_unread():
            fall_silent()
            sys.exit(Exit.DONE)
        if debug:
            _show_traceback()
        place = f"{error.filename}: " if error.filename else ""
        click.echo(f"tp: {place}{error.strerror or error}", err=True)
        sys.exit(Exit.FAILED)
    except Exception as error:  # a fault of ours: still one line, and how to see more
        if debug:
            _show_traceback()
        click.echo(f"tp: this is a fault of TunePlane: {type(error).__name__}: {error}", err=True)
        click.echo("  → run it again as tp --debug … and report what it prints", err=True)
        sys.exit(Exit.FAILED)
    sys.exit(int(code or 0))


def _show_traceback() -> None:
    import traceback

    traceback.print_exc()


def _leave(number: int, frame: object) -> None:
    """A closed terminal or a TERM ends `tp` as Ctrl-C does: what was begun is taken back first."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
