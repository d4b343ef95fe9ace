"""Which image a run starts (C27), and what a site's rules say to it (C28)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tuneplane.images import Choice, Rules, choose_image, image_faults, resolve_image
from tuneplane.images.place import Builder, Place
from tuneplane.kernel.errors import UsageError

EVERYTHING = {
    "flag": "flag.sif",
    "site_defaults": {"pytorch/image-classification": "/site/method.sif", "*": "/site/any.sif"},
    "runtime_id": "torch-2.6",
    "runtime_images": {"torch-2.6": "/site/torch-2.6.sif"},
    "pin": "registry.example.com/pin:v1",
}
NOTHING = {"flag": None, "site_defaults": {}, "runtime_id": None, "runtime_images": {}, "pin": None}


NOWHERE = Place((), Builder("sif", "apptainer", Path("/nonexistent")), "amd64", "alice")
"""Local files need no place to be prepared in."""


def choose(method: str = "pytorch/image-classification", **changed) -> Choice:
    return choose_image(method, **{**EVERYTHING, **changed})


@pytest.mark.contract("C27")
def test_the_flag_goes_before_the_sites_default_then_the_runtime_registry_then_the_catalogs_pin():
    assert choose() == Choice("flag.sif", "--image")
    assert choose(flag=None) == Choice("/site/method.sif", "site default")
    assert choose(flag=None, site_defaults={"*": "/site/any.sif"}) == Choice("/site/any.sif", "site default")
    assert choose(flag=None, site_defaults={}) == Choice("/site/torch-2.6.sif", "runtime registry")
    assert choose(flag=None, site_defaults={}, runtime_images={}) == Choice(
        "registry.example.com/pin:v1", "catalog pin"
    )


def test_a_default_of_another_method_or_runtime_is_not_taken():
    found = choose(flag=None, site_defaults={"trl/sft": "/x.sif"}, runtime_images={"torch-2.5": "/y.sif"})
    assert found.source == "catalog pin"


@pytest.mark.parametrize("pin", [None, "", "user-managed"])
def test_custom_without_an_image_is_told_to_give_one(pin):
    with pytest.raises(UsageError, match="--image is required: custom/custom has no image of its own"):
        choose_image("custom/custom", **{**NOTHING, "pin": pin, "runtime_id": "user-managed"})


def test_for_a_method_of_the_catalog_the_runtime_that_the_site_could_name_is_told():
    with pytest.raises(UsageError) as caught:
        choose_image("trl/sft", **{**NOTHING, "runtime_id": "trl-1.16", "runtime_images": {"trl-1.15": "/x"}})
    (fault,) = caught.value.faults
    assert fault.what == (
        "--image is required: the catalog pins no image for trl/sft, and this site names none for its runtime"
        " trl-1.16"
    )
    assert "site.runtime_images.trl-1.16" in fault.remedy


@pytest.mark.parametrize("flag", ["", "  ", "\n"])
def test_an_empty_flag_is_a_mistake_not_a_wish_for_the_default(flag):
    with pytest.raises(UsageError, match="the image is empty"):
        choose(flag=flag)


def sif(path):
    path.write_bytes(b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0" + b"x" * 1000)
    return path


def test_a_local_image_is_prepared_with_its_digest(tmp_path):
    image = sif(tmp_path / "trainer.sif")
    found = resolve_image(Choice(str(image), "--image"), Rules(), NOWHERE, {}, tmp_path / "cache").fetch()
    assert found.reference == str(image)
    assert found.source == "--image"
    assert found.path == str(image)
    assert found.sha256 == hashlib.sha256(image.read_bytes()).hexdigest()
    assert (found.size_bytes, found.modified_s) == (image.stat().st_size, int(image.stat().st_mtime))
    assert found.digest == "", "a local file was frozen to no registry's digest"


def test_a_path_on_the_command_line_is_relative_to_the_working_folder(tmp_path, monkeypatch):
    image = sif(tmp_path / "trainer.sif")
    monkeypatch.chdir(tmp_path)
    for text in ("trainer.sif", "./trainer.sif", f"../{tmp_path.name}/trainer.sif"):
        chosen = resolve_image(Choice(text, "--image"), Rules(), NOWHERE, {}, tmp_path / "cache")
        assert chosen.image.path == str(image)


@pytest.mark.parametrize("source", ["site default", "runtime registry", "catalog pin"])
def test_a_relative_path_in_a_configuration_is_refused(tmp_path, monkeypatch, source):
    sif(tmp_path / "trainer.sif")
    monkeypatch.chdir(tmp_path)
    (fault,) = image_faults(Choice("trainer.sif", source), Rules())
    assert "is not an absolute path" in fault.what and fault.where == source


@pytest.mark.contract("C28")
def test_a_users_image_from_a_registry_that_is_not_listed_is_refused():
    (fault,) = image_faults(
        Choice("evil.example/x", "--image"), Rules(registries=["nvcr.io"], contact="help@example.com")
    )
    assert fault.what == "image registry evil.example is not in TUNEPLANE_ALLOWED_IMAGE_REGISTRIES"
    assert "help@example.com" in fault.remedy


def test_the_catalogs_pin_is_judged_like_a_users_image():
    (fault,) = image_faults(Choice("evil.example/x", "catalog pin"), Rules(registries=["nvcr.io"]))
    assert fault.what == "image registry evil.example is not in TUNEPLANE_ALLOWED_IMAGE_REGISTRIES"


@pytest.mark.parametrize("source", ["site default", "runtime registry"])
def test_with_an_empty_list_the_sites_own_images_are_still_had(tmp_path, source):
    image = sif(tmp_path / "site.sif")
    rules = Rules(registries=[], folders=[])
    assert image_faults(Choice(str(image), source), rules) == []
    assert image_faults(Choice("nvcr.io/x", source), rules) == []


def test_a_malformed_name_is_refused_once_with_its_reason():
    (fault,) = image_faults(Choice("Nvcr.io/Nvidia/x", "--image"), Rules(registries=["nvcr.io"]))
    assert "'Nvidia' holds capitals" in fault.what
