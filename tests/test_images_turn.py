"""One builder at a time: among processes of a machine, among machines, and past the dead."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tuneplane.images import turn as module
from tuneplane.images.turn import Owner, owner_of, this_process, turn
from tuneplane.kernel.errors import OperationError

pytestmark = pytest.mark.timeout(60)

NAME = "sha256-00.sif"
ROOT = Path(__file__).resolve().parents[1]


def never() -> bool:
    return False


def quiet(_: Owner | None) -> None:
    """Nobody to be told."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "images"
    path.mkdir()
    return path


def plant(folder: Path, owner: Owner, number: int = 1, age_s: float = 0) -> Path:
    """The mark of another owner."""
    mark = folder / f".{NAME}.turn.{number}"
    mark.mkdir()
    (mark / "owner.json").write_text(json.dumps(asdict(owner)))
    then = time.time() - age_s
    os.utime(mark / "owner.json", (then, then))
    return mark


def stranger(**changed: object) -> Owner:
    """Somebody on another machine."""
    return replace(this_process("bob"), host="login9", here="another machine", pid=4711, **changed)  # type: ignore[arg-type]


def test_a_turn_leaves_nothing_behind(folder: Path) -> None:
    with turn(folder, NAME, "alice", never, quiet) as mine:
        assert mine is True
        owner = owner_of(folder, NAME)
        assert owner is not None and (owner.user, owner.pid) == ("alice", os.getpid())
    assert list(folder.iterdir()) == []
    assert owner_of(folder, NAME) is None


def test_a_turn_that_fails_leaves_nothing_behind(folder: Path) -> None:
    with pytest.raises(RuntimeError), turn(folder, NAME, "alice", never, quiet):
        raise RuntimeError
    assert list(folder.iterdir()) == []


def test_who_waits_is_told_for_whom_and_goes_on_when_it_is_done(folder: Path) -> None:
    plant(folder, stranger())
    seen: list[Owner | None] = []
    with turn(folder, NAME, "alice", lambda: len(seen) > 2, seen.append) as mine:
        assert mine is False
    assert seen[0] is not None and str(seen[0]) == "bob on login9 (process 4711)"
    assert [p.name for p in folder.iterdir()] == [f".{NAME}.turn.1"], "and the other's mark stays"


def test_a_dead_process_of_this_machine_is_passed_at_once(folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    plant(folder, replace(this_process("bob"), pid=child.pid, pid_start=1))
    with turn(folder, NAME, "alice", never, quiet) as mine:
        assert mine
        assert (folder / f".{NAME}.turn.2").exists()
    assert list(folder.iterdir()) == []


def test_a_reused_process_id_is_not_taken_for_the_owner(folder: Path) -> None:
    plant(folder, replace(this_process("bob"), pid_start=1))
    with turn(folder, NAME, "alice", never, quiet) as mine:
        assert mine


@pytest.mark.parametrize(("age_s", "passed"), [(5, False), (50, False), (70, True), (86_400, True)])
def test_an_owner_on_another_machine_lives_as_long_as_its_mark_is_touched(
    folder: Path, age_s: float, passed: bool
) -> None:
    plant(folder, stranger(), age_s=age_s)
    looks: list[object] = []
    with turn(folder, NAME, "alice", lambda: len(looks) > 3, looks.append) as mine:
        assert mine is passed


@pytest.mark.parametrize("content", ["", "{", "[]", '{"user": 1}'])
def test_a_mark_that_cannot_be_read_lives_as_long_as_it_is_touched(folder: Path, content: str) -> None:
    mark = plant(folder, stranger())
    (mark / "owner.json").write_text(content)
    looks: list[object] = []
    with turn(folder, NAME, "alice", lambda: len(looks) > 3, looks.append) as mine:
        assert not mine
    os.utime(mark / "owner.json", (1, 1))
    with turn(folder, NAME, "alice", never, quiet) as mine:
        assert mine


def test_a_mark_that_is_a_fifo_is_waited_for_by_nobody(folder: Path) -> None:
    mark = plant(folder, stranger())
    (mark / "owner.json").unlink()
    os.mkfifo(mark / "owner.json")
    os.utime(mark / "owner.json", (1, 1))
    with turn(folder, NAME, "alice", never, quiet) as mine:
        assert mine


def test_a_strangers_process_that_proc_hides_lives_as_long_as_its_mark_is_touched(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Login hosts often mount /proc with hidepid: what is not seen there may live."""

    def refused(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(module.os, "kill", refused)
    hidden = replace(this_process("bob"), pid=2**22 + 1, pid_start=1)  # above any pid_max: /proc has none
    mark = plant(folder, hidden)
    looks: list[object] = []
    with turn(folder, NAME, "alice", lambda: len(looks) > 3, looks.append) as mine:
        assert not mine
    os.utime(mark / "owner.json", (1, 1))
    with turn(folder, NAME, "alice", never, quiet) as mine:
        assert mine


def test_the_mark_is_touched_while_the_turn_lasts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    with turn(folder, NAME, "alice", never, quiet):
        mark = folder / f".{NAME}.turn.1/owner.json"
        os.utime(mark, (1, 1))
        deadline = time.monotonic() + 10
        while mark.stat().st_mtime < 1000:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def hold_turn(folder: Path, log: Path, seconds: float) -> None:
    module.LOOK_S = 0.02
    with turn(folder, NAME, "alice", never, quiet) as mine:
        with log.open("a") as file:
            file.write(f"{os.getpid()} in {mine}\n")
        time.sleep(seconds)
        with log.open("a") as file:
            file.write(f"{os.getpid()} out\n")


@pytest.mark.parametrize("on_one_machine", [True, False])
def test_of_many_at_once_one_is_in_at_a_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_one_machine: bool
) -> None:
    """With the kernel's lock, and by the marks alone, as between users or machines."""
    if not on_one_machine:
        monkeypatch.setattr(module, "_local_folder", lambda: None)
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    workers = [context.Process(target=hold_turn, args=(folder, log, 0.05)) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(40)
    assert [worker.exitcode for worker in workers] == [0] * 6
    lines = log.read_text().splitlines()
    assert len(lines) == 12
    for entered, left in zip(lines[::2], lines[1::2], strict=True):
        assert entered.split()[0] == left.split()[0] and entered.endswith("in True"), lines
    assert list(folder.iterdir()) == []


def test_a_killed_owner_is_passed_at_once_by_the_next_process(folder: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    worker = context.Process(target=hold_turn, args=(folder, log, 60))
    worker.start()
    while not log.exists():
        time.sleep(0.02)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    before = time.monotonic()
    with turn(folder, NAME, "alice", never, quiet) as mine:
        assert mine
    assert time.monotonic() - before < 5


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(OperationError, match="images cannot be prepared there: No such file"),
        turn(tmp_path / "absent", NAME, "alice", never, quiet),
    ):
        pass


def test_a_local_folder_that_a_stranger_made_is_not_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    place = tmp_path / f"tuneplane-{os.getuid()}-locks"
    place.symlink_to(tmp_path / "images")
    assert module._local_folder() is None
    place.unlink()
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    assert module._local_folder() is None
    place.rmdir()
    assert module._local_folder() == place and place.stat().st_mode & 0o777 == 0o700


def test_marks_can_be_read_by_others_whatever_the_umask(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        with turn(folder, NAME, "alice", never, quiet):
            mark = folder / f".{NAME}.turn.1"
            assert mark.stat().st_mode & 0o777 == 0o755
            assert (mark / "owner.json").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)
