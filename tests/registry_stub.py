"""A registry of the tests' own: serves images that tests make, counts what it serves, and fails as it is told.

Beside the real registry of `registry_lab`, for what a real one does not do on demand.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import http.server
import io
import json
import ssl
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def layer_of(files: dict[str, bytes]) -> bytes:
    """A gzipped tar of these files."""
    said = io.BytesIO()
    with tarfile.open(fileobj=said, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return gzip.compress(said.getvalue(), 1, mtime=0)


@dataclass
class Image:
    """An image as a registry has it: one manifest, a configuration, layers."""

    layers: list[bytes]
    architecture: str = "amd64"
    environment: list[str] = field(default_factory=list)
    docker: bool = False

    def __post_init__(self) -> None:
        self.kind = DOCKER_MANIFEST if self.docker else OCI_MANIFEST
        diff_ids = [digest_of(gzip.decompress(layer)) for layer in self.layers]
        self.config = json.dumps(
            {
                "architecture": self.architecture,
                "os": "linux",
                "config": {"Env": self.environment, "Cmd": ["bash"]},
                "rootfs": {"type": "layers", "diff_ids": diff_ids},
            }
        ).encode()
        self.manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": self.kind,
                "config": self._described(DOCKER_CONFIG if self.docker else OCI_CONFIG, self.config),
                "layers": [
                    self._described(DOCKER_LAYER if self.docker else OCI_LAYER, x) for x in self.layers
                ],
            }
        ).encode()

    @staticmethod
    def _described(kind: str, data: bytes) -> dict[str, Any]:
        return {"mediaType": kind, "digest": digest_of(data), "size": len(data)}

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)

    @property
    def blobs(self) -> dict[str, bytes]:
        return {digest_of(data): data for data in (self.config, *self.layers)}


def index_of(*images: Image, extra: list[dict[str, Any]] | None = None) -> bytes:
    """An index of images for several architectures."""
    entries = [
        {
            "mediaType": image.kind,
            "digest": image.digest,
            "size": len(image.manifest),
            "platform": {"os": "linux", "architecture": image.architecture},
        }
        for image in images
    ]
    return json.dumps(
        {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [*(extra or []), *entries]}
    ).encode()


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""


Answer = Callable[["Handler"], bool]
"""Answers a request in place of the registry; False where it does not want to."""


class Stub:
    """The registry. `manifests` is (name or digest) → (media type, bytes) for every repository alike."""

    def __init__(self, tls: tuple[Path, Path] | None = None) -> None:
        self.manifests: dict[str, tuple[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.answers: list[Answer] = []
        self.served_bytes = 0
        self.login: tuple[str, str] | None = None  # asked for by Bearer at /token, or Basic
        self.basic = False
        self.tokens: set[str] = set()
        self.lock = threading.Lock()
        stub = self

        class Bound(Handler):
            registry = stub

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bound)
        self.server.daemon_threads = True
        self.scheme = "http"
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
            self.scheme = "https"
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.thread.start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def add(self, image: Image, *tags: str) -> str:
        """Put an image there; returns `host/trainer`."""
        self.blobs.update(image.blobs)
        for name in (image.digest, *tags):
            self.manifests[name] = (image.kind, image.manifest)
        return f"{self.host}/trainer"

    def add_index(self, raw: bytes, *tags: str) -> str:
        for name in (digest_of(raw), *tags):
            self.manifests[name] = (OCI_INDEX, raw)
        return digest_of(raw)

    def paths(self, method: str = "GET") -> list[str]:
        return [request.path for request in self.requests if request.method == method]

    def layers_asked(self) -> list[Request]:
        return [r for r in self.requests if r.method == "GET" and "/blobs/" in r.path]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextlib.contextmanager
def stub_registry(tls: tuple[Path, Path] | None = None) -> Iterator[Stub]:
    stub = Stub(tls)
    try:
        yield stub
    finally:
        stub.close()


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection to the stub."""

    protocol_version = "HTTP/1.1"
    registry: Stub

    def do_GET(self) -> None:
        self._handle()

    def do_HEAD(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def _handle(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size) if size else b""
        with self.registry.lock:
            self.registry.requests.append(Request(self.command, self.path, dict(self.headers), body))
            answers = list(self.registry.answers)
        try:
            if any(answer(self) for answer in answers):
                return
            self._serve()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def _serve(self) -> None:
        if self.path.startswith("/token"):
            self._token()
            return
        if not self._allowed():
            realm = f"{self.registry.scheme}://{self.registry.host}/token"
            word = 'Basic realm="stub"' if self.registry.basic else f'Bearer realm="{realm}",service="stub"'
            self.answer(401, b'{"errors":[{"code":"UNAUTHORIZED"}]}', {"WWW-Authenticate": word})
            return
        parts = self.path.split("/")
        kind, name = parts[-2], parts[-1]
        if kind == "manifests":
            found = self.registry.manifests.get(name)
            if found is None:
                self.answer(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN"}]}')
                return
            headers = {"Content-Type": found[0], "Docker-Content-Digest": digest_of(found[1])}
            self.answer(200, found[1], headers)
        elif kind == "blobs" and name in self.registry.blobs:
            self.blob(self.registry.blobs[name])
        else:
            self.answer(404, b'{"errors":[{"code":"BLOB_UNKNOWN"}]}')

    def _allowed(self) -> bool:
        said = self.headers.get("Authorization", "")
        if self.registry.login is None:
            return True
        if self.registry.basic:
            return said == self._basic(self.registry.login)
        return said.removeprefix("Bearer ") in self.registry.tokens

    @staticmethod
    def _basic(login: tuple[str, str]) -> str:
        return "Basic " + base64.b64encode(":".join(login).encode()).decode()

    def _token(self) -> None:
        assert self.registry.login is not None
        if self.headers.get("Authorization") != self._basic(self.registry.login):
            self.answer(401, b"{}")
            return
        token = f"token-{len(self.registry.tokens)}"
        self.registry.tokens.add(token)
        self.answer(200, json.dumps({"token": token}).encode())

    def blob(self, data: bytes, cut: int | None = None) -> None:
        """A blob, ranges obeyed. cut: break the connection after so many bytes of it."""
        said = self.headers.get("Range", "")
        start = int(said.removeprefix("bytes=").rstrip("-")) if said else 0
        rest = data[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        for at in range(0, len(rest), 65536):
            block = rest[at : at + 65536]
            if cut is not None and at + len(block) > cut:
                block = rest[at:cut]
            self.wfile.write(block)
            with self.registry.lock:
                self.registry.served_bytes += len(block)
            if cut is not None and at + len(block) >= cut:
                self.close_connection = True
                self.wfile.flush()
                self.connection.shutdown(2)
                return

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> bool:
        """A whole answer."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "Content-Length" not in (headers or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        return True

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def program(folder: Path, name: str, text: str) -> Path:
    """An executable."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


APPTAINER = '''#!/usr/bin/env python3
"""Obeys `apptainer build` as TunePlane says it, strictly; the image holds the digests of what it was made from."""
import hashlib, json, os, sys, time
from pathlib import Path

LOG = {log!r}
with open(LOG, "a") as file:
    file.write(json.dumps({{"argv": sys.argv[1:], "environ": dict(os.environ), "cwd": os.getcwd()}}) + "\\n")
time.sleep({sleep})
if {fail!r}:
    print("\\x1b[33mWARNING:\\x1b[0m many lines", file=sys.stderr)
    print("\\x1b[31mFATAL:\\x1b[0m   While performing build: " + {fail!r}, file=sys.stderr)
    sys.exit(255)
words = sys.argv[1:]
assert words[0] == "build", words
assert words[1] == "--disable-cache", words
assert words[2] == "--arch", words
architecture, target, source = words[3:]
assert source.startswith("oci:") and ":" not in source[4:], source
assert not os.path.exists(target), target
assert os.path.isdir(os.environ["APPTAINER_TMPDIR"])
layout = Path(source[4:])
assert json.loads((layout / "oci-layout").read_text()) == {{"imageLayoutVersion": "1.0.0"}}
(entry,) = json.loads((layout / "index.json").read_text())["manifests"]

def blob(described):
    data = (layout / "blobs" / "sha256" / described["digest"][7:]).read_bytes()
    assert "sha256:" + hashlib.sha256(data).hexdigest() == described["digest"], described
    assert len(data) == described["size"], described
    return data

manifest = json.loads(blob(entry))
config = json.loads(blob(manifest["config"]))
assert config["architecture"] == architecture, config
layers = [blob(layer) for layer in manifest["layers"]]
head = b"#!/usr/bin/env run-singularity\\n".ljust(32, b"\\0") + b"SIF_MAGIC\\0"
Path(target).write_bytes(head + entry["digest"].encode() + b"".join(layers))
os.chmod(target, 0o755)
'''


def fake_apptainer(folder: Path, *, sleep: float = 0, fail: str = "") -> Path:
    """Puts an `apptainer` into `folder` that builds as the real one is told to; its log is `calls`."""
    log = folder / "calls"
    return program(folder, "apptainer", APPTAINER.format(log=str(log), sleep=sleep, fail=fail))
