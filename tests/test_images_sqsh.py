"""The squashfs that enroot and pyxis start: made by `enroot import` from what was fetched and checked already.

enroot is not packaged by Debian. The program here obeys its page of `import` and reads its settings as 4.1.2
does; that release itself was run once against the same server.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_lab import ImageLab
from registry_stub import Image, Stub, digest_of, layer_of, program, stub_registry

from tuneplane.images.convert import sqsh_argv
from tuneplane.images.download import Blobs, write_layout
from tuneplane.images.folder import ImageFolder
from tuneplane.images.manifest import Manifest, parse
from tuneplane.images.place import Builder, Place
from tuneplane.images.pull import fetch, freeze
from tuneplane.images.reference import parse_reference
from tuneplane.images.serve import serve_layout
from tuneplane.kernel.errors import OperationError

pytestmark = pytest.mark.timeout(60)

ENROOT = """#!/usr/bin/env python3
import base64, hashlib, json, os, re, stat, sys, urllib.request
from pathlib import Path

with open({log!r}, "a") as file:
    file.write(json.dumps({{"argv": sys.argv[1:], "environ": dict(os.environ)}}) + "\\n")
words = sys.argv[1:]
assert words.pop(0) == "import"
arch = output = None
while words[0].startswith("-"):
    option = words.pop(0)
    if option in ("-a", "--arch"):
        arch = words.pop(0)
    elif option in ("-o", "--output"):
        output = words.pop(0)
    else:
        sys.exit("[ERROR] unknown option " + option)
(uri,) = words
assert arch in ("x86_64", "aarch64", "ppc64le"), arch  # common::debarch
found = re.fullmatch(r"docker://([^#/@]+)#([a-z0-9/._-]+):([A-Za-z0-9._:-]+)", uri)
assert found, uri
registry, image, tag = found.groups()
if os.path.exists(output):
    sys.exit("[ERROR] File already exists: " + output)
assert os.environ["ENROOT_ALLOW_HTTP"] not in ("n", "no", "false", "")
for name in ("CACHE", "DATA", "RUNTIME", "CONFIG", "TEMP"):
    Path(os.environ[f"ENROOT_{{name}}_PATH"]).mkdir(parents=True, exist_ok=True)
creds = Path(os.environ["ENROOT_CONFIG_PATH"]) / ".credentials"
assert stat.S_IMODE(creds.stat().st_mode) == 0o600
machine, login = re.fullmatch(r"machine (\\S+) login (\\S+) password \\S+\\n", creds.read_text()).groups()
assert machine == registry.partition(":")[0]
password = creds.read_text().split()[-1]

def get(path, method="GET", auth=True):
    request = urllib.request.Request(f"http://{{registry}}/v2/{{image}}/{{path}}", method=method)
    if auth:
        word = base64.b64encode(f"{{login}}:{{password}}".encode()).decode()
        request.add_header("Authorization", f"Basic {{word}}")
    opener = urllib.request.build_opener()  # obeys the proxies' variables, as curl does
    return opener.open(request, timeout=10)

try:
    get(f"manifests/{{tag}}", "HEAD", auth=False)
    sys.exit("[ERROR] it lets anybody in")
except urllib.error.HTTPError as error:
    assert error.code == 401 and error.headers["WWW-Authenticate"].startswith("Basic realm="), error.headers
manifest = json.loads(get(f"manifests/{{tag}}").read())
blobs = [get("blobs/" + part["digest"]).read() for part in (manifest["config"], *manifest["layers"])]
for part, data in zip((manifest["config"], *manifest["layers"]), blobs):
    if "sha256:" + hashlib.sha256(data).hexdigest() != part["digest"]:
        sys.exit("Checksum mismatch: " + part["digest"])
Path(output).write_bytes(b"hsqs" + b"".join(blobs[1:]))
"""


@pytest.fixture
def stub() -> Iterator[Stub]:
    with stub_registry() as found:
        yield found


@pytest.fixture
def lab(tmp_path: Path) -> ImageLab:
    made = ImageLab(tmp_path)
    program(made.programs, "enroot", ENROOT.format(log=str(made.programs / "calls")))
    return made


def place(lab: ImageLab, architecture: str = "amd64") -> Place:
    builder = Builder("sqsh", str(lab.programs / "enroot"), lab.base / "scratch")
    return Place((ImageFolder(lab.folder),), builder, architecture, "alice")


def pull(lab: ImageLab, image: str, architecture: str = "amd64") -> Path:
    where = place(lab, architecture)
    return fetch(freeze(parse_reference(image), where, lab.environ, lab.cache), where).path


@pytest.mark.parametrize(("architecture", "said"), [("amd64", "x86_64"), ("arm64", "aarch64")])
def test_a_squashfs_is_made_by_enroot_of_what_was_checked(
    stub: Stub, lab: ImageLab, architecture: str, said: str
) -> None:
    image = Image([layer_of({"x": os.urandom(3_000_000)}), layer_of({"y": b"y"})], architecture)
    file = pull(lab, f"{stub.add(image, 'v1')}:v1", architecture)
    assert file.name == f"{image.digest.replace(':', '-')}.sqsh"
    assert file.read_bytes() == b"hsqs" + b"".join(image.layers)
    (call,) = lab.builds()
    assert call["argv"][:3] == ["import", "--arch", said]
    assert list((lab.base / "scratch").iterdir()) == []


@pytest.mark.slow
def test_one_image_may_be_there_in_both_forms(stub: Stub, lab: ImageLab) -> None:
    name = stub.add(Image([layer_of({"x": b"x"})]), "v1")
    assert {pull(lab, f"{name}:v1").suffix, lab.pull(f"{name}:v1").path.suffix} == {".sqsh", ".sif"}


def test_enroot_asks_neither_the_registry_nor_a_proxy_and_its_password_is_in_no_argument(
    stub: Stub, lab: ImageLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    pull(lab, f"{stub.add(Image([layer_of({'x': b'x'})]), 'v1')}:v1")
    (call,) = lab.builds()
    assert stub.host not in " ".join(call["argv"])
    assert call["argv"][-1].startswith("docker://127.0.0.1:") and call["argv"][-1].endswith("#image:prepared")
    assert "/enroot" in call["environ"]["ENROOT_CONFIG_PATH"], "the folder of the login, not the login"
    assert stub.host not in json.dumps(call["environ"])


def test_what_enroot_says_of_its_failure_is_told(stub: Stub, lab: ImageLab) -> None:
    program(
        lab.programs, "enroot", "#!/bin/sh\necho '[INFO] Querying'; echo '[ERROR] no space' >&2; exit 1\n"
    )
    with pytest.raises(OperationError, match=r"enroot could not make the image .*: \[ERROR\] no space"):
        pull(lab, f"{stub.add(Image([layer_of({'x': b'x'})]), 'v1')}:v1")


def test_the_whole_argument_list() -> None:
    assert sqsh_argv("enroot", Path("/a b/x.sqsh"), "docker://127.0.0.1:5#image:prepared", "amd64") == [
        "enroot",
        "import",
        "--arch",
        "x86_64",
        "--output",
        "/a b/x.sqsh",
        "docker://127.0.0.1:5#image:prepared",
    ]


def test_nobody_else_on_the_machine_gets_the_image(tmp_path: Path) -> None:
    image = Image([layer_of({"x": b"private"})])
    manifest = parse(image.manifest, image.kind)
    assert isinstance(manifest, Manifest)
    blobs = Blobs(tmp_path / "layout")
    blobs.folder.mkdir(parents=True)
    for digest, data in image.blobs.items():
        (blobs.folder / digest.removeprefix("sha256:")).write_bytes(data)
    write_layout(tmp_path / "layout", manifest)
    (tmp_path / "outside").write_bytes(b"outside")
    with serve_layout(tmp_path / "layout") as served:
        base = f"http://127.0.0.1:{served.port}"
        assert served.password not in repr(served)
        for path in ("/v2/", "/v2/image/manifests/prepared", f"/v2/image/blobs/{digest_of(image.layers[0])}"):
            for word in ("", "Basic", "Basic dHVuZXBsYW5lOg==", f"Bearer {served.password}"):
                request = urllib.request.Request(base + path, headers={"Authorization": word} if word else {})
                with pytest.raises(urllib.error.HTTPError) as error:
                    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10)
                assert error.value.code == 401
    with pytest.raises(urllib.error.URLError):
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(base, timeout=10)
