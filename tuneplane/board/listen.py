"""Where the board listens, and the words by which its user gets there. Called by `serve`."""

from __future__ import annotations

import os
import shlex
import socket
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tuneplane.kernel.errors import Fault, OperationError

MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path. Source: unix(7), sun_path."""


BACKLOG = 128
"""Connections that wait while the server starts: its link is printed before."""


def socket_folder(environ: Mapping[str, str] | None = None) -> Path:
    """A folder of mode 0700 for sockets: below the session's own where there is one, else made anew below /tmp.

    Always local: a socket on a shared filesystem would connect nobody. Raises OSError.
    """
    environ = os.environ if environ is None else environ
    session = environ.get("XDG_RUNTIME_DIR", "")
    if session.startswith("/") and _is_private(Path(session)):
        folder = Path(session) / "tuneplane"
        folder.mkdir(mode=0o700, exist_ok=True)
        plain = shlex.quote(str(folder)) == str(folder) and ":" not in str(folder)
        if _is_private(folder) and plain and len(os.fsencode(folder)) < MAX_SOCKET_PATH - 30:
            return folder
    return Path(tempfile.mkdtemp(prefix="tuneplane-board-", dir="/tmp"))


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def listen_on_socket(folder: Path) -> tuple[socket.socket, Path]:
    """A listening Unix socket of mode 0600 in `folder`. Raises OSError."""
    path = folder / f"board-{os.getpid()}.sock"
    path.unlink(missing_ok=True)  # of a board of the same process id that was killed
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listening.bind(str(path))
    finally:
        os.umask(before)
    path.chmod(0o600)
    listening.listen(BACKLOG)
    return listening, path


def listen_on_port(port: int) -> socket.socket:
    """A listening socket on the loopback address; 0: any free port. Raises OperationError."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
    except OSError as error:
        listening.close()
        raise OperationError(
            Fault(
                f"port {port} cannot be listened on: {error.strerror}",
                "--port",
                "choose another, or --port 0",
            )
        ) from None
    listening.listen(BACKLOG)
    return listening


def remove_socket(path: Path) -> None:
    """Take the socket away, and its folder where it was made for it."""
    path.unlink(missing_ok=True)
    if path.parent.name.startswith("tuneplane-board-"):
        with suppress(OSError):
            path.parent.rmdir()


def tunnel_command(path: Path, local_port: int, user: str, host: str, ssh_connection: str = "") -> str:
    """What the user types on their own machine: a line for a shell.

    ssh_connection: `$SSH_CONNECTION`, whose last word is the port that this host's ssh is reached by.
    """
    argv = ["ssh", "-N", "-L", f"{local_port}:{path}"]
    words = ssh_connection.split()
    if len(words) == 4 and words[3] not in ("", "22"):
        argv += ["-p", words[3]]
    return shlex.join([*argv, f"{user}@{host}"])
