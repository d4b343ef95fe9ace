"""`tp board`: curves of your runs in a browser, over a tunnel of ssh or on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from tuneplane.cli.run import find


@click.command("board")
@click.argument("runs", nargs=-1)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Listen on this port of this machine's loopback; 0: a free one. Else on a socket for ssh -L.",
)
@click.option(
    "--local-port",
    type=click.IntRange(1, 65535),
    default=8765,
    show_default=True,
    help="The tunnel's port on your own machine.",
)
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Only this storage root.",
)
def board_command(runs: tuple[str, ...], port: int | None, local_port: int, root: Path | None) -> int:
    """Serve curves of your runs to your browser; RUNS: those shown first, also by the path of a colleague's."""
    from tuneplane.board.serve import serve
    from tuneplane.kernel.errors import Exit

    chosen = [find(run) for run in runs]
    try:
        serve(
            port=port,
            local_port=local_port,
            roots=[root] if root else None,
            chosen=chosen,
            store_folder=None,
            say=click.echo,
        )
    except KeyboardInterrupt:
        click.echo()
    return Exit.DONE
