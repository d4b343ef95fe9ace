"""The names of images in registries: what is read, what is refused and in which words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuneplane.images import Reference, parse_reference
from tuneplane.images.reference import parse_registry
from tuneplane.kernel.errors import UsageError

DIGEST = "sha256:" + "0a" * 32


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag", "digest"),
    [
        ("alpine", "docker.io", "library/alpine", "latest", None),
        ("alpine:3.20", "docker.io", "library/alpine", "3.20", None),
        ("pytorch/pytorch", "docker.io", "pytorch/pytorch", "latest", None),
        ("docker://alpine", "docker.io", "library/alpine", "latest", None),
        ("docker.io/alpine", "docker.io", "library/alpine", "latest", None),
        ("index.docker.io/alpine", "docker.io", "library/alpine", "latest", None),
        ("nvcr.io/nvidia/pytorch:25.01-py3", "nvcr.io", "nvidia/pytorch", "25.01-py3", None),
        ("registry.example.com/my-trainer:v1", "registry.example.com", "my-trainer", "v1", None),
        ("registry.example.com:5000/a/b/c", "registry.example.com:5000", "a/b/c", "latest", None),
        ("localhost/x", "localhost", "x", "latest", None),
        ("localhost:5000/x:1", "localhost:5000", "x", "1", None),
        ("127.0.0.1:5000/x", "127.0.0.1:5000", "x", "latest", None),
        ("[2001:db8::1]/x", "[2001:db8::1]", "x", "latest", None),
        ("[::1]:5000/x:1", "[::1]:5000", "x", "1", None),
        (f"nvcr.io/x@{DIGEST}", "nvcr.io", "x", None, DIGEST),
        (f"nvcr.io/x:1@{DIGEST}", "nvcr.io", "x", "1", DIGEST),
        ("EXAMPLE/x", "EXAMPLE", "x", "latest", None),
        ("a.b/c__d/e--f/g.h_i:_x", "a.b", "c__d/e--f/g.h_i", "_x", None),
        ("host:5000", "docker.io", "library/host", "5000", None),
        ("x:" + "t" * 128, "docker.io", "library/x", "t" * 128, None),
    ],
)
def test_a_reference_is_read_as_docker_reads_it(text, registry, repository, tag, digest):
    assert parse_reference(text) == Reference(registry, repository, tag, digest)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty"),
        ("docker://", "empty"),
        ("a b", "' ' (U+0020)"),
        ("alpine\n", r"'\n' (U+000A)"),
        ("alpine\x00", r"(U+0000)"),
        ("nvcr.io/x\x7f", "(U+007F)"),
        ("nvcr.iо/x", "(U+043E)"),  # a Cyrillic o
        ("registry。example/x", "(U+3002)"),  # an ideographic full stop, which IDNA reads as a dot
        ("https://nvcr.io/x", "only docker:// may stand before it"),
        ("docker://docker://x", "only docker:// may stand before it"),
        ("oras://x/y", "only docker:// may stand before it"),
        ("nvcr.io#nvidia/pytorch:1", "'#' has no place"),
        ("user@nvcr.io/x", "user names and passwords"),
        ("user:secret@nvcr.io/x", "user names and passwords"),
        (f"nvcr.io@evil.example/x@{DIGEST}", "user names and passwords"),
        ("x@", "'' is no digest"),
        ("x@sha256:abc", "is no digest"),
        ("x@sha512:" + "a" * 128, "is no digest"),
        ("x@sha256:" + "A" * 64, "is no digest"),
        (f"x@{DIGEST}@{DIGEST}", "is no digest"),
        ("x:", "'' is no tag"),
        ("x:.a", "is no tag"),
        ("x:a:b", "'a:b' is no tag"),
        ("x:" + "t" * 129, "is no tag"),
        ("x:a/b", "is no port"),  # a colon before a slash is a port's
        ("a.b:99999/x", "'99999' is no port"),
        ("a.b:0443/x", "'0443' is no port"),
        ("a.b:/x", "'' is no port"),
        ("a.b./x", "'a.b.' is no host"),
        (".a/x", "'.a' is no host"),
        ("-a.b/x", "is no host"),
        ("a..b/x", "is no host"),
        ("a.b_c/x", "is no host"),
        ("[::1/x", "is no IPv6 address"),
        ("[::zz]/x", "is no IPv6 address"),
        ("[fe80::1%25eth0]/x", "is no IPv6 address"),
        ("[::1]5000/x", "has no place after the address"),
        ("nvcr.io/Nvidia/x", "'Nvidia' holds capitals"),
        ("nvcr.io/../x", "'..' has no place"),
        ("nvcr.io/x/..", "'..' has no place"),
        ("nvcr.io//x", "is empty"),
        ("nvcr.io/x/", "is empty"),
        ("nvcr.io/", "is empty"),
        ("/x", "is empty"),
        ("nvcr.io/a___b", "is no part of a repository's name"),
        ("nvcr.io/-a", "is no part of a repository's name"),
        ("nvcr.io/a%2fb", "is no part of a repository's name"),
        ("nvcr.io/x;id", "is no part of a repository's name"),
        ("nvcr.io/$(id)", "is no part of a repository's name"),
        ("0a" * 32, "an image's id"),
        ("a/" * 130 + "b", "longer than 255"),
        ("x" * 10_000, "longer than 512"),
    ],
)
def test_what_is_no_reference_is_refused_and_the_reason_named(text, words):
    with pytest.raises(UsageError) as error:
        parse_reference(text, "--image")
    (fault,) = error.value.faults
    assert words in fault.what
    assert fault.where == "--image"
    assert len(fault.what) < 1000
    assert "\n" not in fault.what and "\x00" not in fault.what


host = st.from_regex(r"[a-zA-Z0-9]{1,5}(-[a-z0-9]{1,5})?(\.[a-zA-Z0-9]{1,8}){1,3}", fullmatch=True)
port = st.integers(1, 65535).map(lambda number: f":{number}") | st.just("")
registry_text = st.builds(lambda h, p: h + p, host | st.just("localhost") | st.just("[2001:db8::1]"), port)
component = st.from_regex(r"[a-z0-9]{1,6}((\.|_|__|-{1,4})[a-z0-9]{1,6}){0,3}", fullmatch=True)
repository_text = st.lists(component, min_size=1, max_size=5).map("/".join)
tag_text = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", fullmatch=True)
digest_text = st.from_regex(r"sha256:[0-9a-f]{64}", fullmatch=True)


@pytest.mark.contract("C11")
@pytest.mark.parametrize(
    "before", ["alice:hunter2", "docker://alice:hunter2", "https://a:hunter2", "hunter2", "a:hun@/ter2"]
)
@pytest.mark.parametrize(
    "behind", ["nvcr.io/x:v1", "nvcr.io:5000/a/b", "nvcr.io/x@sha256:" + "0a" * 32, "nvcr.io/x y"]
)
def test_a_login_that_was_put_into_a_name_is_refused_and_never_shown(before, behind):
    with pytest.raises(UsageError) as error:
        parse_reference(f"{before}@{behind}")
    (fault,) = error.value.faults
    assert not [part for part in ("hun", "ter2", "alice") if part in str(fault)]
    assert behind in fault.what or "U+0020" in fault.what
    with pytest.raises(UsageError) as error:
        parse_registry(f"{before}@nvcr.io:5000")
    assert "hunter2" not in str(error.value) and "…@nvcr.io:5000" in str(error.value)


@given(registry_text, repository_text, st.none() | tag_text, st.none() | digest_text)
def test_every_reference_of_the_grammar_is_read_part_by_part(registry, repository, tag, digest):
    text = f"{registry}/{repository}" + (f":{tag}" if tag else "") + (f"@{digest}" if digest else "")
    found = parse_reference(text)
    assert (found.registry, found.repository, found.digest) == (registry, repository, digest)
    assert found.tag == (tag or (None if digest else "latest"))
    assert parse_reference(str(found)) == found
    assert parse_reference("docker://" + text) == found


@settings(max_examples=500)
@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40) | st.text("aA0.:/@[]#_-% \\", max_size=30))
def test_any_text_at_all_is_a_reference_that_reads_back_or_a_clear_refusal(text):
    try:
        found = parse_reference(text)
    except UsageError as error:
        assert len(error.faults) == 1 and error.faults[0].what
        return
    assert parse_reference(str(found)) == found
    # What a refusal or an allowlist sees is what stands in the text, not something that it decodes to.
    assert found.registry == "docker.io" or found.registry in text
    assert not set(found.registry + found.repository) & set("@# %\\")
    assert ".." not in found.repository.split("/")


@given(registry_text)
def test_a_registry_alone_is_read_like_the_one_of_a_reference(text):
    assert parse_registry(text) == parse_reference(f"{text}/x").registry
