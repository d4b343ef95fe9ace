"""The logins that a user already has for a registry: Docker's, Podman's, Apptainer's and enroot's own files.

`distribution` asks, once a registry wants a login. Nothing is stored, and no secret is ever part of a message.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneplane.images.reference import DEFAULT_REGISTRY

DOCKER_HUB_HOSTS = frozenset({DEFAULT_REGISTRY, "index.docker.io", "registry-1.docker.io"})
"""One registry under several names; Docker's own files call it https://index.docker.io/v1/."""

HELPER_TIMEOUT_S = 30.0
LARGEST_FILE_BYTES = 1 << 20

_HELPER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_TOKEN_USER = "<token>"  # how a helper says that the secret is an identity token (docker-credential-helpers)
_MACHINE = re.compile(r"\s*machine\s+(\S+)\s+login\s+(\S+)\s+password\s+(\S.*?)\s*")


@dataclass(frozen=True)
class Login:
    """A user name and its secret, or an identity token. `source` is the file or program that had it."""

    user: str
    secret: str = field(repr=False)
    source: str
    is_identity_token: bool = False


@dataclass(frozen=True)
class Found:
    """The login for a registry, if there is one, and what could not be read while looking for it."""

    login: Login | None
    troubles: tuple[str, ...] = ()


def find_login(registry: str, repository: str, environ: Mapping[str, str]) -> Found:
    """The first login for `registry` in the user's files.

    Order: what `REGISTRY_AUTH_FILE` names, Podman's, Docker's, Apptainer's, enroot's. Within Docker's file
    `credHelpers`, then `credsStore`, then `auths`, as Docker itself does. Podman's keys may name a repository
    or a part of one; the longest that fits counts.
    """
    troubles: list[str] = []
    for path in _json_files(environ):
        document = _read_document(path, troubles)
        if document is not None:
            login = _from_document(document, path, registry, repository, environ, troubles)
            if login is not None:
                return Found(login, tuple(troubles))
    return Found(_from_enroot(registry, environ, troubles), tuple(troubles))


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HOME") or Path.home())


def _json_files(environ: Mapping[str, str]) -> Iterator[Path]:
    home = _home(environ)
    if environ.get("REGISTRY_AUTH_FILE"):
        yield Path(environ["REGISTRY_AUTH_FILE"])
    if environ.get("XDG_RUNTIME_DIR"):
        yield Path(environ["XDG_RUNTIME_DIR"]) / "containers/auth.json"
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "containers/auth.json"
    yield Path(environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json"
    yield Path(environ.get("APPTAINER_CONFIGDIR") or home / ".apptainer") / "docker-config.json"
    yield Path(environ.get("SINGULARITY_CONFIGDIR") or home / ".singularity") / "docker-config.json"


def _read_text(path: Path, troubles: list[str]) -> str | None:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        troubles.append(f"{path}: {error.strerror}")
        return None
    if len(data) > LARGEST_FILE_BYTES:
        troubles.append(f"{path}: larger than {LARGEST_FILE_BYTES} bytes")
        return None
    return data.decode("utf-8", "replace")


def _read_document(path: Path, troubles: list[str]) -> Mapping[str, Any] | None:
    text = _read_text(path, troubles)
    if text is None:
        return None
    try:
        document = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        troubles.append(f"{path}: not a JSON object")
        return None
    return document


def _from_document(
    document: Mapping[str, Any],
    path: Path,
    registry: str,
    repository: str,
    environ: Mapping[str, str],
    troubles: list[str],
) -> Login | None:
    helpers = _mapping(document.get("credHelpers"))
    for key in _fitting(helpers, registry, repository):
        return _from_helper(helpers[key], key, environ, troubles)
    store = document.get("credsStore")
    if isinstance(store, str) and store:
        login = _from_helper(store, _docker_key(registry), environ, troubles)
        if login is not None:
            return login
    auths = _mapping(document.get("auths"))
    for key in _fitting(auths, registry, repository):
        login = _from_entry(auths[key], f"{path}", troubles)
        if login is not None:
            return login
    return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _docker_key(registry: str) -> str:
    """The name under which `docker login` stores a registry."""
    return "https://index.docker.io/v1/" if registry in DOCKER_HUB_HOSTS else registry


def _fitting(keys: Mapping[str, Any], registry: str, repository: str) -> Sequence[str]:
    """Keys that mean this repository or all of its registry, the most exact first."""
    found = []
    for key in keys:
        host, _, path = re.sub(r"^https?://", "", key).partition("/")
        path = re.sub(r"(^|/)v[12]/?$", "", path).strip("/")
        same = host == registry or {host, registry} <= DOCKER_HUB_HOSTS
        if same and (not path or f"{repository}/".startswith(f"{path}/")):
            found.append((len(path), key))
    return [key for _, key in sorted(found, key=lambda pair: -pair[0])]


def _from_entry(entry: Any, source: str, troubles: list[str]) -> Login | None:
    if not isinstance(entry, dict):
        return None
    user, secret = entry.get("username"), entry.get("password")
    coded = entry.get("auth")
    if isinstance(coded, str) and coded:
        try:
            plain = base64.b64decode(coded, validate=True).decode("utf-8")
        except (binascii.Error, ValueError):
            troubles.append(f"{source}: an entry's auth is not base64")
            return None
        user, _, secret = plain.rstrip("\0").partition(":")
    token = entry.get("identitytoken")
    if isinstance(token, str) and token:
        return Login(user if isinstance(user, str) else "", token, source, is_identity_token=True)
    if isinstance(user, str) and user and isinstance(secret, str) and secret:
        return Login(user, secret, source)
    return None


def _from_helper(name: Any, key: str, environ: Mapping[str, str], troubles: list[str]) -> Login | None:
    """Ask `docker-credential-NAME get`, which reads the registry on its input and answers on its output."""
    if not isinstance(name, str) or not _HELPER_NAME.fullmatch(name):
        troubles.append(f"{name!r} is no name of a credential helper")
        return None
    program = f"docker-credential-{name}"
    try:
        done = subprocess.run(
            [program, "get"],
            input=key.encode(),
            env=dict(environ),
            capture_output=True,
            timeout=HELPER_TIMEOUT_S,
            check=False,
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else None
    except subprocess.TimeoutExpired:
        troubles.append(f"{program}: no answer within {HELPER_TIMEOUT_S:.0f} s")
        return None
    except (OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) else "answered without JSON"
        troubles.append(f"{program}: {told}")
        return None
    if not isinstance(answer, dict):
        if b"not found" not in done.stdout + done.stderr:  # its way to say that it has no login
            troubles.append(f"{program}: ended with {done.returncode}")
        return None
    user, secret = answer.get("Username"), answer.get("Secret")
    if not (isinstance(user, str) and isinstance(secret, str) and secret):
        return None
    return Login(user, secret, program, is_identity_token=user == _TOKEN_USER)


def _from_enroot(registry: str, environ: Mapping[str, str], troubles: list[str]) -> Login | None:
    """`.credentials` in netrc form; a machine is a host without its port."""
    folder = environ.get("ENROOT_CONFIG_PATH") or (
        Path(environ.get("XDG_CONFIG_HOME") or _home(environ) / ".config") / "enroot"
    )
    path = Path(folder) / ".credentials"
    text = _read_text(path, troubles)
    if text is None:
        return None
    host = registry if registry.endswith("]") else registry.rpartition(":")[0] or registry
    names = {*DOCKER_HUB_HOSTS, "auth.docker.io"} if registry in DOCKER_HUB_HOSTS else {host, registry}
    for line in text.splitlines():
        found = _MACHINE.fullmatch(line)
        if found is None or found[1] not in names:
            continue
        secret = found[3]
        if secret.startswith("$"):
            troubles.append(
                f"{path}: the password of {found[1]} is a shell expression, which tp does not run"
            )
            continue
        return Login(found[2], _unquoted(secret), str(path))
    return None


def _unquoted(text: str) -> str:
    try:
        words = shlex.split(text) if text[:1] in "\"'" else [text.split(maxsplit=1)[0]]
    except ValueError:
        return text
    return words[0] if words else ""
