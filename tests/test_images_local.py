"""Images that are files: where they may lie, what they must be, and how their digest is remembered."""

from __future__ import annotations

import hashlib
import os
import pwd
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tuneplane.images.local import ImageFile, inspect, is_local, read_sha256
from tuneplane.kernel.errors import Fault, OperationError

SIF_HEAD = b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0"


def sif(path: Path, content: bytes = b"layers") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(SIF_HEAD + content)
    settled = time.time() - 60
    os.utime(path, (settled, settled))
    return path


def refused(text, folders=None, **more) -> Fault:
    found = inspect(str(text), folders, where="--image", **more)
    assert isinstance(found, list), found
    (fault,) = found
    assert fault.where == "--image"
    return fault


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("/images/x.sif", True),
        ("./x", True),
        ("../x", True),
        ("~/x", True),
        ("x.sif", True),
        ("images/x.sqsh", True),
        ("x.squashfs", True),
        ("alpine", False),
        ("nvcr.io/x:1", False),
        ("docker://nvcr.io/x.sif", False),
        ("", False),
    ],
)
def test_a_path_is_told_from_a_name(text, local):
    assert is_local(text) is local


@pytest.mark.parametrize("name", ["a b", "a:b", "a,b", 'a"b', "a'b", "a\nb", "中文", "$HOME", "-x", "100%"])
def test_a_sif_is_known_by_its_content_whatever_its_name(tmp_path, name):
    image = sif(tmp_path / name)
    assert inspect(str(image), None) == ImageFile(str(image), "sif", image.stat().st_size)


def test_a_squashfs_is_known_by_its_content(tmp_path):
    image = tmp_path / "x.sqsh"
    image.write_bytes(b"hsqs" + b"\0" * 92)
    assert inspect(str(image), None) == ImageFile(str(image), "squashfs", 96)


@pytest.mark.parametrize("content", [b"", b"S", b"hsq", SIF_HEAD[:40], b"SIF_MAGIC", b"\x7fELF" + b"x" * 100])
def test_a_file_that_is_no_image_is_refused_whatever_its_name(tmp_path, content):
    image = tmp_path / "x.sif"
    image.write_bytes(content)
    assert "is neither a SIF nor a squashfs file" in refused(image).what


def test_what_is_not_there_is_said_to_be_not_there(tmp_path):
    assert "does not exist" in refused(tmp_path / "x.sif").what
    assert "does not exist" in refused(sif(tmp_path / "y.sif") / "x.sif").what
    (tmp_path / "dangling.sif").symlink_to("nowhere.sif")
    assert "does not exist" in refused(tmp_path / "dangling.sif").what
    fault = refused("nvcr.io/x.sif")
    assert "docker://nvcr.io/x.sif" in fault.remedy


def test_what_is_no_regular_file_is_refused_without_waiting_for_it(tmp_path):
    assert "is a folder" in refused(tmp_path).what
    os.mkfifo(tmp_path / "fifo.sif")
    assert "is not a regular file" in refused(tmp_path / "fifo.sif").what
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s.sif"))
        assert "is not a regular file" in refused(tmp_path / "s.sif").what
    assert "is not a regular file" in refused("/dev/zero").what


@pytest.mark.parametrize("text", ["/x\0.sif", "~no-such-user-here/x.sif", "/" + "x" * 300 + ".sif"])
def test_what_cannot_be_a_path_is_refused(text):
    assert "cannot be" in refused(text).what


def test_a_name_that_is_not_utf8_is_refused(tmp_path):
    name = tmp_path / os.fsdecode(b"\xff.sif")
    assert "is not UTF-8" in refused(sif(name)).what


def test_links_that_turn_in_a_circle_are_refused(tmp_path):
    (tmp_path / "a.sif").symlink_to("b.sif")
    (tmp_path / "b.sif").symlink_to("a.sif")
    assert "symbolic links" in refused(tmp_path / "a.sif").what


@pytest.mark.contract("C28")
def test_only_files_below_the_sites_image_folders_are_admitted(tmp_path):
    inside = sif(tmp_path / "images" / "deep" / "x.sif")
    folders = [str(tmp_path / "none"), str(tmp_path / "images")]
    assert isinstance(inspect(str(inside), folders), ImageFile)
    outside = sif(tmp_path / "x.sif")
    fault = refused(outside, folders, contact="help@example.com")
    assert "is not below one of this site's image folders" in fault.what
    assert str(tmp_path / "images") in fault.remedy and "help@example.com" in fault.remedy


def test_no_neighbour_link_or_dots_pass_for_an_image_folder(tmp_path):
    folders = [str(tmp_path / "images")]
    sif(tmp_path / "images" / "x.sif")
    outside = sif(tmp_path / "images-evil" / "x.sif")
    link = tmp_path / "images" / "out.sif"
    link.symlink_to(outside)
    (tmp_path / "images" / "folder").symlink_to(tmp_path / "images-evil")
    for text in (
        outside,
        link,
        tmp_path / "images" / "folder" / "x.sif",
        f"{tmp_path}/images/../images-evil/x.sif",
    ):
        fault = refused(text, folders)
        assert "is not below one of this site's image folders" in fault.what
    assert f"(it leads to {outside})" in refused(link, folders).what


def test_a_link_that_leads_into_an_image_folder_is_admitted_as_what_it_leads_to(tmp_path):
    image = sif(tmp_path / "store" / "x.sif")
    (tmp_path / "images").symlink_to(tmp_path / "store")
    (tmp_path / "mine.sif").symlink_to(tmp_path / "images" / "x.sif")
    found = inspect(str(tmp_path / "mine.sif"), [str(tmp_path / "images")])
    assert isinstance(found, ImageFile) and found.path == str(image)


def test_an_empty_list_of_folders_admits_no_file_but_the_sites_own(tmp_path):
    image = sif(tmp_path / "x.sif")
    assert "image folders here: none" in refused(image, []).remedy
    assert isinstance(inspect(str(image), [], trusted=True), ImageFile)


def test_a_relative_folder_admits_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "image folders" in refused(sif(tmp_path / "images" / "x.sif"), ["images", "."]).what


def test_without_folders_another_users_file_is_refused(tmp_path, monkeypatch):
    image = sif(tmp_path / "x.sif")
    if os.geteuid() == 0:
        os.chown(image, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    fault = refused(image, contact="help@example.com")
    assert "belongs to another user" in fault.what
    assert "site.image_folders" in fault.remedy and "help@example.com" in fault.remedy
    assert isinstance(inspect(str(image), [str(tmp_path)]), ImageFile)
    assert isinstance(inspect(str(image), None, trusted=True), ImageFile)


@pytest.mark.testbed
def test_an_ordinary_user_may_start_an_image_of_root_but_none_that_is_closed_to_him(tmp_path):
    """Root prepares the files; a child process that gives up its rights looks at them."""
    nobody = pwd.getpwnam("nobody")
    mine, roots, others = (sif(tmp_path / f"{name}.sif") for name in ("mine", "roots", "others"))
    os.chown(mine, nobody.pw_uid, -1)
    os.chown(others, 12345, -1)
    secret = sif(tmp_path / "secret.sif")
    secret.chmod(0o600)
    here = Path(__file__).parents[1]
    program = (
        "import os, sys; from tuneplane.images.local import inspect\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(int(sys.argv[1]))\n"
        "for path in sys.argv[2:]: print(inspect(path, None))\n"
    )
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    out = subprocess.run(
        [sys.executable, "-c", program, str(nobody.pw_uid), *map(str, (mine, roots, others, secret))],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    own, of_root, of_others, of_root_unreadable = out.stdout.splitlines()
    assert own.startswith("ImageFile(") and of_root.startswith("ImageFile(")
    assert "belongs to another user (uid 12345)" in of_others
    assert "permission denied" in of_root_unreadable


def cached(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


def test_a_digest_is_read_once_and_then_remembered(tmp_path):
    image = sif(tmp_path / "x.sif", os.urandom(9 << 20))
    digest = hashlib.sha256(image.read_bytes()).hexdigest()
    seen: list[tuple[int, int]] = []
    size = image.stat().st_size
    assert (
        read_sha256(image, tmp_path / "cache", lambda what, done, total: seen.append((done, total))) == digest
    )
    assert seen[0] == (0, size) and seen[-1] == (size, size) and len(seen) > 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    seen.clear()
    assert (
        read_sha256(image, tmp_path / "cache", lambda what, done, total: seen.append((done, total))) == digest
    )
    assert seen == []
    (name,) = cached(tmp_path / "cache")
    found = image.stat()
    assert name == f"{found.st_dev:x}-{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"


def test_a_changed_or_replaced_file_is_read_again(tmp_path):
    image = sif(tmp_path / "x.sif", b"one")
    first = read_sha256(image, tmp_path / "cache")
    second = sif(tmp_path / "y.sif", b"two").replace(image)  # same name, size and mtime, another inode
    assert read_sha256(second, tmp_path / "cache") != first
    sif(image, b"six")
    os.utime(image, ns=(0, 10**18))
    assert read_sha256(image, tmp_path / "cache") == hashlib.sha256(SIF_HEAD + b"six").hexdigest()


def test_a_file_changed_a_moment_ago_is_not_remembered(tmp_path):
    image = sif(tmp_path / "x.sif")
    os.utime(image)
    read_sha256(image, tmp_path / "cache")
    assert cached(tmp_path) == ["x.sif"]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    image = sif(tmp_path / "x.sif", b"x" * (9 << 20))

    def change(what, done, total):
        if done:
            image.open("ab").write(b"more")

    with pytest.raises(OperationError, match="changed while it was read"):
        read_sha256(image, tmp_path / "cache", change)
    assert cached(tmp_path) == ["x.sif"]


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"zz" * 32, b"a" * 63, b"a" * 1000])
def test_a_damaged_cache_is_not_believed(tmp_path, damage):
    image = sif(tmp_path / "x.sif")
    digest = read_sha256(image, tmp_path / "cache")
    (entry,) = (path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    entry.write_bytes(damage)
    assert read_sha256(image, tmp_path / "cache") == digest
    assert entry.read_text().strip() == digest


def test_without_a_usable_cache_the_digest_is_still_told(tmp_path):
    image = sif(tmp_path / "x.sif")
    (tmp_path / "file").write_text("")
    digest = hashlib.sha256(image.read_bytes()).hexdigest()
    assert read_sha256(image, tmp_path / "file") == digest
    assert read_sha256(image, Path("/proc/no-such-place")) == digest


def test_two_at_once_get_the_same_digest_and_leave_one_entry(tmp_path):
    image = sif(tmp_path / "x.sif", os.urandom(5 << 20))
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(read_sha256(image, tmp_path / "cache")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == [hashlib.sha256(image.read_bytes()).hexdigest()] * 8
    assert len(cached(tmp_path / "cache")) == 1


def test_an_image_that_is_gone_is_said_with_its_path(tmp_path):
    with pytest.raises(OperationError, match="No such file or directory") as error:
        read_sha256(tmp_path / "x.sif", tmp_path / "cache")
    assert error.value.faults[0].where == str(tmp_path / "x.sif")
