"""What registries say that images consist of: read where it is sound, refused with the reason where it is not."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from registry_stub import DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST, Image, digest_of, index_of, layer_of

from tuneplane.images.manifest import Index, Malformed, Manifest, choose, config_architecture, parse

LAYER = layer_of({"bin/bash": b"x"})


def manifest(**changed: object) -> bytes:
    return json.dumps({**json.loads(Image([LAYER]).manifest), **changed}).encode()


@pytest.mark.parametrize("docker", [False, True])
def test_a_manifest_is_known_by_the_digest_of_its_very_bytes(docker: bool) -> None:
    image = Image([LAYER, LAYER], docker=docker)
    found = parse(image.manifest, image.kind)
    assert isinstance(found, Manifest)
    assert found.descriptor.digest == image.digest and found.raw == image.manifest
    assert [layer.digest for layer in found.layers] == [digest_of(LAYER)] * 2
    assert len(found.blobs) == 2, "the same layer twice is fetched once"
    assert found.size_bytes == len(LAYER) + len(image.config)


def test_an_index_gives_the_nodes_architecture_and_passes_over_attestations() -> None:
    amd, arm = Image([LAYER]), Image([LAYER], "arm64")
    attestation = {
        "mediaType": OCI_MANIFEST,
        "digest": "sha256:" + "0" * 64,
        "size": 1,
        "platform": {"os": "unknown", "architecture": "unknown"},
    }
    index = parse(index_of(amd, arm, extra=[attestation]), OCI_INDEX)
    assert isinstance(index, Index)
    for image in (amd, arm):
        chosen = choose(index, image.architecture)
        assert chosen is not None and chosen.digest == image.digest
    assert choose(index, "ppc64le") is None
    assert [str(p) for p in index.platforms] == ["linux/amd64", "linux/arm64"]


def test_of_several_variants_the_plain_one_is_taken() -> None:
    entries = json.loads(index_of(Image([LAYER]), Image([LAYER, LAYER])))
    entries["manifests"][0]["platform"]["variant"] = "v3"
    index = parse(json.dumps(entries).encode(), OCI_INDEX)
    assert isinstance(index, Index)
    chosen = choose(index, "amd64")
    assert chosen is not None and chosen.digest == entries["manifests"][1]["digest"]


@pytest.mark.parametrize(
    "said", ["application/json", "", "text/plain; charset=utf-8", DOCKER_MANIFEST + "; x=y"]
)
def test_a_wrong_content_type_does_not_matter_where_the_manifest_names_its_own(said: str) -> None:
    assert isinstance(parse(manifest(), said), Manifest)
    bare = json.loads(manifest())
    del bare["mediaType"]
    assert isinstance(parse(json.dumps(bare).encode(), said), Manifest)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"<html>Please log in</html>", "no manifest but text/html: is a proxy or login page in between?"),
        (b"", "no manifest but text/html"),
        (b"[]", "no manifest"),
        (b"[" * 100_000, "no manifest"),
        (b"\xff\xfe", "no manifest"),
        (json.dumps({"schemaVersion": 1, "fsLayers": []}).encode(), "of Docker's old schema 1"),
        (manifest(fsLayers=[]), "of Docker's old schema 1"),
        (manifest(manifests=[]), "can be read as an index and as an image"),
        (manifest(mediaType="application/vnd.cncf.helm"), "which is no container image"),
        (manifest(layers=[]), "no layers"),
        (manifest(layers=7), "no layers"),
        (manifest(layers=[{}] * 2000), "more than 1000"),
        (manifest(layers=[7]), "is not described"),
        (manifest(layers=[{"digest": "sha256:0", "size": 1}]), "has no sha256 digest"),
        (manifest(layers=[{"digest": "sha512:" + "0" * 128, "size": 1}]), "has no sha256 digest"),
        (manifest(layers=[{"digest": "sha256:../../" + "0" * 58, "size": 1}]), "has no sha256 digest"),
        (manifest(layers=[{"digest": "sha256:" + "0" * 64 + "\n", "size": 1}]), "has no sha256 digest"),
        (manifest(layers=[{"digest": "sha256:" + "0" * 64, "size": -1}]), "has no size"),
        (manifest(layers=[{"digest": "sha256:" + "0" * 64, "size": True}]), "has no size"),
        (manifest(layers=[{"digest": "sha256:" + "0" * 64, "size": 1e9}]), "has no size"),
        (manifest(layers=[{"digest": "sha256:" + "0" * 64, "size": 1 << 60}]), "has no size"),
        (
            manifest(config={"mediaType": "application/x-sif", "digest": "sha256:" + "0" * 64, "size": 2}),
            "it holds application/x-sif, which is no container image",
        ),
        (json.dumps({"mediaType": OCI_INDEX, "manifests": 7}).encode(), "has no list of manifests"),
        (json.dumps({"mediaType": OCI_INDEX}).encode(), "has no list of manifests"),
        (json.dumps({"schemaVersion": 2}).encode(), "its kind is text/html"),
    ],
)  # fmt: skip
def test_what_is_no_image_is_refused_with_the_reason(raw: bytes, words: str) -> None:
    with pytest.raises(Malformed) as error:
        parse(raw, "text/html")
    assert words in str(error.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("ab:/", max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(
    ["schemaVersion", "mediaType", "config", "layers", "manifests", "digest", "size", "platform"]
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(keys, json_values | st.just([{"digest": "sha256:" + "0" * 64, "size": 1}]), max_size=5)
)
def test_whatever_a_registry_says_it_is_an_image_or_refused(document: dict[str, object]) -> None:
    raw = json.dumps(document).encode()
    try:
        found = parse(raw, "application/json")
    except Malformed:
        return
    assert isinstance(found, (Index, Manifest))


def test_the_configuration_names_the_architecture() -> None:
    assert config_architecture(Image([LAYER], "arm64").config) == "arm64"
    for raw in (b"{}", b'{"architecture": 7}', b"nonsense", b'{"architecture": ""}'):
        with pytest.raises(Malformed):
            config_architecture(raw)
