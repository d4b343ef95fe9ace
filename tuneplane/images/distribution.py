"""A repository of a registry, asked as the OCI distribution specification says: manifests, blobs, logins.

Freezing a tag and fetching an image use it. Each of the registry's refusals has a message of its own.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit

from tuneplane.images.credentials import DOCKER_HUB_HOSTS, Found, find_login
from tuneplane.images.manifest import ACCEPTED, LARGEST_MANIFEST_BYTES
from tuneplane.images.reference import Reference
from tuneplane.images.transport import CannotAsk, Response, Transport, origin
from tuneplane.kernel.digests import sha256_bytes
from tuneplane.kernel.errors import Fault, OperationError

DOCKER_HUB_API = "registry-1.docker.io"
TRIES = 3
"""How often a registry that answers with a server's error, or breaks off, is asked the same again."""
PAUSE_S = 1.0
"""Before the second try; doubled before each further one."""
ANSWER_S = 60.0
"""How long a small answer may take in all: one that drips is no answer."""
LARGEST_ANSWER_BYTES = 1 << 20
BLOCK_BYTES = 1 << 20

_PARAMETER = re.compile(r'([A-Za-z_]+)="((?:[^"\\]|\\.)*)"|([A-Za-z_]+)=([^\s,"]+)')


class Refused(OperationError):
    """The registry's own no: it was asked, and asking again changes nothing."""


@dataclass
class Registry:
    """One repository of one registry, with the login that it asked for.

    environ: whose files hold the logins; None: none are looked for. insecure: see `Transport`.
    """

    reference: Reference
    environ: Mapping[str, str] | None = None
    insecure: Collection[str] = ()
    pause_s: float = PAUSE_S
    used_login: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        registry = self.reference.registry
        self._authority = DOCKER_HUB_API if registry in DOCKER_HUB_HOSTS else registry
        self._transport = Transport(self.insecure)
        self._scheme = ""
        self._authorization = ""
        self._found: Found | None = None

    def resolve(self, name: str) -> str | None:
        """The digest of a manifest by HEAD, which registries do not count as a pull.

        None where the registry has no such name, or no digest to say: a GET tells which.
        """
        with self._ask("HEAD", f"manifests/{name}", {"Accept": ACCEPTED}) as answer:
            if answer.status in (401, 403, 429) or answer.status >= 500:
                raise self._refusal(answer, name)
            digest = answer.headers.get("Docker-Content-Digest", "") if answer.status == 200 else ""
        return digest if re.fullmatch(r"sha256:[0-9a-f]{64}", digest) else None

    def manifest(self, name: str) -> tuple[bytes, str]:
        """The bytes of a manifest or index, by tag or digest, and their media type. Checked against a digest."""
        with self._ask("GET", f"manifests/{name}", {"Accept": ACCEPTED}) as answer:
            if answer.status != 200:
                raise self._refusal(answer, name)
            raw = read_all(answer, LARGEST_MANIFEST_BYTES)
            kind = answer.headers.get("Content-Type", "")
        if name.startswith("sha256:") and f"sha256:{sha256_bytes(raw)}" != name:
            raise unlike_digest(self.reference, f"the manifest {name}", sha256_bytes(raw))
        return raw, kind

    def blob(self, digest: str, start: int = 0) -> Response:
        """The bytes of a blob from `start` on: status 206, or 200 where the registry gives all from 0."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        answer = self._ask("GET", f"blobs/{digest}", headers)
        if answer.status not in (200, 206, 416):
            with answer:
                raise self._refusal(answer, digest)
        return answer

    def _ask(self, method: str, path: str, headers: Mapping[str, str]) -> Response:
        """One request below the repository, with the login that its first answer asks for."""
        for number in range(TRIES):
            try:
                answer = self._send(method, path, headers)
                if answer.status == 401 and origin(answer.url) == self._origin():
                    with answer:
                        self._log_in(answer)
                    answer = self._send(method, path, headers)
            except CannotAsk as error:
                if number + 1 == TRIES or not error.broke_off:
                    raise
            else:
                if answer.status not in (500, 502, 503, 504) or number + 1 == TRIES:
                    return answer
                answer.close()
            time.sleep(self.pause_s * 2**number)
        raise AssertionError("unreachable")

    def _send(self, method: str, path: str, headers: Mapping[str, str]) -> Response:
        below = f"{self._authority}/v2/{self.reference.repository}/{path}"
        if self._scheme:
            return self._transport.request(
                method, f"{self._scheme}://{below}", headers, authorization=self._authorization
            )
        # HTTPS first everywhere: where both are spoken, a login goes by the safe one.
        try:
            answer = self._transport.request(method, f"https://{below}", headers)
            self._scheme = "https"
        except CannotAsk as error:
            if not (error.plain and self._transport.may_be_plain(self._authority)):
                raise
            answer = self._transport.request(method, f"http://{below}", headers)
            self._scheme = "http"
        return answer

    def _origin(self) -> str:
        return origin(f"{self._scheme}://{self._authority}")

    def _log_in(self, answer: Response) -> None:
        """Get what the registry's challenge asks for (RFC 6750, 7617; Docker's token specification)."""
        challenges = _challenges(_all(answer.headers, "WWW-Authenticate"))
        if self._found is None:
            self._found = (
                Found(None)
                if self.environ is None
                else find_login(self.reference.registry, self.reference.repository, self.environ)
            )
        login = self._found.login
        if "bearer" in challenges:
            self._authorization = f"Bearer {self._token(challenges['bearer'])}"
        elif "basic" in challenges and login is not None and not login.is_identity_token:
            self._authorization = _basic(login.user, login.secret)
            self.used_login = True
        else:
            self._authorization = ""

    def _token(self, challenge: Mapping[str, str]) -> str:
        realm = challenge.get("realm", "")
        asked = {
            "service": challenge.get("service", ""),
            "scope": challenge.get("scope") or f"repository:{self.reference.repository}:pull",
        }
        asked = {name: value for name, value in asked.items() if value}
        login = self._found.login if self._found else None
        if urlsplit(realm).scheme != "https" and (self._scheme, urlsplit(realm).scheme) != ("http", "http"):
            raise CannotAsk(Fault(f"{self._authority} names no safe place to log in", self._authority))
        if login is not None and login.is_identity_token:
            form = {"grant_type": "refresh_token", "client_id": "tuneplane", "refresh_token": login.secret}
            answer = self._transport.request(
                "POST",
                realm,
                {"Content-Type": "application/x-www-form-urlencoded"},
                data=urlencode({**asked, **form}).encode(),
            )
        else:
            url = f"{realm}{'&' if urlsplit(realm).query else '?'}{urlencode(asked)}"
            word = _basic(login.user, login.secret) if login else ""
            answer = self._transport.request("GET", url, authorization=word)
        self.used_login = login is not None
        with answer:
            if answer.status != 200:
                raise self._refusal(answer, "")
            return self._read_token(answer, realm)

    def _read_token(self, answer: Response, realm: str) -> str:
        try:
            document = json.loads(read_all(answer, LARGEST_ANSWER_BYTES))
            token = document.get("token") or document.get("access_token")
        except (ValueError, AttributeError, RecursionError):
            token = None
        # What is no visible ASCII could end the header that it is put into.
        if not isinstance(token, str) or not re.fullmatch(r"[!-~]+", token):
            raise CannotAsk(Fault(f"{origin(realm)} gives no token", self._authority))
        return token

    def _refusal(self, answer: Response, name: str) -> OperationError:
        """An answer other than the one that was hoped for, in words and with what to do."""
        host, image, status = self.reference.registry, self.reference, answer.status
        where = str(image)
        if self._scheme and origin(answer.url) != self._origin() and status not in (404, 429) and name:
            what = f"{host} sends on to {origin(answer.url)}, which answers {status}"
            return CannotAsk(Fault(what, where, "can this machine reach it?"))
        if status in (401, 403):
            return Refused(
                Fault(f"{host} denies access to {image} ({self._as_whom()})", where, self._log_in_hint())
            )
        if status == 404:
            return Refused(self._unknown(answer, name))
        if status == 429:
            pause = answer.headers.get("Retry-After", "")
            when = f"in {pause} s" if pause.isdigit() else pause or "later"
            return CannotAsk(
                Fault(
                    f"{host} lets no more be pulled for now: its rate limit is reached",
                    where,
                    f"try again {when}"
                    + ("" if self.used_login else f"; a login has a limit of its own: docker login {host}"),
                )
            )
        return CannotAsk(Fault(f"{host} cannot be asked: it answers {status} for {image}", where))

    def _unknown(self, answer: Response, name: str) -> Fault:
        image = self.reference
        try:
            codes = {str(e.get("code")) for e in json.loads(read_all(answer, LARGEST_ANSWER_BYTES))["errors"]}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OperationError):
            codes = set()
        where = str(image)
        if "NAME_UNKNOWN" in codes:
            what = f"{image.registry} has no repository {image.repository}"
            return Fault(what, where, "is it spelt so there?")
        if name.startswith("sha256:"):
            return Fault(
                f"{image.registry} does not have {image.repository}@{name}", where, "was it deleted there?"
            )
        return Fault(
            f"{image.registry} has no tag {name} of {image.repository}", where, "is it spelt so there?"
        )

    def _as_whom(self) -> str:
        login = self._found.login if self._found else None
        return f"as {login.user or 'the user of a token'}, of {login.source}" if login else "without a login"

    def _log_in_hint(self) -> str:
        troubles = "; ".join(self._found.troubles) if self._found else ""
        host = self.reference.registry
        hint = f"docker login {host}, podman login or apptainer registry login; or it does not exist"
        return f"{hint} ({troubles})" if troubles else hint


def read_all(answer: Response, most_bytes: int) -> bytes:
    """A small answer, whole. Raises CannotAsk where it is larger, cut short or drips."""
    deadline = time.monotonic() + ANSWER_S
    parts: list[bytes] = []
    size = 0
    while block := answer.read(BLOCK_BYTES):
        parts.append(block)
        size += len(block)
        if size > most_bytes:
            raise CannotAsk(
                Fault(f"{origin(answer.url)} answers with more than {most_bytes} bytes, which is no manifest")
            )
        if time.monotonic() > deadline:
            raise CannotAsk(
                Fault(f"{origin(answer.url)} takes longer than {ANSWER_S:.0f} s for a small answer")
            )
    said = answer.headers.get("Content-Length", "")
    if said.isdigit() and int(said) != size and not answer.headers.get("Content-Encoding"):
        what = f"{origin(answer.url)} cannot be asked: it ended the connection too early"
        raise CannotAsk(Fault(what, remedy="try again"), broke_off=True)
    return b"".join(parts)


def unlike_digest(reference: Reference, what: str, hexadecimal: str) -> Refused:
    """The refusal of bytes that are not those that were asked for."""
    return Refused(
        Fault(
            f"{reference.registry} gave bytes unlike their digest for {what}: their sha256 is {hexadecimal}",
            str(reference),
            "nothing of them is used; tell whoever runs that registry, or the proxy before it",
        )
    )


def _basic(user: str, secret: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{secret}".encode()).decode()


def _all(headers: Any, name: str) -> list[str]:
    return list(headers.get_all(name) or [])


def _challenges(lines: list[str]) -> dict[str, dict[str, str]]:
    """`WWW-Authenticate` as scheme → parameters (RFC 7235, section 4.1)."""
    found: dict[str, dict[str, str]] = {}
    for line in lines:
        for part in re.split(r",\s*(?=[A-Za-z]+\s+[A-Za-z_]+=)", line):
            scheme, _, rest = part.strip().partition(" ")
            values = {
                (m[1] or m[3]).lower(): re.sub(r"\\(.)", r"\1", m[2]) if m[1] else m[4]
                for m in _PARAMETER.finditer(rest)
            }
            found.setdefault(scheme.lower(), values)
    return found
