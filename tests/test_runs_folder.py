"""Run folders: whole or not there, with exact modes, and nobody else's to take, read or exchange."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from small_disk import run_on_small_disk

from tuneplane.kernel.errors import OperationError, TunePlaneError, UsageError
from tuneplane.kernel.runfolder import RUN_ID, RunFolder
from tuneplane.runs import folder as folder_module
from tuneplane.runs.folder import check_parents, make_run_folder, new_run_id, run_path

ROOT = Path(__file__).resolve().parents[1]
ALICE, MALLORY = 64101, 64102
RUN = "ring-20260114-093012-x3k9"
ME = os.getuid()


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def make(root: Path, run_id: str = RUN, mode: int = 0o700) -> RunFolder:
    return make_run_folder(root, "alice", "ring", run_id, mode)


def refusals(path: Path, *trusted: int) -> list[tuple[str, str]]:
    """What and where of each fault of the folders above a path."""
    return [(fault.where, fault.what) for fault in check_parents(path, trusted or (ME,))]


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        if os.environ.get("CI"):
            pytest.fail("only root can give a folder to another user, and a CI run must not skip this")
        pytest.skip("only root can give a folder to another user")


# Ids


def test_a_run_id_says_what_and_when_and_is_found_again() -> None:
    run_id = new_run_id("ring", 1_768_383_012.9)
    assert re.fullmatch(r"ring-20260114-093012-[0-9a-z]{4}", run_id)
    assert RUN_ID.fullmatch(run_id)


@pytest.mark.parametrize("experiment", ["a", "0", "a.b_c-d", "x" * 64, "x" * 200, "a-20260101-000000-aaaa"])
def test_an_id_of_any_experiment_is_one_and_no_longer_than_a_file_name(experiment: str) -> None:
    run_id = new_run_id(experiment)
    assert RUN_ID.fullmatch(run_id) and len(run_id) <= 64 + 21


@pytest.mark.parametrize(
    "name",
    [
        "ring",
        "ring-20260114-093012-",
        "ring-20260114-093012-x3k9\n",
        "Ring-20260114-093012-x3k9",
        "-20260114-093012-x3k9",
        "ring-2026٠١١٤-093012-x3k9",
        "ring-20260114-093012-x3k9.bak",
        ".ring-20260114-093012-x3k9",
        "",
    ],
)
def test_what_is_no_run_id(name: str) -> None:
    assert RUN_ID.fullmatch(name) is None


def test_ids_of_one_second_differ() -> None:
    ids = [new_run_id("ring", 0) for _ in range(200)]
    assert len(set(ids)) >= 199


# Modes


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o177])
@pytest.mark.parametrize("mode", [0o700, 0o750])
def test_modes_are_exact_under_any_umask(tmp_path: Path, mask: int, mode: int) -> None:
    root = tmp_path / "below" / "tuneplane"
    with umask(mask):
        run = make(root, mode=mode)
    made = {run.path, run.ingest, run.out, run.slurm, run.submissions, run.attempts_folder}
    assert {path: mode_of(path) for path in made} == dict.fromkeys(made, mode)
    above = [run.path.parent, run.path.parent.parent, root, root.parent]
    assert [mode_of(path) for path in above] == [mode] * 4
    assert mode_of(root / "runs") == 0o755
    assert set(run.path.iterdir()) == made - {run.path}


def test_folders_that_were_there_keep_their_modes(tmp_path: Path) -> None:
    root = tmp_path / "tuneplane"
    (root / "runs" / "alice").mkdir(parents=True, mode=0o755)
    (root / "runs" / "alice").chmod(0o711)
    make(root)
    assert mode_of(root / "runs" / "alice") == 0o711


def test_a_projects_group_is_passed_on_since_quotas_count_by_it(tmp_path: Path, as_root: None) -> None:
    root = tmp_path / "project"
    root.mkdir()
    os.chown(root, ME, 64100)
    root.chmod(0o2770)
    run = make(root)
    for path in (run.path, run.out, run.path.parent):
        assert path.stat().st_gid == 64100
        assert mode_of(path) == 0o2700


def test_any_name_does_for_a_root(weird_dir: Path) -> None:
    assert make(weird_dir / "a\nb").path.is_dir()


# Never twice, never half


def test_an_existing_run_is_never_entered(tmp_path: Path) -> None:
    run = make(tmp_path)
    (run.out / "model").write_text("mine")
    with pytest.raises(OperationError) as caught:
        make(tmp_path)
    assert caught.value.faults[0].what == "run folder not made: File exists"
    assert (run.out / "model").read_text() == "mine"


def test_of_two_at_once_with_one_id_one_gets_it_and_with_two_ids_both(tmp_path: Path) -> None:
    def attempt(number: int) -> str:
        try:
            return str(make(tmp_path, f"ring-20260114-093012-{number // 8:04d}").path)
        except OperationError:
            return ""

    with ThreadPoolExecutor(16) as pool:
        made = [path for path in pool.map(attempt, range(64)) if path]
    assert len(made) == len(set(made)) == 8
    assert all(len(list(Path(path).iterdir())) == 5 for path in made)


def test_a_file_in_the_way_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "alice").write_text("not a folder")
    with pytest.raises(UsageError) as caught:
        make(tmp_path)
    assert (caught.value.faults[0].where, caught.value.faults[0].what) == (
        str(tmp_path / "runs" / "alice"),
        "is not a folder",
    )
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["alice"]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EDQUOT, "free space there"),
        (errno.ENOSPC, "free space there"),
        (errno.EROFS, "see that it is there and that you may write to it"),
    ],
)
def test_a_failure_in_the_middle_leaves_nothing_and_names_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def fails(self: Path, *more: Any, **options: Any) -> None:
        if self.name == "submissions":
            raise OSError(number, os.strerror(number), str(self))
        mkdir(self, *more, **options)

    mkdir = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", fails)
    root = tmp_path / "tuneplane"
    with pytest.raises(OperationError) as caught:
        make(root)
    (fault,) = caught.value.faults
    assert fault.what == f"run folder not made: {os.strerror(number)}"
    assert fault.where.endswith("/submissions")
    assert fault.remedy == f"{remedy}, or set `storage_root` of the cluster profile"
    assert not root.exists()


def test_a_failure_leaves_the_folders_that_were_there_or_hold_another_run(tmp_path: Path) -> None:
    other = make(tmp_path, "ring-20260114-093012-0000")
    with pytest.raises(OperationError):
        make(tmp_path, "ring-20260114-093012-0000")
    assert other.out.is_dir()


FULL = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tuneplane.kernel.errors import TunePlaneError
from tuneplane.runs.folder import make_run_folder
root = Path(sys.argv[2])
try:
    make_run_folder(root, "alice", "ring", "ring-20260114-093012-x3k9", 0o700)
except TunePlaneError as error:
    print(int(error.exit_code), error.faults[0].what)
print(sorted(p.name for p in root.iterdir()))
"""


@pytest.mark.parametrize("inodes", [2, 4, 5, 7, 9])
def test_a_disk_without_room_for_another_folder_leaves_nothing_half_made(tmp_path: Path, inodes: int) -> None:
    """The run takes nine with those above it, and the disk's own folder one."""
    disk = tmp_path / "disk"
    fewer = f'mount -o remount,nr_inodes={inodes} "$1" && shift && exec "$@"'
    command = [sys.executable, "-c", FULL, str(ROOT), str(disk)]
    done = run_on_small_disk(
        disk, 1 << 20, ["sh", "-c", fewer, "sh", str(disk), *command], {"PATH": os.environ["PATH"]}
    )
    assert done.stdout == "1 run folder not made: No space left on device\n[]\n", done.stderr


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder of root that every user reaches."""
    path = Path(tempfile.mkdtemp(prefix="tuneplane-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def as_user(uid: int, code: str, *arguments: str | Path) -> str:
    """What a program printed that became an ordinary user after its imports."""
    begin = "import os, sys; sys.path.insert(0, sys.argv.pop())\n"
    begin += "import json\nfrom pathlib import Path\n"
    begin += "from tuneplane.runs.folder import make_run_folder\n"
    begin += "from tuneplane.kernel.errors import TunePlaneError\n"
    begin += f"os.setgroups([]); os.setgid({uid}); os.setuid({uid})\n"
    done = subprocess.run(
        ["/usr/bin/python3", "-c", begin + code, *map(str, arguments), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout


def test_a_folder_that_may_not_be_written_is_told(open_place: Path, as_root: None) -> None:
    code = (
        "try: make_run_folder(Path(sys.argv[1]), 'alice', 'ring', 'ring-20260114-093012-x3k9', 0o700)\n"
        "except TunePlaneError as error: print(int(error.exit_code), error.faults[0].what)\n"
    )
    assert as_user(ALICE, code, open_place) == "1 run folder not made: Permission denied\n"
    assert list(open_place.iterdir()) == []


def test_two_users_share_a_root_whose_runs_the_site_made_like_tmp(open_place: Path, as_root: None) -> None:
    (open_place / "runs").mkdir()
    (open_place / "runs").chmod(0o1777)
    code = (
        "os.umask(0)\n"
        "run = make_run_folder(Path(sys.argv[1]), sys.argv[2], 'ring', 'ring-20260114-093012-x3k9', 0o700)\n"
        "print(oct(run.path.parent.parent.stat().st_mode & 0o7777))"
    )
    assert as_user(ALICE, code, open_place, "alice") == as_user(MALLORY, code, open_place, "bob") == "0o700\n"


# Strangers


def test_folders_of_root_and_of_oneself_are_fine(tmp_path: Path) -> None:
    assert refusals(tmp_path / "not" / "there" / "yet") == []
    assert refusals(Path("/tmp/some/run")) == []


def test_a_strangers_folder_above_is_refused_by_its_name(tmp_path: Path, as_root: None) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "runs").mkdir(parents=True)
    os.chown(theirs, MALLORY, MALLORY)
    told = f"belongs to user id {MALLORY}, who could exchange your runs"
    assert refusals(run_path(theirs, "alice", "ring", RUN)) == [(str(theirs), told)]
    with pytest.raises(UsageError):
        make(theirs)
    assert list((theirs / "runs").iterdir()) == []


def test_a_squatted_folder_in_a_shared_root_is_refused(tmp_path: Path, as_root: None) -> None:
    """The site made runs/ like /tmp; somebody was faster to make runs/alice."""
    runs = tmp_path / "runs"
    squatted = runs / "alice"
    squatted.mkdir(parents=True)
    runs.chmod(0o1777)
    os.chown(squatted, MALLORY, MALLORY)
    squatted.chmod(0o777)
    found = refusals(run_path(tmp_path, "alice", "ring", RUN), ALICE)
    assert (str(squatted), f"belongs to user id {MALLORY}, who could exchange your runs") in found
    with pytest.raises(UsageError, match="who could exchange your runs"):
        make(tmp_path)
    assert list(squatted.iterdir()) == []


def test_a_folder_squatted_in_the_very_moment_is_refused(
    tmp_path: Path, as_root: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir(mode=0o777)
    (tmp_path / "runs").chmod(0o1777)
    check = folder_module.check_parents

    def check_then_squat(path: Path, trusted: tuple[int, ...]) -> Any:
        found = check(path, trusted)
        squatted = tmp_path / "runs" / "alice"
        if not squatted.exists():
            squatted.mkdir()
            os.chown(squatted, MALLORY, MALLORY)
        return found

    monkeypatch.setattr(folder_module, "check_parents", check_then_squat)
    with pytest.raises(UsageError, match=f"belongs to user id {MALLORY}"):
        make(tmp_path)
    assert list((tmp_path / "runs" / "alice").iterdir()) == []


def test_a_folder_that_everybody_may_write_needs_the_sticky_bit(tmp_path: Path) -> None:
    shared = tmp_path / "shared all"
    shared.mkdir()
    shared.chmod(0o777)
    ((where, what),) = refusals(shared / "x")
    assert (where, what) == (str(shared), "everybody may write there and it has no sticky bit")
    (fault,) = check_parents(shared / "x", (ME,))
    assert fault.remedy == f"chmod o-w '{shared}', or choose another storage root"
    shared.chmod(0o1777)
    assert refusals(shared / "x") == []


def test_a_root_that_is_a_link_is_judged_where_it_leads_and_where_it_stands(
    tmp_path: Path, as_root: None
) -> None:
    target, links = tmp_path / "scratch" / "alice", tmp_path / "links"
    target.mkdir(parents=True)
    links.mkdir()
    link = links / "tuneplane"
    link.symlink_to(target)
    run = make(link)
    assert (target / "runs" / "alice" / "ring" / RUN).is_dir()
    assert run.path == link / "runs" / "alice" / "ring" / RUN

    os.chown(target.parent, MALLORY, MALLORY)
    assert refusals(link / "x") == [
        (str(target.parent), f"belongs to user id {MALLORY}, who could exchange your runs")
    ]
    os.chown(target.parent, ME, ME)
    os.chown(link, MALLORY, MALLORY, follow_symlinks=False)
    assert refusals(link / "x") == [
        (str(link), f"belongs to user id {MALLORY}, who could exchange your runs")
    ]
    os.chown(link, ME, ME, follow_symlinks=False)
    links.chmod(0o777)
    assert [what for _, what in refusals(link / "x")] == [
        "everybody may write there and it has no sticky bit"
    ]


@pytest.mark.parametrize("target", ["../scratch/alice", "./../links/../scratch/alice", "second"])
def test_relative_links_and_links_to_links_are_followed_as_the_kernel_does(
    tmp_path: Path, as_root: None, target: str
) -> None:
    (tmp_path / "scratch" / "alice").mkdir(parents=True)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "second").symlink_to(tmp_path / "scratch" / "alice")
    (tmp_path / "links" / "first").symlink_to(target)
    assert refusals(tmp_path / "links" / "first" / "x") == []
    os.chown(tmp_path / "scratch", MALLORY, MALLORY)
    assert len(refusals(tmp_path / "links" / "first" / "x")) == 1


def test_links_in_a_circle_are_no_storage_root(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(TunePlaneError):
        make(tmp_path / "a")


def test_nobody_else_can_read_a_run(open_place: Path, as_root: None) -> None:
    """Under a umask that hides nothing; tried as another user."""
    with umask(0o000):
        run = make(open_place)
        (run.out / "model").write_text("weights")
        run.secrets.touch()
    probe = (
        "def can(call, *more):\n try: call(*more)\n except OSError: return False\n return True\n"
        "run = sys.argv[1]\n"
        "print(json.dumps([can(os.listdir, run), can(open, run + '/out/model'),"
        " can(os.stat, run + '/secrets.env'), can(os.mkdir, run + '/attempts/0')]))"
    )
    assert json.loads(as_user(MALLORY, probe, run.path)) == [False] * 4
