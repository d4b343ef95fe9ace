"""The folder of prepared images, which several users may write: what is believed of it, and what is not."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tuneplane.images.folder import ImageFolder, Record, file_name

DIGEST, INDEX = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def record_of(file: Path, **changed: object) -> Record:
    found = file.stat()
    made = Record(
        manifest=DIGEST,
        index="",
        repository="r.example/x",
        tags=["r.example/x:v1"],
        architecture="amd64",
        form="sif",
        sha256="0" * 64,
        size_bytes=found.st_size,
        modified_s=int(found.st_mtime),
        made_at=time.time(),
        made_by="alice",
        made_with="a test",
    )
    return replace(made, **changed)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> ImageFolder:
    (tmp_path / "images").mkdir()
    return ImageFolder(tmp_path / "images")


def publish(folder: ImageFolder, content: bytes = b"image", **changed: object) -> Path:
    built = folder.path.parent / "built"
    built.write_bytes(content)
    image = folder.publish(built, record_of(built, **changed))
    assert image is not None and not built.exists()
    return image.path


def test_an_image_is_found_by_its_digest_its_index_and_its_tag(folder: ImageFolder) -> None:
    path = publish(folder, index=INDEX)
    for found in (
        folder.find(DIGEST, "sif"),
        folder.find_index(INDEX, "amd64", "sif"),
        folder.find_tag("r.example/x:v1", "amd64", "sif"),
    ):
        assert found is not None and found.path == path
    assert folder.find(DIGEST, "sqsh") is None
    assert folder.find_index(INDEX, "arm64", "sif") is None
    assert folder.find_tag("r.example/x:v2", "amd64", "sif") is None


def test_of_two_made_under_one_tag_the_later_is_meant(folder: ImageFolder) -> None:
    publish(folder, made_at=1.0)
    newer = publish(folder, manifest=INDEX, made_at=2.0)
    found = folder.find_tag("r.example/x:v1", "amd64", "sif")
    assert found is not None and found.path == newer


def test_what_was_there_first_is_kept(folder: ImageFolder) -> None:
    """Runs know it by its sha256: another conversion of the same layers is another file."""
    first = publish(folder, b"first")
    assert publish(folder, b"second, longer") == first
    assert first.read_bytes() == b"first"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", '{"manifest": 1}', json.dumps({"manifest": DIGEST})],
)
def test_a_record_that_is_none_makes_the_file_none(folder: ImageFolder, text: str) -> None:
    path = publish(folder)
    path.with_name(f"{path.name}.json").write_text(text)
    assert folder.find(DIGEST, "sif") is None and list(folder.images()) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"manifest": 5},
        {"form": None},
        {"tags": None},
        {"tags": [5]},
        {"made_at": "x"},
        {"made_at": float("inf")},
        {"architecture": None},
        {"size_bytes": True},
    ],
    ids=str,
)
def test_a_record_with_a_field_of_another_kind_makes_the_file_none(
    folder: ImageFolder, changed: dict[str, object]
) -> None:
    """Whoever may write to a shared folder must not be able to break `tp` for all others."""
    path = publish(folder)
    record = {**asdict(record_of(path)), **changed}
    path.with_name(f"{path.name}.json").write_text(json.dumps(record))
    assert folder.find(DIGEST, "sif") is None and list(folder.images()) == []


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "device", "deep", "huge"])
def test_a_record_that_cannot_be_read_to_its_end_stops_nobody(folder: ImageFolder, kind: str) -> None:
    path = publish(folder)
    record = path.with_name(f"{path.name}.json")
    record.unlink()
    if kind == "fifo":
        os.mkfifo(record)
    elif kind == "device":
        record.symlink_to("/dev/zero")
    else:
        record.write_text("[" * 200_000 if kind == "deep" else '"' + "x" * (2 << 20) + '"')
    assert folder.find(DIGEST, "sif") is None and list(folder.images()) == []


def test_a_file_under_another_ones_name_is_not_believed(folder: ImageFolder) -> None:
    path = publish(folder)
    other = folder.path / file_name(INDEX, "sif")
    path.rename(other)
    path.with_name(f"{path.name}.json").rename(other.with_name(f"{other.name}.json"))
    assert folder.find(INDEX, "sif") is None


@pytest.mark.parametrize("name", ["x.sif", "sha256-.sif", "sha256-" + "A" * 64 + ".sif", ".hidden", "a\nb"])
def test_other_files_are_neither_images_nor_leftovers(folder: ImageFolder, name: str) -> None:
    (folder.path / name).write_bytes(b"x")
    assert list(folder.images()) == [] and list(folder.leftovers()) == []


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path / "absent/deep")
    assert list(folder.images()) == [] and folder.find(DIGEST, "sif") is None
    assert folder.is_writable() and not folder.path.exists(), "asking makes nothing"


def test_a_use_is_noted_and_a_link_in_its_place_is_not_followed(folder: ImageFolder) -> None:
    path = publish(folder, made_at=1.0)
    mark = folder.path / f".{path.name}.used.{os.getuid()}"
    os.utime(mark, (5, 5))
    image = folder.find(DIGEST, "sif")
    assert image is not None and image.used_at == 5
    folder.note_use(path)
    image = folder.find(DIGEST, "sif")
    assert image is not None and time.time() - image.used_at < 60
    mark.unlink()
    victim = folder.path.parent / "victim"
    mark.symlink_to(victim)
    folder.note_use(path)
    assert not victim.exists()


def test_a_work_folder_that_is_not_ones_own_alone_is_not_used(folder: ImageFolder) -> None:
    name = file_name(DIGEST, "sif")
    made = folder.make_work(name)
    assert made.stat().st_mode & 0o777 == 0o700 and folder.make_work(name) == made
    made.chmod(0o770)
    with pytest.raises(PermissionError, match="not this user's alone"):
        folder.make_work(name)
    made.rmdir()
    made.symlink_to(folder.path)
    with pytest.raises(PermissionError):
        folder.make_work(name)
    made.unlink()
    if os.geteuid() == 0:
        made.mkdir(mode=0o700)
        os.chown(made, 65534, 65534)
        with pytest.raises(PermissionError):
            folder.make_work(name)


def test_removing_takes_the_record_and_the_marks_along(folder: ImageFolder) -> None:
    publish(folder)
    (image,) = folder.images()
    folder.remove(image)
    assert list(folder.path.iterdir()) == []


def test_a_record_holds_what_it_says(folder: ImageFolder) -> None:
    path = publish(folder)
    value = json.loads(path.with_name(f"{path.name}.json").read_text())
    (image,) = folder.images()
    assert value == asdict(image.record)
    assert path.stat().st_mode & 0o777 == 0o444
