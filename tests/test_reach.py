"""What a user names for a run on Slurm must lie where the site says that compute nodes look."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tuneplane.findings import Findings
from tuneplane.images import Choice
from tuneplane.images.choice import FLAG, SITE_DEFAULT
from tuneplane.inputs import Inputs
from tuneplane.reach import check_reach
from tuneplane.site import Cluster


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "sha red"
    folder.mkdir()
    return folder


def told(
    shared: Path,
    /,
    *,
    image: Choice | None = None,
    mounts: tuple[str, ...] = (),
    bindings: dict[str, str] | None = None,
    cluster_mounts: Sequence[str] = (),
    **profile: object,
) -> list[tuple[str, str]]:
    """The faults of a run with these flags: where, what."""
    fields = {"scheduler": "slurm", "shared": [str(shared)], "scratch": "/local", **profile}
    cluster = Cluster(**fields)  # type: ignore[arg-type]
    cluster.mounts = [*cluster_mounts, *mounts]  # as a list that comes by a flag is added
    found = Findings()
    check_reach(found, cluster, Inputs(bindings=bindings or {}), image, mounts)
    return [(fault.where, fault.what) for fault in found.faults]


def test_image_mounts_and_data_outside_what_is_shared_are_told_all_at_once(
    tmp_path: Path, shared: Path
) -> None:
    image, data, model = tmp_path / "home/my.sif", tmp_path / "data", tmp_path / "mo\ndel"
    said = told(
        shared, image=Choice(str(image), FLAG), mounts=(f"{data}:/data:ro",), bindings={"model": str(model)}
    )
    outside = f"is outside what the site calls shared ({shared})"
    assert sorted(said) == [
        ("--image", f"{image} {outside}"),
        ("--model", f"{model} {outside}"),
        ("--mount", f"{data} {outside}"),
    ]


def test_what_lies_below_a_shared_folder_is_fine(shared: Path) -> None:
    below = shared / "x"
    flags = {
        "image": Choice(f"{below}.sif", FLAG),
        "mounts": (f"{below}:/x",),
        "bindings": {"model": f"{below}"},
    }
    assert told(shared, **flags) == []  # type: ignore[arg-type]


def test_a_link_is_judged_by_where_it_leads(tmp_path: Path, shared: Path) -> None:
    (shared / "link").symlink_to(tmp_path / "out")
    assert [where for where, _ in told(shared, mounts=(f"{shared}/link:/data",))] == ["--mount"]
    (tmp_path / "in").symlink_to(shared)
    assert told(shared, mounts=(f"{tmp_path}/in/data:/data",)) == []


def test_what_the_profile_mounts_is_its_own_to_know(shared: Path) -> None:
    assert told(shared, mounts=("/raid/imagenet/train:/data",), cluster_mounts=["/raid:/raid"]) == []
    assert told(shared, bindings={"train_data": "/data/x"}, cluster_mounts=["/raid:/data"]) == []


def test_the_nodes_own_disk_may_be_mounted_and_holds_no_image(shared: Path) -> None:
    flags = {"mounts": ("/local/cache:/cache",), "image": Choice("/local/my.sif", FLAG)}
    assert [where for where, _ in told(shared, **flags)] == ["--image"]  # type: ignore[arg-type]


def test_images_that_the_site_chose_and_those_of_registries_are_not_judged(
    tmp_path: Path, shared: Path
) -> None:
    assert told(shared, image=Choice(str(tmp_path / "site.sif"), SITE_DEFAULT)) == []
    assert told(shared, image=Choice("registry.example.com/my-trainer:v1", FLAG)) == []


@pytest.mark.parametrize("profile", [{"scheduler": "local"}, {"shared": []}])
def test_without_slurm_or_where_it_is_not_known_nothing_is_refused(
    tmp_path: Path, shared: Path, profile: dict[str, object]
) -> None:
    flags = {"image": Choice(str(tmp_path / "x.sif"), FLAG), "mounts": (f"{tmp_path}:/data",)}
    assert told(shared, **flags, **profile) == []  # type: ignore[arg-type]
