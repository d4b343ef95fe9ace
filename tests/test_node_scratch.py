"""The node-local folder of an attempt: nobody else's, gone at the end, and what killed agents left is found."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from run_fixture import Run, job_spec, runs_below, small_file_system

from tuneplane.containers import Launch
from tuneplane.node.scratch import (
    Scratch,
    held_scratch,
    read_launch,
    remove_abandoned,
    scratch_folder,
    write_launch,
)

MakeRun = Callable[..., Run]
NOBODY = 65_534
HOST = os.uname().nodename


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRun]:
    with runs_below(tmp_path) as make_one:
        yield make_one


def base_of(run: Run) -> Path:
    return run.scratch().path.parent


def refused(run: Run, told: str) -> None:
    done = run.run_once()
    assert done.returncode == 125
    assert " ".join(done.stderr.split()) == f"tuneplane: {told}"
    assert run.record()["state"] == "ended"


def test_a_folder_that_another_user_made_first_is_refused(make: MakeRun) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a folder to another user needs root")
    run = make("echo hello")
    base_of(run).mkdir(mode=0o777)
    os.chown(base_of(run), NOBODY, NOBODY)
    refused(
        run,
        f"scratch: {base_of(run)} belongs to user id {NOBODY} → have the administrators of this cluster"
        " remove it, or set `scratch` of the cluster profile",
    )
    assert list(base_of(run).iterdir()) == []


def test_a_link_in_its_place_is_refused(make: MakeRun, tmp_path: Path) -> None:
    run = make("echo hello")
    (tmp_path / "elsewhere").mkdir()
    base_of(run).symlink_to(tmp_path / "elsewhere")
    refused(run, f"scratch: {base_of(run)} is a link → remove it, it is to be a folder")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_in_its_place_is_refused(make: MakeRun) -> None:
    run = make("echo hello")
    base_of(run).touch()
    refused(run, f"scratch: {base_of(run)} is not a folder → remove it, it is to be a folder")


def test_a_folder_of_ones_own_that_is_open_to_others_is_closed(make: MakeRun) -> None:
    run = make("echo hello")
    base_of(run).mkdir()
    base_of(run).chmod(0o777)
    assert run.run_once().returncode == 0
    assert stat.S_IMODE(base_of(run).stat().st_mode) == 0o700


def test_a_node_without_the_scratch_folder_is_told_which_setting_it_is(make: MakeRun, tmp_path: Path) -> None:
    run = make("echo hello")
    (tmp_path / "scratch").rmdir()
    refused(
        run,
        f"{base_of(run)}: no scratch folder on this node: No such file or directory"
        " → see that it is there and that you may write to it, or set `scratch` of the cluster profile",
    )


def test_a_full_scratch_disk_is_told_and_nothing_is_left_there(make: MakeRun, tmp_path: Path) -> None:
    run = make("echo hello", files={"data.bin": "x" * (4 << 20)})
    with small_file_system(tmp_path / "disk", tmp_path / "scratch", 3 << 20):
        done = run.run_once()
        assert done.returncode == 125
        assert "the capsule cannot be unpacked (No space left on device)" in done.stderr
        assert f"free space under {run.scratch().path}" in done.stderr
        assert run.left_in_scratch() == []


@pytest.mark.parametrize("name", ["a b", "a$HOME", "50%j", "it's", 'a"b', "实验", "a\nb", "-n", "a\\b"])
def test_any_name_of_a_scratch_folder_works(make: MakeRun, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    run = make('cd / && [ -f "$TUNEPLANE_EXP_DIR/train.sh" ] && echo x >"$TMPDIR/x" && cat "$TMPDIR/x"')
    # As the profile of such a site would say it.
    text = run.folder.job.read_text()
    run.folder.job.chmod(0o644)
    value = json.loads(text)
    value["spec"]["node"]["scratch"] = str(tmp_path / name)
    run.folder.job.write_text(json.dumps(value))
    assert run.run_once().returncode == 0, run.log()
    assert run.log().endswith("\nx\n")
    assert [p.name for p in (tmp_path / name).iterdir()] == [base_of(run).name]


def test_what_an_agent_of_this_very_attempt_left_is_in_nobodys_way(make: MakeRun) -> None:
    run = make("ls -A $TMPDIR | wc -l")
    left = run.scratch().path / "work" / "deep"
    left.mkdir(parents=True)
    left.chmod(0o000)
    assert run.run_once().returncode == 0
    assert run.log().endswith("\n0\n")


def abandon(path: Path, host: str | None = HOST) -> Scratch:
    """A folder as an agent leaves it that was killed."""
    scratch = Scratch(path)
    (scratch.work / "folder").mkdir(parents=True)
    (scratch.work / "folder").chmod(0o555)
    if host is not None:
        scratch.lock.write_text(host)
    return scratch


def test_only_what_a_dead_agent_of_this_host_left_is_removed(tmp_path: Path) -> None:
    abandon(tmp_path / "dead.0.0")
    abandon(tmp_path / "of-another-host.0.0", "n17")
    abandon(tmp_path / "just-begun.0.0", "")
    abandon(tmp_path / "no-lock.0.0", None)
    alive = Scratch(tmp_path / "alive.0.0")
    (tmp_path / "a-file").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "agent.lock").write_text(HOST)
    (tmp_path / "linked.0.0").mkdir()
    (tmp_path / "linked.0.0" / "agent.lock").symlink_to(tmp_path / "elsewhere" / "agent.lock")
    with held_scratch(alive):
        assert remove_abandoned(tmp_path) == ["dead.0.0", "elsewhere"]
        assert alive.work.parent.exists()
    assert not alive.path.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "a-file",
        "just-begun.0.0",
        "linked.0.0",
        "no-lock.0.0",
        "of-another-host.0.0",
    ]


def test_a_folder_is_held_for_as_long_as_its_agent_lives(make: MakeRun) -> None:
    run = make("echo training; sleep 1000")
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    lock = run.scratch().lock
    assert lock.read_text() == HOST
    with lock.open("r+") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert remove_abandoned(base_of(run)) == []
    agent.kill()  # the trainer, which lives on, holds nothing
    run.finish(agent)
    assert run.processes() != []
    assert remove_abandoned(base_of(run)) == [run.scratch().path.name]


def test_a_folder_goes_with_its_agent_whatever_happens(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path / "run.0.0")
    with pytest.raises(KeyError), held_scratch(scratch):
        assert stat.S_IMODE(scratch.path.stat().st_mode) == 0o700
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_note_of_the_start_keeps_every_byte_and_is_read_by_its_owner_alone(tmp_path: Path) -> None:
    started = Launch(
        ["bash", "-c", "a\nb", os.fsdecode(b"\xff")], {"TOKEN": os.fsdecode(b"\xfe") + "秘"}, "/"
    )
    path = tmp_path / "launch.json"
    script = tmp_path / "start.sh"
    write_launch(path, replace(started, files={str(script): "export A='\udcff'\n"}))
    assert [stat.S_IMODE(file.stat().st_mode) for file in (path, script)] == [0o600, 0o600]
    assert script.read_bytes() == b"export A='\xff'\n"
    assert read_launch(path) == started
    path.chmod(0o644)
    with pytest.raises(ValueError, match="not this user's alone"):
        read_launch(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="Too many levels"):
        read_launch(tmp_path / "link")


@pytest.mark.slow
def test_an_attempts_folder_is_gone_after_a_signal_that_nobody_handles(make: MakeRun) -> None:
    """QUIT ends the agent as KILL does: the next one on this node finds what it left."""
    run = make("echo training; sleep 1000")
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    agent.send_signal(signal.SIGQUIT)
    run.finish(agent)
    assert run.left_in_scratch() == [run.scratch().path.name]
    assert make("echo next").run_once().returncode == 0
    assert run.left_in_scratch() == []


def test_a_second_agent_of_the_same_node_and_attempt_is_refused(make: MakeRun) -> None:
    """Two tasks on one node, by an option of srun: the first one's folder is not taken from it."""
    run = make("echo training; until [ -e $TUNEPLANE_OUT_DIR/go ]; do sleep 0.05; done; cat tuneplane.yaml")
    agent = run.start_node(run.claimed())
    run.wait_for_line("training")
    second = run.node()
    assert second.returncode == 125
    assert " ".join(second.stderr.split()) == (
        f"tuneplane: {run.scratch().path}: another agent of this very node and attempt runs here"
        " → one task a node: look for --ntasks in srun_options and in how the script was started"
    )
    (run.folder.out / "go").touch()
    assert run.finish(agent).returncode == 0
    assert "apiVersion" in run.log()


@pytest.mark.parametrize("experiment", ["a", "x" * 64])
def test_sockets_below_tmpdir_have_a_path_that_the_kernel_takes(experiment: str, tmp_path: Path) -> None:
    """A whole node trains with multiprocessing, which makes `pymp-xxxxxxxx/listener-xxxxxxxx` there."""
    job = job_spec(tmp_path, f"{experiment}-20261129-120000-x3k9", scratch=Path("/scratch/local"))
    temporary = str(scratch_folder(job, 12, 1023).temporary)
    assert len(temporary + "/pymp-xxxxxxxx/listener-xxxxxxxx") <= 107


def test_runs_of_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    ids = [
        f"{name}-20261129-120000-{end}" for name in ("ring", "rings", "x" * 64) for end in ("x3k9", "x3ka")
    ]
    folders = {scratch_folder(job_spec(tmp_path, i, scratch=Path("/s")), 0, 0).path for i in ids}
    assert len(folders) == len(ids)
