"""Who may see the board: a token that is used once, then a cookie; which names it answers to; what pages may do.

Wrapped around the application by `app`. Nothing but reading passes.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADERS = {
    # Everything comes from the board itself. Trusted Types make the browser refuse any text as markup.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "[::1]"))
"""A tunnel's end may have any port. A page of elsewhere whose name was made to mean this host has another name."""

_LOCKED = """\
<!doctype html><html lang="en"><meta charset="utf-8"><title>TunePlane board</title>
<link rel="stylesheet" href="/static/app.css"><body class="locked"><main><h1>This browser is not signed in</h1>
<p>A link of <code>tp board</code> works once. The terminal in which it runs shows the next one.</p>
<p><a href="/">Already signed in? Open the board</a></p></main>
"""


class Access:
    """The one link that is valid now, and the cookie that it is exchanged for.

    on_used: called with the next token whenever one was used.
    """

    def __init__(self, on_used: Callable[[str], None] | None = None) -> None:
        self.token = secrets.token_urlsafe(24)
        self.cookie_name = f"tuneplane_board_{secrets.token_hex(4)}"  # cookies do not tell ports apart
        self._session = secrets.token_urlsafe(32)
        self._on_used = on_used

    def use(self, token: str) -> bool:
        """Whether this is the valid token; it is then replaced by another."""
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode()):
            return False
        self.token = secrets.token_urlsafe(24)
        if self._on_used is not None:
            self._on_used(self.token)
        return True

    def cookie(self) -> str:
        """The header that signs a browser in, until that ends or the board does."""
        return f"{self.cookie_name}={self._session}; Path=/; HttpOnly; SameSite=Strict"

    def is_signed_in(self, cookies: str) -> bool:
        """Whether the header `Cookie` holds ours."""
        # By hand: other programs on localhost may have set what Python's parser stops at.
        for cookie in cookies.split(";"):
            name, _, value = cookie.strip().partition("=")
            if name == self.cookie_name and hmac.compare_digest(
                value.encode("utf-8", "replace"), self._session.encode()
            ):
                return True
        return False


def is_our_name(host: str) -> bool:
    """Whether a `Host` header names this machine as a browser beside it does, at any port."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, port = host, "0"
    return name.lower() in LOCAL_NAMES and port.isascii() and port.isdecimal()


class Guard:
    """An ASGI application that lets only those requests through to another that may be answered."""

    def __init__(self, application: Application, access: Access) -> None:
        self._application = application
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on; every answer gets the same headers."""
        if scope["type"] != "http":  # web sockets: the board has none
            return

        async def send_with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                given = [(name, value) for name, value in message["headers"] if name.decode() not in HEADERS]
                own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*given, *own]
            await send(message)

        answer = self._refusal(scope)
        if answer is None:
            await self._application(scope, receive, send_with_headers)
            return
        status, headers, body = answer
        fields = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), **headers}
        listed = [(name.encode(), value.encode()) for name, value in fields.items()]
        await send_with_headers({"type": "http.response.start", "status": status, "headers": listed})
        await send_with_headers(
            {"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body}
        )

    def _refusal(self, scope: Scope) -> tuple[int, dict[str, str], bytes] | None:
        """What a request gets instead of an answer: status, headers, body. None: it may be answered."""
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            known, text = name.decode("latin-1"), value.decode("latin-1")
            # Two Host headers are an attack; several Cookie headers are HTTP/2's way.
            headers[known] = f"{headers[known]}; {text}" if known in headers else text
        if not is_our_name(headers.get("host", "")):
            return 421, {}, b"the board answers to localhost alone\n"
        if scope["method"] not in ("GET", "HEAD"):
            return 405, {"allow": "GET, HEAD"}, b"the board is read-only\n"
        signed_in = self._access.is_signed_in(headers.get("cookie", ""))
        tokens = parse_qs(scope["query_string"].decode("latin-1")).get("token")
        if scope["path"] == "/" and tokens:
            if self._access.use(tokens[0]):
                return 303, {"location": "/", "set-cookie": self._access.cookie()}, b""
            if signed_in:
                return 303, {"location": "/"}, b""
        if signed_in:
            # A page of another port of this host has the same site, and so the cookie.
            if scope["path"] != "/" and headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
                return 403, {}, b"only the board's own page may ask\n"
            return None
        if scope["path"] == "/static/app.css":  # for the page below
            return None
        if scope["path"].startswith("/api/"):
            return 403, {}, b"not signed in\n"
        return 403, {"content-type": "text/html; charset=utf-8"}, _LOCKED.encode()
