"""The board as a program: opened, announced, served until it is interrupted. Called by `cli.board`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

from tuneplane import __version__
from tuneplane.board import listen
from tuneplane.board.access import Access
from tuneplane.board.app import Board
from tuneplane.board.assets import read_assets
from tuneplane.board.watch import Watch
from tuneplane.collect.store import Store
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.runs.index import current_user

MAX_HEAD_BYTES = 256 << 10
"""Of a request: the names of several hundred runs that are compared."""

MAX_IN_LINK = 50
"""Runs that a printed link chooses."""


def serve(
    *,
    port: int | None,
    local_port: int,
    roots: list[Path] | None,
    chosen: Sequence[RunFolder],
    store_folder: Path | None,
    say: Callable[[str], None],
) -> None:
    """Serve the board until INT or TERM.

    port: of the loopback address; None: a Unix socket, to be reached at `local_port` of the user's own machine.
    chosen: runs that the page shows first. say: prints a line. Raises OperationError.
    """
    assets = read_assets()
    path: Path | None = None
    if port is None:
        try:
            listening, path = listen.listen_on_socket(listen.socket_folder())
        except OSError as error:
            place = str(error.filename or "the board's socket")
            raise OperationError(
                Fault(f"cannot be made: {error.strerror}", place, "or listen on a port: --port 0")
            ) from None
    else:
        listening = listen.listen_on_port(port)
    watch = Watch(lambda: Store(store_folder), roots, chosen)
    try:
        _announce_and_run(listening, path, local_port, watch, Board(watch, assets, _about()), chosen, say)
    finally:
        listening.close()
        if path is not None:
            listen.remove_socket(path)
        watch.close()


def _announce_and_run(
    listening: socket.socket,
    path: Path | None,
    local_port: int,
    watch: Watch,
    board: Board,
    chosen: Sequence[RunFolder],
    say: Callable[[str], None],
) -> None:
    import uvicorn

    base = f"http://localhost:{local_port}/" if path else f"http://127.0.0.1:{listening.getsockname()[1]}/"
    shown = ",".join(quote(run.run_id) for run in chosen[:MAX_IN_LINK])

    def link(token: str) -> str:
        return f"{base}?token={token}" + (f"#runs={shown}" if shown else "")

    access = Access(
        on_used=lambda token: say(f"a browser has signed in; the link for another one:\n  {link(token)}")
    )
    config = uvicorn.Config(
        board.application(access),
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )
    watch.touch()
    host = os.uname().nodename
    say(f"board of {current_user()}'s runs on {host}; it reads and changes nothing. Ctrl-C ends it")
    if path is not None:
        command = listen.tunnel_command(
            path, local_port, current_user(), host, os.environ.get("SSH_CONNECTION", "")
        )
        say(f"on your own machine, and leave it running:\n  {command}")
    say(f"in a browser there; the link works once:\n  {link(access.token)}")
    uvicorn.Server(config).run(sockets=[listening])


def _about() -> dict[str, str]:
    return {
        "user": current_user(),
        "host": os.uname().nodename,
        "version": __version__,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
