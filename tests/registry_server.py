"""A real OCI registry for tests: Debian's docker-registry, unpacked beside the testbed's packages, and `push`.

As a program, `registry_server.py push URL FOLDER [LOGIN_FILE]`, it pushes the image that `write_push` described:
so it runs where the registry is reached, on the testbed's login host.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("TUNEPLANE_TESTBED_CACHE") or "/var/cache/tuneplane-testbed") / "docker-registry"
START_TIMEOUT_S = 20.0

CONFIG = """\
version: 0.1
log: {{level: info, formatter: json, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: {root}}}
  delete: {{enabled: true}}
http: {{addr: {address}}}
{auth}
"""


def registry_program() -> Path:
    """The registry's executable, fetched once. Raises RuntimeError where apt cannot deliver it."""
    from filelock import FileLock

    program = CACHE / "root/usr/bin/docker-registry"
    with contextlib.suppress(FileExistsError):
        CACHE.mkdir(parents=True)
    with FileLock(CACHE / "lock"):
        if program.exists():
            return program
        sys.path.insert(0, str(TESTS.parent / "slurm" / "testbed"))
        from packages import Apt, TestbedError, read_sources

        try:
            apt = Apt(CACHE / "apt", [source.line() for source in read_sources()], "")
            apt.run("update")
            apt.run("download", "docker-registry", cwd=CACHE)
        except TestbedError as error:
            raise RuntimeError(str(error)) from None
        (deb,) = CACHE.glob("docker-registry_*.deb")
        subprocess.run(["dpkg-deb", "--extract", str(deb), str(CACHE / "root")], check=True, timeout=60)
        return program


@dataclass
class Registry:
    """A running registry. `enter`: the words that start a program where it runs."""

    folder: Path
    address: str
    login: tuple[str, str] | None = None
    enter: list[str] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def answers(self) -> list[dict[str, object]]:
        """Each answer that it gave, by its own log: method, uri, status, bytes written."""
        found = []
        for line in self.log.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if "http.response.status" in entry:
                    found.append(entry)
        return found

    def fetched(self, digest: str) -> list[int]:
        """How many bytes each GET of a blob was given."""
        return [
            int(str(entry.get("http.response.written", 0)))
            for entry in self.answers()
            if entry["http.request.method"] == "GET"
            and str(entry["http.request.uri"]).endswith(f"/blobs/{digest}")
        ]

    def stored(self, digest: str) -> Path:
        """The file in which it keeps a blob."""
        name = digest.removeprefix("sha256:")
        return self.folder / "data/docker/registry/v2/blobs/sha256" / name[:2] / name / "data"

    def push(self, folder: Path, timeout_s: float = 60) -> str:
        """Push what `write_push` wrote; returns the manifest's digest."""
        # A copy: where it runs, /tmp is another, and a checkout may lie there.
        program = folder / "registry_server.py"
        program.write_bytes(Path(__file__).read_bytes())
        words = [*self.enter, "/usr/bin/python3", str(program), "push", self.address, str(folder)]
        if self.login is not None:
            file = folder / "login"
            file.write_text(":".join(self.login))
            words.append(str(file))
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@contextlib.contextmanager
def run_registry(
    folder: Path, address: str, login: tuple[str, str] | None = None, enter: list[str] | None = None
) -> Iterator[Registry]:
    """A registry that keeps its images in `folder` and ends with this context, or with this process."""
    program = registry_program()
    folder.mkdir(parents=True, exist_ok=True)
    auth = ""
    if login is not None:
        (folder / "htpasswd").write_text(f"{login[0]}:{bcrypt(login[1])}\n")
        auth = f"auth: {{htpasswd: {{realm: test, path: {folder}/htpasswd}}}}"
    config = folder / "config.yml"
    config.write_text(CONFIG.format(root=folder / "data", address=address, auth=auth))
    registry = Registry(folder, address, login, enter or [])
    with registry.log.open("wb") as sink:
        words = ["setpriv", "--pdeathsig", "KILL", "--", *registry.enter]
        words += ["setpriv", "--pdeathsig", "KILL", "--", str(program), "serve", str(config)]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while b"listening on" not in registry.log.read_bytes():
            assert process.poll() is None and time.monotonic() < deadline, registry.log.read_text()
            time.sleep(0.05)
        yield registry
    finally:
        process.kill()
        process.wait(10)


def bcrypt(password: str) -> str:
    """A password as docker-registry wants it, by perl's crypt(3): it must stand in no argument list."""
    code = 'my $p = <STDIN>; print crypt($p, "\\$2b\\$05\\$" . "abcdefghijklmnopqrstuu");'
    done = subprocess.run(
        ["perl", "-e", code], input=password, capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout.startswith("$2b$05$"), done
    return done.stdout


def write_push(
    folder: Path, name: str, tag: str, kind: str, manifest: bytes, blobs: dict[str, bytes]
) -> Path:
    """Describe an image for `push`."""
    folder.mkdir(parents=True)
    (folder / "manifest").write_bytes(manifest)
    (folder / "image.json").write_text(
        json.dumps({"name": name, "tag": tag, "kind": kind, "blobs": list(blobs)})
    )
    for digest, data in blobs.items():
        (folder / digest.replace(":", "-")).write_bytes(data)
    return folder


def push(url: str, folder: Path, login: str) -> str:
    """The OCI distribution specification, "Push"; returns the digest that the registry says."""
    image = json.loads((folder / "image.json").read_text())
    headers = {"Authorization": "Basic " + base64.b64encode(login.encode()).decode()} if login else {}

    def send(method: str, to: str, data: bytes, kind: str = "application/octet-stream") -> dict[str, str]:
        request = urllib.request.Request(to, data, {**headers, "Content-Type": kind}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(answer.headers)

    base = f"http://{url}/v2/{image['name']}"
    for digest in image["blobs"]:
        place = send("POST", f"{base}/blobs/uploads/", b"")["Location"]
        mark = "&" if "?" in place else "?"
        send("PUT", f"{place}{mark}digest={digest}", (folder / digest.replace(":", "-")).read_bytes())
    data = (folder / "manifest").read_bytes()
    return send("PUT", f"{base}/manifests/{image['tag']}", data, image["kind"])["Docker-Content-Digest"]


if __name__ == "__main__":
    urllib.request.install_opener(urllib.request.build_opener(urllib.request.ProxyHandler({})))
    _, _, where, described, *rest = sys.argv
    print(push(where, Path(described), Path(rest[0]).read_text() if rest else ""))
