"""HTTP to a registry, by the standard library: certificates, proxies, redirects, time limits, and the words
for what goes wrong below HTTP itself. `distribution` is the one caller.

A login goes to the origin that it was given for. A redirect to another origin does not get it.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import re
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from tuneplane import __version__
from tuneplane.kernel.errors import Fault, OperationError

TIMEOUT_S = 30.0
"""The longest that a connection, or the next bytes on one, may take."""

MOST_REDIRECTS = 5

_CERTIFICATE_FOLDERS = ("/etc/containers/certs.d", "/etc/docker/certs.d")
"""Where Podman and Docker look for a registry's own authorities: `<folder>/<host[:port]>/*.crt`."""


class CannotAsk(OperationError):
    """The registry gave no answer that decides anything: unreachable, too busy, broken. Later it may.

    broke_off: the connection was made and ended too early; asking again at once may help.
    plain: the other side seems to speak plain HTTP where HTTPS was spoken to it.
    """

    def __init__(self, fault: Fault, *, broke_off: bool = False, plain: bool = False) -> None:
        super().__init__(fault)
        self.broke_off, self.plain = broke_off, plain


class Response:
    """Status, headers and a body that is read once."""

    def __init__(self, status: int, headers: Any, body: IO[bytes], url: str) -> None:
        self.status, self.headers, self.url = status, headers, url
        self._body = body

    def read(self, most_bytes: int) -> bytes:
        """The next bytes that are there, at most so many; empty at the end. Raises CannotAsk."""
        read = getattr(self._body, "read1", self._body.read)
        try:
            data: bytes = read(most_bytes)
        except (OSError, http.client.HTTPException) as error:
            raise cannot_ask(self.url, error) from None
        return data

    def close(self) -> None:
        self._body.close()

    def __enter__(self) -> Response:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Transport:
    """Requests to one registry and to wherever it redirects.

    insecure: registries (`host[:port]`) that the site lets be asked by plain HTTP; loopback addresses always
    may.
    """

    def __init__(self, insecure: Collection[str] = (), timeout_s: float = TIMEOUT_S) -> None:
        self.insecure = frozenset(insecure)
        self.timeout_s = timeout_s

    def may_be_plain(self, authority: str) -> bool:
        """Whether plain HTTP to this `host[:port]` is allowed."""
        return authority in self.insecure or is_loopback(authority)

    def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        authorization: str = "",
        data: bytes | None = None,
    ) -> Response:
        """One request, redirects followed. Any status is a response; what is below HTTP raises CannotAsk."""
        parts = urlsplit(url)
        if parts.scheme != "https" and not (parts.scheme == "http" and self.may_be_plain(parts.netloc)):
            raise CannotAsk(
                Fault(f"{origin(url)} is not asked: no HTTPS, and the site does not list it", _where(url))
            )
        request = urllib.request.Request(url, data=data, method=method, headers=dict(headers or {}))
        request.add_header("User-Agent", f"tuneplane/{__version__}")
        if authorization:
            request.add_unredirected_header("Authorization", authorization)
        handlers: list[Any] = [_Redirects(self, url, authorization), _Https(parts.netloc)]
        if is_loopback(parts.netloc):
            handlers.append(urllib.request.ProxyHandler({}))
        opener = urllib.request.build_opener(*handlers)
        try:
            answer = opener.open(request, timeout=self.timeout_s)
        except urllib.error.HTTPError as error:
            return Response(error.code, error.headers, error, error.url or url)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise cannot_ask(url, error) from None
        return Response(answer.status, answer.headers, answer, answer.url)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirects of GET and HEAD: never from HTTPS to HTTP, never with a login to another origin."""

    max_redirections = MOST_REDIRECTS
    max_repeats = MOST_REDIRECTS

    def __init__(self, transport: Transport, start: str, authorization: str) -> None:
        self.transport, self.start, self.authorization = transport, start, authorization

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        parts = urlsplit(newurl)
        plain = parts.scheme == "http" and urlsplit(req.full_url).scheme == "http"
        if parts.scheme != "https" and not (plain and self.transport.may_be_plain(parts.netloc)):
            raise CannotAsk(Fault(f"{origin(self.start)} redirects to {origin(newurl)}, which is not HTTPS"))
        if req.get_method() not in ("GET", "HEAD"):
            raise CannotAsk(Fault(f"{origin(self.start)} redirects a {req.get_method()} request"))
        # Without the proxy's own password: its handler adds it again where the new way leads through it.
        kept = {name: value for name, value in req.headers.items() if name.lower() != "proxy-authorization"}
        following = urllib.request.Request(newurl, method=req.get_method(), headers=kept)
        if self.authorization and origin(newurl) == origin(self.start):
            following.add_unredirected_header("Authorization", self.authorization)
        return following

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302  # Python 3.10 does not know it


def origin(url: str) -> str:
    """`scheme://host[:port]` of a URL, without any user, path or query: signed URLs are secrets too."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}".lower()


def is_loopback(authority: str) -> bool:
    """Whether `host[:port]` is this machine itself, by name or address."""
    host = urlsplit(f"//{authority}").hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Https(urllib.request.HTTPSHandler):
    """HTTPS, for which the authorities are read once it is spoken: that takes longer than a plain request."""

    def __init__(self, authority: str) -> None:
        urllib.request.AbstractHTTPHandler.__init__(self)  # that of HTTPSHandler reads them at once
        self._authority = authority

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        context = tls_context(self._authority)
        return self.do_open(http.client.HTTPSConnection, req, context=context)


def tls_context(authority: str) -> ssl.SSLContext:
    """The system's authorities (or those of SSL_CERT_FILE, SSL_CERT_DIR), and the registry's own in certs.d."""
    context = ssl.create_default_context()
    users = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "containers/certs.d"
    if "/" in authority or authority in ("", ".", ".."):
        return context
    for folder in (*map(Path, _CERTIFICATE_FOLDERS), users):
        try:
            for file in sorted((folder / authority).iterdir()):
                if file.suffix == ".crt":
                    context.load_verify_locations(file)
        except OSError:  # none, not to be read, or no certificate (ssl.SSLError is one)
            continue
    return context


def cannot_ask(url: str, error: BaseException) -> CannotAsk:
    """What went wrong below HTTP, in a user's words."""
    reason = getattr(error, "reason", error)
    cause: Any = reason if isinstance(reason, BaseException) else error
    whom = origin(url)
    host = urlsplit(url).hostname or ""
    if isinstance(cause, CannotAsk):
        return cause
    if isinstance(cause, ssl.SSLCertVerificationError):
        return CannotAsk(
            Fault(
                f"{whom} shows a certificate that is not trusted here: {cause.verify_message}",
                _where(url),
                "where it is your site's own: SSL_CERT_FILE=<its authority>.pem tp …, or have the "
                f"administrators put it into /etc/containers/certs.d/{urlsplit(url).netloc}/ca.crt",
            )
        )
    if isinstance(cause, ssl.SSLError) and _is_plain_http(cause):
        return CannotAsk(
            Fault(
                f"{_where(url)} speaks plain HTTP, which is taken from loopback addresses alone",
                _where(url),
                "ask the administrators to list it in site.insecure_registries, or to give it HTTPS",
            ),
            plain=True,
        )
    broke_off = isinstance(
        cause, (ConnectionError, http.client.IncompleteRead, ssl.SSLEOFError, ssl.SSLZeroReturnError)
    ) and not isinstance(cause, ConnectionRefusedError)
    what, remedy = _words(cause, host)
    fault = Fault(f"{whom} cannot be asked: {what}", _where(url), remedy)
    return CannotAsk(fault, broke_off=broke_off, plain=broke_off)


def _words(cause: Any, host: str) -> tuple[str, str]:
    without = "does this machine reach it? proxies are taken from HTTPS_PROXY and NO_PROXY"
    if isinstance(cause, socket.gaierror):
        return f"its name is not known here ({cause.strerror})", without
    if isinstance(cause, TimeoutError):
        return "it does not answer", without
    if isinstance(
        cause, (http.client.IncompleteRead, ConnectionResetError, BrokenPipeError, ssl.SSLEOFError)
    ):
        return "it ended the connection too early", "try again"
    if isinstance(cause, ssl.SSLError):
        return f"TLS failed ({cause.reason or cause.strerror})", ""
    proxy = re.search(r"Tunnel connection failed: (\d+ .*)", str(cause))
    if proxy:
        return f"the proxy refuses the way to {host} ({proxy[1]})", "see HTTPS_PROXY and NO_PROXY"
    if isinstance(cause, http.client.HTTPException):
        return f"its answer is no HTTP ({type(cause).__name__})", "is a proxy or login page in between?"
    if isinstance(cause, ValueError):
        return "its answer leads nowhere", ""
    return (getattr(cause, "strerror", None) or str(cause) or type(cause).__name__), without


def _is_plain_http(error: ssl.SSLError) -> bool:
    """OpenSSL's words for an answer that is not TLS at all; they differ from version to version."""
    return bool(re.search(r"WRONG_VERSION_NUMBER|HTTP_REQUEST|RECORD_LAYER_FAILURE", error.reason or ""))


def _where(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]
