"""The run's token: random for each run, and made again from the user's own key when a run is retried (C31).

Only its sha256 stands in the JobSpec. The key never leaves the user's state folder.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.kernel.files import write_atomic
from tuneplane.runs.index import state_folder

KEY_BYTES = 32


def run_token(run_id: str) -> str:
    """The token of a run: as random as the user's key. Raises OperationError."""
    return hmac.new(_key(state_folder() / "key"), run_id.encode(), hashlib.sha256).hexdigest()


def token_digest(token: str) -> str:
    """What the JobSpec and a file of points hold of it."""
    return hashlib.sha256(token.encode()).hexdigest()


def known_token(run_id: str, digest: str) -> str | None:
    """The token whose digest a JobSpec holds, where this user's key gives it: a key is not made for this."""
    try:
        if not (state_folder() / "key").exists():
            return None
        token = run_token(run_id)
    except OperationError:
        return None
    return token if token_digest(token) == digest else None


def _key(path: Path) -> bytes:
    try:
        if not path.exists():
            _make_key(path)
        key = path.read_bytes()
        readable_by_others = path.stat().st_mode & 0o077
    except OSError as error:
        raise OperationError(Fault(f"your key cannot be used: {error.strerror}", str(path))) from None
    if len(key) != KEY_BYTES:
        raise OperationError(Fault("your key is damaged", str(path), "remove it: the next submit makes one"))
    if readable_by_others:
        raise OperationError(
            Fault("your key can be read by others", str(path), "remove it: the next submit makes another")
        )
    return key


def _make_key(path: Path) -> None:
    """Of two first submits at once, one key stays: link() never replaces."""
    fresh = path.with_name(f".key.{secrets.token_hex(4)}")
    write_atomic(fresh, secrets.token_bytes(KEY_BYTES), 0o600)
    try:
        os.link(fresh, path)
    except FileExistsError:
        pass
    finally:
        fresh.unlink()
