"""A fetched and checked image, served once more on loopback, for enroot, which takes images from registries alone.

Convert calls `serve_layout` while enroot imports. Only who knows the password gets anything: it is random, for
this one import, and enroot finds it in a file of mode 0600, as it finds every login.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import re
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

USER = "tuneplane"
NAME, TAG = "image", "prepared"


@dataclass(frozen=True)
class Served:
    """Where the image is had, and with which password."""

    port: int
    password: str = field(repr=False)

    @property
    def uri(self) -> str:
        """The image in enroot's form, `docker://REGISTRY#IMAGE:TAG`."""
        return f"docker://127.0.0.1:{self.port}#{NAME}:{TAG}"

    def environment(self, scratch: Path) -> dict[str, str]:
        """What enroot is to know: the login, plain HTTP, no proxy, and folders below `scratch`.

        The login's machine has no port: enroot 3.4 and later look it up so, earlier ones with the port.
        """
        config = scratch / "enroot"
        config.mkdir(mode=0o700)
        file = config / ".credentials"
        file.touch(0o600)
        file.write_text(f"machine 127.0.0.1 login {USER} password {self.password}\n", encoding="ascii")
        places = {
            "ENROOT_CONFIG_PATH": config,
            "ENROOT_CACHE_PATH": scratch / "cache",
            "ENROOT_DATA_PATH": scratch / "data",
            "ENROOT_RUNTIME_PATH": scratch / "run",
            "ENROOT_TEMP_PATH": scratch,
        }
        plain = {"ENROOT_ALLOW_HTTP": "yes", "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
        return {**{name: str(path) for name, path in places.items()}, **plain}


@contextlib.contextmanager
def serve_layout(layout: Path) -> Iterator[Served]:
    """Serve the one image of an OCI layout on 127.0.0.1 until the context ends."""
    password = secrets.token_hex(24)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(layout, password))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield Served(server.server_address[1], password)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(layout: Path, password: str) -> type[http.server.BaseHTTPRequestHandler]:
    entry = json.loads((layout / "index.json").read_text(encoding="utf-8"))["manifests"][0]
    expected = "Basic " + base64.b64encode(f"{USER}:{password}".encode()).decode()
    places = re.compile(rf"/v2/{NAME}/(?:manifests/{TAG}|(?:manifests|blobs)/sha256:([0-9a-f]{{64}}))")

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            if not secrets.compare_digest(self.headers.get("Authorization", ""), expected):
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="tuneplane"')
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            found = places.fullmatch(self.path)
            digest = (found[1] or entry["digest"].removeprefix("sha256:")) if found else ""
            path = layout / "blobs" / "sha256" / digest
            if not digest or not path.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            is_manifest = f"sha256:{digest}" == entry["digest"]
            self.send_header(
                "Content-Type", entry["mediaType"] if is_manifest else "application/octet-stream"
            )
            self.send_header("Docker-Content-Digest", f"sha256:{digest}")
            self.send_header("Content-Length", str(path.stat().st_size))
            self.end_headers()
            if with_body:
                with path.open("rb") as file, contextlib.suppress(OSError):
                    while block := file.read(1 << 20):
                        self.wfile.write(block)

        def log_message(self, *_: Any) -> None:
            """Nobody reads a log of it."""

    return Handler
