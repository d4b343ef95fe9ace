"""A capsule on a node: checked, unpacked read-only, removed again."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from interpreters import pythons
from small_disk import run_on_small_disk

from tuneplane.capsule.archive import write_archive_file
from tuneplane.capsule.tree import Member
from tuneplane.kernel.digests import tree_digest
from tuneplane.kernel.errors import OperationError
from tuneplane.kernel.unpack import read_manifest, remove_tree, unpack_capsule, verify_capsule
from tuneplane.lab.git import LabState

REPOSITORY = Path(__file__).parent.parent
MTIME_S = 1_700_000_000
NOBODY = 65534


def pack(folder: Path, files: dict[str, bytes], links: dict[str, str] | None = None) -> tuple[Path, str]:
    """A capsule of these files and links, and its digest. A path that ends in `.sh` is executable."""
    folder.mkdir(exist_ok=True)
    members = [
        Member(path, "link", 0o777, len(os.fsencode(target)), MTIME_S, target=target)
        for path, target in (links or {}).items()
    ]
    for path, content in files.items():
        source = folder / hashlib.sha256(os.fsencode(path)).hexdigest()
        source.write_bytes(content)
        mode = 0o755 if path.endswith(".sh") else 0o644
        members.append(Member(path, "file", mode, len(content), MTIME_S, source=source))
    capsule = folder / "capsule.tar"
    entries, size_bytes = write_archive_file(members, LabState(folder), capsule)
    assert capsule.stat().st_size == size_bytes
    return capsule, tree_digest(entries)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_what_was_packed_is_unpacked_read_only(tmp_path: Path) -> None:
    files = {"train.sh": b"#!/bin/sh\n", "a/b/c.py": b"x = 1\n", "a/empty": b""}
    capsule, digest = pack(tmp_path / "src", files, {"a/here": "b/c.py", "top": "a"})
    work = tmp_path / "work"
    unpack_capsule(capsule, work, digest)
    assert {p: (work / p).read_bytes() for p in files} == files
    assert str((work / "a/here").readlink()) == "b/c.py"
    assert (work / "top/b/c.py").read_bytes() == b"x = 1\n"
    assert mode_of(work / "train.sh") == 0o555
    assert mode_of(work / "a/b/c.py") == 0o444
    assert mode_of(work / "a/b") == 0o555
    assert mode_of(work) == 0o500, "other users of the node cannot look inside"
    assert (work / "a/empty").stat().st_mtime == MTIME_S


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_the_umask_changes_nothing(tmp_path: Path, umask: int) -> None:
    capsule, digest = pack(tmp_path / "src", {"a/b/train.sh": b"true\n"})
    before = os.umask(umask)
    try:
        unpack_capsule(capsule, tmp_path / "work", digest)
    finally:
        os.umask(before)
    assert [mode_of(tmp_path / "work" / p) for p in ("", "a", "a/b", "a/b/train.sh")] == [
        0o500,
        0o555,
        0o555,
        0o555,
    ]


NAMES = [
    "with space",
    "with\nnewline",
    "trailing newline\n",
    "\n",
    "-rf",
    "'quoted\"",
    "$(touch pwned)",
    "back\\slash",
    "中文/训练.py",
    "not utf-8 \udcff\udcfe",
    "é" * 127,
    "/".join(["deep" * 20] * 12),
    "tab\tand\x01control",
    "100%/%41",
    "...",
    "..a/.b",
]


def test_names_of_any_bytes_survive(tmp_path: Path) -> None:
    files = {name: name.encode("utf-8", "surrogateescape") for name in NAMES}
    links = {f"link to {n}": name for n, name in enumerate(NAMES)}
    capsule, digest = pack(tmp_path / "src", files, links)
    unpack_capsule(capsule, tmp_path / "work", digest)
    for n, name in enumerate(NAMES):
        expected = name.encode("utf-8", "surrogateescape")
        assert (tmp_path / "work" / name).read_bytes() == expected
        assert (tmp_path / "work" / f"link to {n}").read_bytes() == expected


@pytest.mark.parametrize("version", sorted(pythons((3, 9))))
@pytest.mark.parametrize("environment", [{"LC_ALL": "C.UTF-8"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_every_python_of_the_nodes_unpacks_the_same(
    tmp_path: Path, version: str, environment: dict[str, str]
) -> None:
    files = {name: b"\0" * n for n, name in enumerate(NAMES)}
    capsule, digest = pack(tmp_path / "src", files, {"l/" + "x" * 120: "../" + NAMES[-1]})
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from tuneplane.kernel.unpack import unpack_capsule\n"
        "print(len(unpack_capsule(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])))\n"
    )
    # -S but not -I, which would ignore the environment that is the point here.
    command = [
        pythons((3, 9))[version],
        "-S",
        "-B",
        "-c",
        script,
        REPOSITORY,
        capsule,
        tmp_path / "w",
        digest,
    ]
    done = subprocess.run(
        [*map(str, command)],
        env={**environment, "PYTHONCOERCECLOCALE": "0", "PATH": os.environ["PATH"]},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(len(NAMES) + 1)
    assert {p: (tmp_path / "w" / p).read_bytes() for p in files} == files


def test_a_capsule_with_another_digest_is_not_unpacked(tmp_path: Path) -> None:
    capsule, digest = pack(tmp_path / "src", {"a": b"1"})
    other = "sha256:" + "0" * 64
    with pytest.raises(OperationError) as raised:
        unpack_capsule(capsule, tmp_path / "work", other)
    assert digest in str(raised.value)
    assert other in str(raised.value)
    assert not (tmp_path / "work").exists()
    with pytest.raises(OperationError):
        verify_capsule(capsule, other)
    assert verify_capsule(capsule, digest) == read_manifest(capsule)


def test_a_folder_that_exists_is_refused_and_left_alone(tmp_path: Path) -> None:
    capsule, digest = pack(tmp_path / "src", {"a": b"1"})
    work = tmp_path / "work"
    work.mkdir()
    (work / "mine").write_text("mine")
    with pytest.raises(OperationError, match="exists already"):
        unpack_capsule(capsule, work, digest)
    assert (work / "mine").read_text() == "mine"
    (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OperationError, match="exists already"):
        unpack_capsule(capsule, tmp_path / "dangling", digest)
    assert not (tmp_path / "elsewhere").exists()


def test_a_missing_capsule_and_a_missing_parent_are_told_plainly(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match=r"cannot be read \(No such file"):
        read_manifest(tmp_path / "none.tar")
    with pytest.raises(OperationError, match="not a file"):
        read_manifest(tmp_path)
    capsule, digest = pack(tmp_path / "src", {"a": b"1"})
    with pytest.raises(OperationError, match=r"cannot be unpacked \(No such file"):
        unpack_capsule(capsule, tmp_path / "none" / "work", digest)


@pytest.mark.timeout(10)
def test_a_fifo_in_the_capsules_place_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "capsule.tar")
    with pytest.raises(OperationError, match="not a file"):
        read_manifest(tmp_path / "capsule.tar")


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    capsule, digest = pack(tmp_path / "src", {"a/small": b"1", "b/large": b"2" * 300_000, "c/after": b"3"})
    script = (
        "import sys; from pathlib import Path\n"
        "from tuneplane.kernel.errors import OperationError\n"
        "from tuneplane.kernel.unpack import unpack_capsule\n"
        "disk = Path(sys.argv[2])\n"
        "try: unpack_capsule(Path(sys.argv[1]), disk / 'work', sys.argv[3])\n"
        "except OperationError as error: print(error)\n"
        "print('left:', list(disk.iterdir()))\n"
    )
    disk = tmp_path / "disk"
    command = [sys.executable, "-c", script, str(capsule), str(disk), digest]
    done = run_on_small_disk(disk, 128 << 10, command, {**os.environ, "PYTHONPATH": str(REPOSITORY)})
    assert "cannot be unpacked (No space left on device)" in done.stdout, done.stderr
    assert "left: []" in done.stdout


def test_remove_tree_takes_read_only_trees_and_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    capsule, digest = pack(tmp_path / "src", {"a/b/c": b"1", "d.sh": b"2"})
    work = tmp_path / "work"
    unpack_capsule(capsule, work, digest)
    work.chmod(0o700)
    (work / "to outside").symlink_to(outside)
    (work / "shut").mkdir(mode=0o000)
    work.chmod(0o500)
    remove_tree(work)
    assert not work.exists()
    assert (outside / "kept").read_text() == "kept"
    (tmp_path / "link").symlink_to(outside)
    remove_tree(tmp_path / "link")
    assert not (tmp_path / "link").is_symlink()
    assert (outside / "kept").exists()
    remove_tree(tmp_path / "never was")


def test_remove_tree_works_for_an_ordinary_user() -> None:
    """Root may do anything; the modes matter to everyone else."""
    with tempfile.TemporaryDirectory() as place:
        top = Path(place, "tree")
        if os.geteuid() == 0:
            os.chown(place, NOBODY, NOBODY)
        child = os.fork()
        if child == 0:
            try:
                if os.geteuid() == 0:
                    os.setgroups([])
                    os.setgid(NOBODY)
                    os.setuid(NOBODY)
                for folder, mode in (("a/b", 0o555), ("a", 0o555), ("shut", 0), (".", 0o500)):
                    (top / folder).mkdir(parents=True, exist_ok=True)
                    (top / folder / "file").write_text("x")
                    (top / folder).chmod(mode)
                remove_tree(top)
            finally:
                os._exit(1 if top.exists() else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_remove_tree_takes_a_tree_deeper_than_pythons_stack(tmp_path: Path) -> None:
    top = tmp_path / "deep"
    place = top
    for _ in range(1500):
        place.mkdir()
        place = place / "d"
    remove_tree(top)
    assert not top.exists()
