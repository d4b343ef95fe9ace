"""A run found again by whatever its user types, and the roots in which it is looked for."""

from __future__ import annotations

import os
import pwd
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tuneplane.kernel.errors import OperationError, UsageError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.submission import record_submission
from tuneplane.runs.index import (
    current_user,
    find_run,
    iterate_runs,
    latest,
    remember_root,
    started_order,
    state_folder,
    storage_roots,
)

ME = pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own, in which nothing is known yet."""
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def make(root: Path, run_id: str, experiment: str = "ring", jobs: tuple[str, ...] = ()) -> RunFolder:
    run = RunFolder(root / "runs" / ME / experiment / run_id)
    run.submissions.mkdir(parents=True)
    run.job.write_text("{}")
    for job in jobs:
        record_submission(run, job, "tp", os.getpid())
    return run


def refusal(text: str) -> tuple[str, str]:
    with pytest.raises(UsageError) as caught:
        find_run(text)
    (fault,) = caught.value.faults
    assert fault.where == "RUN"
    return fault.what, fault.remedy


# What a user types


@pytest.mark.contract("C46")
def test_a_run_is_found_by_id_prefix_experiment_slurm_id_and_path(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = home / "tuneplane"
    old = make(root, "ring-20260114-093012-x3k9", jobs=("1200",))
    new = make(root, "ring-20260115-080000-aaaa", jobs=("1234", "1250"))
    mlp = make(root, "mlp-20260101-000000-zzzz", "mlp", jobs=("local-77",))
    assert find_run("ring-20260114-093012-x3k9") == old
    assert find_run("ring-20260114") == old
    assert find_run("ring-20260115-08") == new
    assert find_run("mlp-") == mlp
    assert find_run("ring") == new
    assert find_run("mlp") == mlp
    assert find_run("1200") == old
    assert find_run("1250") == find_run("1234") == new
    assert find_run("local-77") == mlp
    assert find_run(str(old.path)) == old
    assert find_run(f"{old.path}/") == old
    monkeypatch.chdir(old.path.parent)
    assert find_run("./ring-20260114-093012-x3k9") == old
    (home / "link").symlink_to(old.path)
    assert find_run(str(home / "link")) == old


def test_what_several_runs_could_be_is_told_with_their_names(home: Path) -> None:
    for number in range(7):
        make(home / "tuneplane", f"ring-20260114-09301{number}-x3k9")
    what, remedy = refusal("ring-2026")
    assert what == (
        "'ring-2026' could be ring-20260114-093010-x3k9, ring-20260114-093011-x3k9, ring-20260114-093012-x3k9, "
        "ring-20260114-093013-x3k9, ring-20260114-093014-x3k9 and 2 more"
    )
    assert remedy == "give more letters, or the whole id"
    make(home / "tuneplane", "net-20260114-093010-x3k9", "net")
    make(home / "tuneplane", "net-20260115-093010-x3k9", "net")
    assert refusal("net-")[0] == "'net-' could be net-20260114-093010-x3k9, net-20260115-093010-x3k9"


@pytest.mark.parametrize(
    "text", ["", "nope", "ring-2027", "99", "12_3", "local-1", "/nonexistent/run", "..", "*", "a\nb", "²"]
)
def test_what_is_no_run_is_told_with_the_list(home: Path, text: str) -> None:
    make(home / "tuneplane", "ring-20260114-093012-x3k9", jobs=("1200",))
    assert refusal(text) == (f"no run {text!r} of yours", "tp job ls lists them")


def test_a_folder_that_is_no_run_is_not_taken_for_one(home: Path, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    assert refusal(str(tmp_path / "x"))[0].startswith("no run ")


def test_an_experiment_named_like_a_number_or_a_prefix_comes_first(home: Path) -> None:
    make(home / "tuneplane", "ring-20260114-093012-x3k9", jobs=("12",))
    number = make(home / "tuneplane", "12-20260114-093012-x3k9", "12")
    assert find_run("12") == number
    make(home / "tuneplane", "rin-20260114-093012-x3k9", "rin")
    assert find_run("rin").path.parent.name == "rin"


def test_an_element_of_an_array_is_found_and_the_array_by_its_one_element(home: Path) -> None:
    one = make(home / "tuneplane", "a-20260114-093012-x3k9", "a", jobs=("50_3",))
    assert find_run("50_3") == find_run("50") == one
    assert refusal("50_4")[0] == "no run '50_4' of yours"
    make(home / "tuneplane", "b-20260114-093012-x3k9", "b", jobs=("50_4",))
    assert refusal("50")[0] == "'50' could be a-20260114-093012-x3k9, b-20260114-093012-x3k9"
    assert refusal("5")[0] == "no run '5' of yours"


def test_a_job_id_that_was_given_twice_means_the_latest_run(home: Path) -> None:
    make(home / "tuneplane", "a-20250114-093012-x3k9", "a", jobs=("local-77", "7"))
    new = make(home / "tuneplane", "b-20260114-093012-x3k9", "b", jobs=("local-77", "7"))
    assert find_run("local-77") == find_run("7") == new


def test_of_two_runs_of_one_second_the_one_written_last_is_the_latest(home: Path) -> None:
    first = make(home / "tuneplane", "ring-20260114-093012-zzzz")
    second = make(home / "tuneplane", "ring-20260114-093012-aaaa")
    os.utime(first.job, ns=(10**18, 10**18))
    os.utime(second.job, ns=(10**18 + 1, 10**18 + 1))
    assert find_run("ring") == latest([first, second]) == second
    second.job.unlink()
    assert latest([first, second]) == first


def test_runs_sort_by_time_not_by_experiment(home: Path) -> None:
    runs = [
        make(home / "tuneplane", "z-9-20260114-093012-x3k9", "z-9"),
        make(home / "tuneplane", "a-20260115-093012-x3k9", "a"),
        make(home / "tuneplane", "m-20250114-093012-x3k9", "m"),
    ]
    assert [r.path.parent.name for r in sorted(runs, key=started_order)] == ["m", "z-9", "a"]


# What is looked at


def test_what_is_no_run_among_runs_is_passed_over(home: Path, tmp_path: Path) -> None:
    run = make(home / "tuneplane", "ring-20260114-093012-x3k9")
    base = run.path.parent
    (base / "notes.txt").write_text("x")
    (base / "ring-20260114-093012-x3k9.old").mkdir()
    (base / "half").mkdir()
    (base.parent / "file").write_text("x")
    elsewhere = make(tmp_path / "elsewhere", "ring-20260114-093013-x3k9")
    (base / "ring-20260114-093013-x3k9").symlink_to(elsewhere.path)
    (base.parent / "linked").symlink_to(elsewhere.path.parent)
    assert list(iterate_runs()) == [run]


def test_runs_of_others_are_not_ones_own(home: Path) -> None:
    theirs = RunFolder(home / "tuneplane" / "runs" / "mallory" / "ring" / "ring-20260114-093012-x3k9")
    theirs.path.mkdir(parents=True)
    assert list(iterate_runs()) == []
    assert list(iterate_runs(user="mallory")) == [theirs]


def test_a_root_that_is_gone_or_closed_hides_no_other(home: Path, tmp_path: Path) -> None:
    run = make(tmp_path / "scratch", "ring-20260114-093012-x3k9")
    remember_root(tmp_path / "gone")
    remember_root(tmp_path / "scratch")
    (tmp_path / "file").write_text("x")
    remember_root(tmp_path / "file")
    assert list(iterate_runs()) == [run]


def test_one_root_by_two_names_has_its_runs_once(home: Path, tmp_path: Path) -> None:
    run = make(tmp_path / "scratch", "ring-20260114-093012-x3k9")
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    remember_root(tmp_path / "scratch")
    remember_root(tmp_path / "link")
    assert [r.run_id for r in iterate_runs()] == [run.run_id]
    assert find_run("ring-20260114").run_id == run.run_id


# Roots


def test_the_default_root_is_always_known_and_others_once_they_were_used(home: Path, tmp_path: Path) -> None:
    assert storage_roots() == [home / "tuneplane"]
    remember_root(tmp_path / "a b\nc")
    remember_root(tmp_path / "a b\nc")
    remember_root(home / "tuneplane")
    assert storage_roots() == sorted([tmp_path / "a b\nc", home / "tuneplane"])


def test_roots_remembered_at_once_are_all_kept(tmp_path: Path) -> None:
    roots = [tmp_path / f"root{number}" for number in range(40)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(remember_root, roots * 3))
    assert set(roots) <= set(storage_roots())


@pytest.mark.parametrize("text", ["", "{", "5", "[]", '["/x"]', '"relative"', '{"a": 1}', "\udcff"])
def test_a_damaged_note_of_a_root_hides_no_other_and_is_mended(tmp_path: Path, text: str) -> None:
    remember_root(tmp_path / "one")
    remember_root(tmp_path / "two")
    (note,) = [p for p in (state_folder() / "roots").iterdir() if str(tmp_path / "one") in p.read_text()]
    note.write_text(text, errors="surrogateescape")
    assert tmp_path / "one" not in storage_roots()
    assert tmp_path / "two" in storage_roots()
    remember_root(tmp_path / "one")
    assert tmp_path / "one" in storage_roots()


def test_the_state_folder_is_the_users_alone_and_follows_xdg(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert state_folder() == home / ".local/state/tuneplane"
    assert stat.S_IMODE(state_folder().stat().st_mode) == 0o700
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert state_folder() == tmp_path / "state" / "tuneplane"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state_folder() == home / ".local/state/tuneplane"


def test_a_state_folder_that_cannot_be_made_is_told_and_hides_no_run(home: Path) -> None:
    run = make(home / "tuneplane", "ring-20260114-093012-x3k9")
    (home / ".local").write_text("in the way")
    with pytest.raises(OperationError) as caught:
        state_folder()
    assert caught.value.faults[0].what.startswith("cannot be made: ")
    assert list(iterate_runs()) == [run]


def test_a_user_is_who_the_system_says_whatever_the_environment_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "../mallory")
    assert current_user() == ME


def test_a_user_without_a_name_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    assert current_user() == "4000000"
