"""The allowlist of registries (C28): exact, the site's word first, a user's environment only narrows it."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneplane.images import allowed_registries, parse_reference, registry_fault
from tuneplane.kernel.errors import UsageError

SITE = ["registry.example.com", "nvcr.io", "[2001:db8::1]:5000"]


@pytest.mark.parametrize(
    ("site", "environment", "allowed"),
    [
        (None, None, ()),
        (None, "", ()),
        (None, "nvcr.io, ghcr.io ,", ("nvcr.io", "ghcr.io")),
        ([], None, ()),
        ([], "nvcr.io", ()),
        (SITE, None, tuple(SITE)),
        (SITE, "", ()),
        (SITE, "nvcr.io", ("nvcr.io",)),
        (SITE, "nvcr.io,evil.example", ("nvcr.io",)),
        (SITE, "evil.example", ()),
        (["docker.io"], "index.docker.io", ("docker.io",)),
    ],
)
def test_the_site_decides_and_the_environment_only_narrows(site, environment, allowed):
    assert allowed_registries(site, environment) == allowed


def test_every_entry_that_is_no_registry_is_named_at_once():
    with pytest.raises(UsageError) as error:
        allowed_registries(["*.example.com", "https://nvcr.io"], "nvcr.io/nvidia,user@ghcr.io,ghcr.io")
    faults = error.value.faults
    assert [f.where for f in faults] == ["site.allowed_registries"] * 2 + [
        "TUNEPLANE_ALLOWED_IMAGE_REGISTRIES"
    ] * 2
    assert "'*.example.com'" in faults[0].what and "'…@ghcr.io'" in faults[3].what


@pytest.mark.contract("C28")
def test_the_refusal_names_the_registry_and_whom_to_ask():
    fault = registry_fault(
        parse_reference("evil.example:5000/x"), ["nvcr.io"], "gpu-help@example.com", "--image"
    )
    assert fault is not None
    assert fault.what == "image registry evil.example:5000 is not in TUNEPLANE_ALLOWED_IMAGE_REGISTRIES"
    assert fault.where == "--image"
    assert "gpu-help@example.com" in fault.remedy and "nvcr.io" in fault.remedy


def test_a_refusal_by_an_empty_list_says_that_it_is_empty():
    fault = registry_fault(parse_reference("alpine"), [])
    assert fault is not None
    assert fault.what == "image registry docker.io is not in TUNEPLANE_ALLOWED_IMAGE_REGISTRIES"
    assert "allowed here: none; ask the administrators" in fault.remedy


@pytest.mark.parametrize("name", ["registry.example.com/x", "registry.example.com/a/b:v1"])
def test_an_allowed_registry_is_allowed(name):
    assert registry_fault(parse_reference(name), SITE) is None


@pytest.mark.parametrize(
    "trick",
    [
        "registry.example.com.evil.example/x",
        "evil-registry.example.com/x",
        "evil.registry.example.com/x",
        "registry.example.com:443/x",
        "registry.example.com:5000/x",
        "Registry.example.com/x",
        "REGISTRY.EXAMPLE.COM/x",
        "registry.example.co/x",
        "registry-example.com/x",
        "evil.example/registry.example.com/x",
        "evil.example/x:registry.example.com",
        "registry.example.com",  # a repository of docker.io, as Docker reads it
        "[2001:db8::1]/x",
        "[2001:db8:0::1]:5000/x",
        "[2001:DB8::1]:5000/x",
        "registry.example.com./x",
        "registry.example.com@evil.example/x",
        "evil@registry.example.com/x",
        "evil.example#registry.example.com/x",
        "evil.example\\registry.example.com/x",
        "registry.example.com%2f@evil.example/x",
        "registry.example.com\u200b/x",
        "registry.example.com /x",
        "ｒegistry.example.com/x",
        "registry。example。com/x",
    ],
)
def test_no_trick_passes_for_an_allowed_registry(trick):
    try:
        reference = parse_reference(trick)
    except UsageError:
        return  # refused before the list is asked
    assert registry_fault(reference, SITE) is not None


@given(
    st.text(string.printable + "。．ｅé\u200b", max_size=12), st.integers(0, 20), st.sampled_from(["", "/x"])
)
def test_whatever_is_put_into_an_allowed_name_what_passes_is_the_allowed_registry(noise, place, end):
    name = "registry.example.com/trainer"
    text = name[:place] + noise + name[place:] + end
    try:
        reference = parse_reference(text)
    except UsageError:
        return
    if registry_fault(reference, ["registry.example.com"]) is None:
        host, _, rest = text.removeprefix("docker://").partition("/")
        assert host == "registry.example.com" and rest


registries = st.sampled_from(["nvcr.io", "ghcr.io", "a.b:5000", "quay.io", "localhost"])


@given(st.lists(registries), st.none() | st.lists(registries))
def test_no_environment_allows_what_the_site_does_not(site, environment):
    text = None if environment is None else ",".join(environment)
    allowed = allowed_registries(site, text)
    assert set(allowed) == set(site) & (set(site) if environment is None else set(environment))
