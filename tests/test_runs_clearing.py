"""What `tp job gc` may remove: what is surely over and old, and never what a link leads to."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hand_made import LONG_AGO, HandSlurm, attempt, slurm_run, submit
from launch_jobs import local_job, write_run

from tuneplane.kernel.errors import OperationError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.runs import clearing
from tuneplane.runs.clearing import Item, Looked, clear, leftovers, old_runs, tree_size
from tuneplane.runs.index import find_run, iterate_runs
from tuneplane.runs.starting import starting
from tuneplane.runs.state import read_state
from tuneplane.runs.workfolders import abandoned_folders

pytestmark = pytest.mark.timeout(60)

DAY_S = 86_400.0
DONE = {"for_good": True, "stop_requested": False}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HandSlurm:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    return HandSlurm(tmp_path / "bin", monkeypatch)


@pytest.fixture
def ended(tmp_path: Path, slurm: HandSlurm) -> RunFolder:
    """A run that completed long ago."""
    run = slurm_run(tmp_path / "tuneplane")
    submit(run, "42")
    attempt(run, 0, "42", end=DONE)
    return run


def look(*, older_s: float = 30 * DAY_S, with_out: bool = False) -> Looked:
    return old_runs(iterate_runs(), older_s, with_out=with_out)


def names(found: Looked) -> list[str]:
    return [item.name for item in found.items]


def test_an_old_run_goes_whole_where_it_left_nothing(ended: RunFolder) -> None:
    (item,) = look().items
    assert (item.kind, item.state, item.keeps_out) == ("run", "COMPLETED", False)
    assert item.size_bytes == tree_size(ended.path)[0] > 0
    assert abs(item.age_s - (time.time() - LONG_AGO - 50)) < 60
    assert ended.path.exists()  # looking removes nothing
    clear(item)
    assert not ended.path.parent.exists()
    assert look().items == []


@pytest.mark.contract("C46")
def test_outputs_stay_and_the_run_is_listed_as_it_ended(ended: RunFolder) -> None:
    (ended.out / "model").write_bytes(b"w" * 100_000)
    before = read_state(ended)
    (item,) = look().items
    assert item.keeps_out and item.size_bytes < 100_000
    clear(item)
    assert sorted(p.name for p in ended.path.iterdir()) == ["cleared.json", "job.json", "out"]
    after = read_state(ended)
    assert (after.state, after.code, after.attempts, after.job_id, after.ended_at) == (
        *(before.state, before.code, before.attempts, before.job_id),
        before.ended_at,
    )
    assert after.cleared and after.reason == "tp job gc left its outputs alone"
    assert find_run("ring").run_id == ended.run_id
    assert look().items == []  # there is nothing more to do
    (item,) = look(with_out=True).items
    clear(item)
    assert not ended.path.exists()


def test_what_is_interrupted_is_taken_up_again(ended: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    (ended.out / "model").write_text("w")

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    for with_out in (False, True):
        (item,) = look(with_out=with_out).items
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(clearing, "remove_tree", killed)
            clear(item)
    assert not ended.path.exists() and list(iterate_runs()) == []
    (item,) = leftovers([ended.path.parent])
    assert item.kind == "leftover"
    clear(item)
    assert list(ended.path.parent.iterdir()) == []


def test_a_young_run_stays(ended: RunFolder) -> None:
    assert look(older_s=time.time() - LONG_AGO).items == []


@pytest.mark.parametrize(
    "why", ["running", "paused", "lost", "restart", "prepared", "queued by hand", "silent"]
)
def test_a_run_that_is_not_surely_over_stays(ended: RunFolder, slurm: HandSlurm, why: str) -> None:
    end = ended.attempt(0).end
    if why == "running":
        end.unlink()
        slurm.jobs({"42": "RUNNING"})
    elif why == "paused":
        end.write_text(json.dumps({**json.loads(end.read_text()), "for_good": False}))
        ended.paused.write_text("42\n")
    elif why == "lost":
        end.unlink()
    elif why == "restart":
        end.write_text(
            json.dumps({"code": 0, "for_good": False, "to_be_continued": True, "cause": "walltime"})
        )
    elif why == "prepared":
        (ended.submissions / "42.json").unlink()
        clearing.remove_tree(ended.attempt(0).path)
    elif why == "queued by hand":
        slurm.jobs({"99": "PENDING"})
        (slurm.folder / "folder").write_text(str(ended.path))
    else:
        slurm.refuses("squeue", "Unable to contact slurm controller")
    assert look(older_s=0.0).items == []
    assert list(look(older_s=0.0).kept) == [ended.run_id]


def test_a_run_that_an_evaluation_waits_for_or_works_on_stays(
    ended: RunFolder, slurm: HandSlurm, tmp_path: Path
) -> None:
    subject = {"run_id": ended.run_id, "folder": str(ended.path), "awaited": ""}
    operation = slurm_run(tmp_path / "tuneplane", 1, {"spec.operation": "eval", "spec.subject": subject})
    submit(operation, "43")
    slurm.jobs({"43": "PENDING"})
    assert look(older_s=0.0, with_out=True).items == []
    assert look(older_s=0.0).kept[ended.run_id] == f"{operation.run_id}, which works on it, is PENDING"


def test_half_made_folders_go_after_a_day(ended: RunFolder) -> None:
    ended.script.unlink()
    (ended.submissions / "42.json").unlink()
    clearing.remove_tree(ended.attempt(0).path)
    assert read_state(ended).state == "INCOMPLETE"
    assert look(older_s=0.0).items == []  # a submit may be at it
    for path in (ended.path, *ended.path.rglob("*")):
        os.utime(path, (LONG_AGO, LONG_AGO))
    (item,) = look(older_s=1000 * 365 * DAY_S).items
    assert item.kind == "half-made"
    clear(item)
    assert not ended.path.exists()


def test_links_are_removed_and_not_followed(ended: RunFolder, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_bytes(b"x" * 1_000_000)
    (ended.ingest / "link").symlink_to(precious)
    clearing.remove_tree(ended.out)
    ended.out.symlink_to(precious)
    (item,) = look().items
    assert item.keeps_out and item.size_bytes < 500_000
    clear(item)
    assert ended.out.is_symlink()
    clear(look(with_out=True).items[0])
    assert not ended.path.exists()
    assert (precious / "data").stat().st_size == 1_000_000


def test_a_run_that_is_a_link_is_nobodys(ended: RunFolder, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    ended.path.rename(elsewhere)
    ended.path.symlink_to(elsewhere)
    assert look(older_s=0.0) == Looked()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")
def test_another_users_run_is_untouched(ended: RunFolder) -> None:
    os.chown(ended.path, 12345, 12345)
    assert look(older_s=0.0) == Looked()


@pytest.mark.slow
def test_a_run_that_was_started_meanwhile_is_left(ended: RunFolder) -> None:
    (item,) = look().items
    with starting(ended), pytest.raises(OperationError, match="being started"):
        clear(item)
    submit(ended, "43")
    with pytest.raises(OperationError, match="started meanwhile"):
        clear(item)
    assert (ended.submissions / "43.json").exists()


def test_a_full_disk_can_be_cleared(ended: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the mark of who is at it nor the note of how it ended finds room before something is gone."""
    (ended.out / "model").write_text("w")
    ended.capsule.write_bytes(b"c" * 10_000)
    (item,) = look().items
    real = clearing.write_json

    def full(path: Path, *more: object) -> None:
        if ended.capsule.exists():
            raise OSError(28, "No space left on device")
        real(path, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(clearing, "write_json", full)
    monkeypatch.setattr("tuneplane.images.turn.write_json", full)
    clear(item)
    assert sorted(p.name for p in ended.path.iterdir()) == ["cleared.json", "job.json", "out"]


def test_two_at_once_remove_it_once(ended: RunFolder) -> None:
    (item,) = look().items
    clear(item)
    clear(item)


def test_read_only_folders_and_odd_names_go_too(ended: RunFolder) -> None:
    odd = ended.ingest / "a b\n实验 \udcff"
    odd.mkdir()
    (odd / "x").write_text("x")
    odd.chmod(0o500)
    clear(look().items[0])
    assert not ended.path.exists()


@pytest.fixture
def work(tmp_path: Path, slurm: HandSlurm) -> Callable[[str], Path]:
    """Makes a work folder of a run of this machine, with the lock of its agent on this host, or another."""
    scratch = tmp_path / "scratch"
    folder = tmp_path / "tuneplane" / "runs" / "root" / "ring" / "ring-20261129-120000-x3k9"
    write_run(local_job(folder, spec__node__scratch=str(scratch)))
    base = scratch / f"tuneplane-{os.getuid()}"

    def make(host: str) -> Path:
        path = base / f"20261129-120000-abcd.{host}.0"
        (path / "work").mkdir(parents=True)
        (path / "work" / "x").write_bytes(b"x" * 10_000)
        (path / "agent.lock").write_text(host)
        return path

    return make


def test_work_folders_of_dead_agents_of_this_host_go(work: Callable[[str], Path]) -> None:
    here, there, held = work(os.uname().nodename), work("n7"), work(os.uname().nodename + "x")
    (held / "agent.lock").write_text(os.uname().nodename)
    (here.parent / "shares").mkdir()
    (here.parent / "link").symlink_to(here)
    runs = [RunFolder(path) for path in (here.parents[2] / "tuneplane/runs/root/ring").iterdir()]
    with (held / "agent.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found: list[Item] = abandoned_folders(runs)
        assert {item.path for item in found} <= {here, here.parent / "link"}
        for item in found:
            clear(item)
    assert not here.exists() and there.exists() and held.exists()
