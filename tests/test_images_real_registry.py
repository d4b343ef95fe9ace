"""Against the registry that many sites run: Debian's docker-registry, on loopback, with and without a login."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_lab import ImageLab
from registry_server import Registry, registry_program, run_registry, write_push
from registry_stub import OCI_INDEX, Image, digest_of, index_of, layer_of

from tuneplane.images.distribution import Refused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LOGIN = ("alice", "p4ss:word with blanks")


@pytest.fixture(scope="module", autouse=True)
def _program() -> None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        if os.environ.get("CI"):
            pytest.fail("docker-registry is fetched by apt as root, and this is a CI run")
        pytest.skip("docker-registry is fetched by apt as root")
    registry_program()


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with run_registry(tmp_path_factory.mktemp("registry"), free_address()) as found:
        yield found


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with run_registry(tmp_path_factory.mktemp("guarded"), free_address(), LOGIN) as found:
        yield found


@pytest.fixture
def lab(tmp_path: Path) -> ImageLab:
    return ImageLab(tmp_path)


def pushed(registry: Registry, folder: Path, name: str, tag: str, image: Image) -> str:
    described = write_push(folder / f"push-{tag}", name, tag, image.kind, image.manifest, image.blobs)
    digest = registry.push(described)
    assert digest == image.digest
    return f"{registry.address}/{name}"


@pytest.mark.parametrize("docker", [False, True])
def test_an_image_is_pulled_by_tag_and_by_digest(registry: Registry, lab: ImageLab, docker: bool) -> None:
    image = Image([layer_of({"x": os.urandom(2_000_000)}), layer_of({"y": b"y"})], docker=docker)
    name = pushed(registry, lab.base, f"team/{'docker' if docker else 'oci'}", "v1", image)
    by_tag = lab.pull(f"{name}:v1")
    assert all(layer in by_tag.path.read_bytes() for layer in image.layers)
    by_tag.path.unlink()
    assert lab.pull(f"{name}@{image.digest}").path == by_tag.path


def test_of_an_index_the_nodes_image_is_pulled(registry: Registry, lab: ImageLab) -> None:
    amd, arm = Image([layer_of({"x": b"amd"})]), Image([layer_of({"x": b"arm"})], "arm64")
    for tag, image in (("amd", amd), ("arm", arm)):
        pushed(registry, lab.base, "multi", tag, image)
    raw = index_of(amd, arm)
    digest = registry.push(write_push(lab.base / "index", "multi", "v1", OCI_INDEX, raw, {}))
    assert digest == digest_of(raw)
    lab.architecture = "arm64"
    frozen = lab.freeze(f"{registry.address}/multi:v1")
    assert (frozen.digest, frozen.manifest) == (digest, arm.digest)


def test_what_it_does_not_have_is_told_apart(registry: Registry, lab: ImageLab) -> None:
    name = pushed(registry, lab.base, "known", "v1", Image([layer_of({"x": b"k"})]))
    for asked, words in (
        (f"{name}:v9", "has no tag v9 of known"),
        (f"{name}@sha256:{'0' * 64}", f"does not have known@sha256:{'0' * 64}"),
        (f"{registry.address}/unknown:v1", "has no tag v1 of unknown"),
    ):
        with pytest.raises(Refused, match=words):
            lab.freeze(asked)


def test_bytes_that_changed_on_its_disk_are_refused(registry: Registry, lab: ImageLab) -> None:
    image = Image([layer_of({"x": os.urandom(500_000)})])
    name = pushed(registry, lab.base, "rotten", "v1", image)
    stored = registry.stored(digest_of(image.layers[0]))
    data = bytearray(stored.read_bytes())
    data[1000] ^= 1
    stored.write_bytes(data)
    with pytest.raises(Refused, match="gave bytes unlike their digest"):
        lab.pull(f"{name}:v1")
    assert list(lab.folder.glob("*.sif")) == []


def test_a_part_that_is_there_already_is_not_fetched_again(registry: Registry, lab: ImageLab) -> None:
    image = Image([layer_of({"x": os.urandom(3_000_000)})])
    name = pushed(registry, lab.base, "resumed", "v1", image)
    (layer,) = image.layers
    blobs = lab.folder / f".{image.digest.replace(':', '-')}.sif.work.{os.getuid()}" / "layout/blobs/sha256"
    blobs.mkdir(parents=True)
    blobs.parents[2].chmod(0o700)
    (blobs / f".{digest_of(layer).removeprefix('sha256:')}.part").write_bytes(layer[:2_000_000])
    lab.pull(f"{name}:v1")
    assert registry.fetched(digest_of(layer)) == [len(layer) - 2_000_000]


def test_a_login_is_needed_found_and_enough(guarded: Registry, lab: ImageLab) -> None:
    image = Image([layer_of({"x": b"secret image"})])
    name = pushed(guarded, lab.base, "private", "v1", image)
    with pytest.raises(Refused, match=r"denies access to .* \(without a login\)"):
        lab.freeze(f"{name}:v1")
    (lab.home / ".docker").mkdir()
    entry = {"auth": base64.b64encode(":".join(LOGIN).encode()).decode()}
    (lab.home / ".docker/config.json").write_text(json.dumps({"auths": {guarded.address: entry}}))
    assert lab.pull(f"{name}:v1").record.manifest == image.digest
    (lab.home / ".docker/config.json").write_text(
        json.dumps({"auths": {guarded.address: {"username": "alice", "password": "wrong"}}})
    )
    with pytest.raises(Refused, match=r"denies access to .* \(as alice, of "):
        lab.freeze(f"{name}:v2")
