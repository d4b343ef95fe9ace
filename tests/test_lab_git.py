"""The lab as git sees it, whatever the user's shell and git configuration say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from git_lab import GitLab

from tuneplane.kernel.errors import OperationError
from tuneplane.lab.git import (
    COMMIT_REMEDY,
    LabState,
    clean_environment,
    commit_faults,
    parse_status,
    read_blobs,
    read_state,
    read_tree,
)

AWKWARD = "a [b]* $HOME %s 'q' \"d\" 中文\nnew"


def states(lab: GitLab) -> dict[str, str]:
    return {d.path: d.state for d in read_state(lab.root).dirty}


def test_a_clean_lab_on_a_branch(tmp_path: Path) -> None:
    lab = GitLab(tmp_path)
    commit = lab.commit()
    state = read_state(tmp_path)
    assert (state.commit, state.branch, state.detached, state.dirty) == (commit, "main", False, ())
    assert state.repository == tmp_path
    assert state.committed_s == int(lab.git("show", "-s", "--format=%ct"))
    assert commit_faults(state) == []


def test_each_way_of_being_dirty_has_its_name(tmp_path: Path) -> None:
    lab = GitLab(tmp_path)
    for name in ("changed", "staged", "gone", "removed", "becomes link", "moved", "mode", AWKWARD):
        lab.write(name, name)
    lab.commit()
    lab.write("changed", "2")
    lab.write("staged", "2")
    lab.git("add", "staged")
    (tmp_path / "gone").unlink()
    lab.git("rm", "-q", "removed")
    (tmp_path / "becomes link").unlink()
    lab.link("becomes link", "mode")
    lab.git("mv", "moved", "moved away")
    (tmp_path / "mode").chmod(0o755)
    lab.write(AWKWARD, "2")
    lab.write("new/with\nnewline", "new")
    lab.write(".gitignore", "ignored\n")
    lab.write("ignored", "never told")
    lab.write("added then gone")
    lab.git("add", "added then gone")
    (tmp_path / "added then gone").unlink()
    assert states(lab) == {
        "changed": "modified",
        "staged": "staged",
        "gone": "deleted",
        "removed": "deleted",
        "becomes link": "modified",
        "moved": "deleted",
        "moved away": "staged",
        "mode": "modified",
        AWKWARD: "modified",
        "new/with\nnewline": "untracked",
        ".gitignore": "untracked",
        "added then gone": "deleted",
    }


def test_no_setting_of_the_user_hides_a_change(tmp_path: Path) -> None:
    lab = GitLab(tmp_path)
    lab.write("moved", "content that git recognises\n" * 20)
    lab.commit()
    for setting in (
        "status.showUntrackedFiles=no",
        "status.renames=copies",
        "status.short=true",
        "status.relativePaths=false",
        "core.quotePath=true",
        "color.ui=always",
        "diff.ignoreSubmodules=all",
    ):
        lab.git("config", *setting.split("="))
    lab.git("mv", "moved", "dest")
    lab.write("new")
    assert states(lab) == {"moved": "deleted", "dest": "staged", "new": "untracked"}


def test_variables_of_the_shell_do_not_send_git_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = GitLab(tmp_path / "other")
    other.commit()
    lab = GitLab(tmp_path / "lab")
    lab.write("only here")
    commit = lab.commit()
    monkeypatch.setenv("GIT_DIR", str(other.root / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other.root))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "no index"))
    monkeypatch.setenv("GIT_TRACE", "1")
    monkeypatch.setenv("GIT_OBJECT_DIRECTORY", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.bare")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "true")
    monkeypatch.setenv("LC_ALL", "xx_XX")
    state = read_state(lab.root)
    assert (state.commit, state.dirty) == (commit, ())
    assert {e.path for e in read_tree(state)} == {"only here", "tuneplane.yaml"}


def test_where_git_and_its_configuration_live_is_kept() -> None:
    kept = clean_environment(
        {"GIT_CONFIG_GLOBAL": "/g", "GIT_DIR": "/d", "HOME": "/h", "GIT_EXEC_PATH": "/e"}
    )
    assert kept["GIT_CONFIG_GLOBAL"] == "/g"
    assert kept["GIT_EXEC_PATH"] == "/e"
    assert kept["HOME"] == "/h"
    assert "GIT_DIR" not in kept


@pytest.mark.parametrize("place", ["lab", "deep/er/lab", AWKWARD, "-o", "中文/ "])
def test_a_lab_below_the_repositorys_top_is_only_itself(tmp_path: Path, place: str) -> None:
    lab = GitLab(tmp_path / place, repository=tmp_path)
    lab.write("experiments/a/train.sh", mode=0o755)
    (tmp_path / "outside").write_text("1")
    lab.git("-C", str(tmp_path), "add", "-A")
    commit = lab.commit()
    (tmp_path / "outside").write_text("2")
    (tmp_path / f"{Path(place).parts[0]}x").write_text("a sibling whose name begins alike")
    state = read_state(lab.root)
    assert (state.commit, state.repository, state.dirty) == (commit, tmp_path, ())
    assert {(e.path, e.mode) for e in read_tree(state)} == {
        ("tuneplane.yaml", 0o100644),
        ("experiments/a/train.sh", 0o100755),
    }
    lab.write("experiments/a/train.sh", "changed")
    assert states(lab) == {"experiments/a/train.sh": "modified"}


def test_a_lab_reached_through_a_link_is_the_same_lab(tmp_path: Path) -> None:
    lab = GitLab(tmp_path / "real" / "lab", repository=tmp_path / "real")
    lab.commit()
    (tmp_path / "short").symlink_to(lab.root)
    assert read_state(tmp_path / "short") == read_state(lab.root)


def test_a_linked_worktree_is_a_lab_too(tmp_path: Path) -> None:
    lab = GitLab(tmp_path / "lab")
    lab.commit()
    lab.git("worktree", "add", "-q", "-b", "side", str(tmp_path / "side"))
    state = read_state(tmp_path / "side")
    assert (state.branch, state.repository, state.dirty) == ("side", tmp_path / "side", ())


def test_reading_a_lab_writes_nothing(tmp_path: Path) -> None:
    lab = GitLab(tmp_path)
    lab.write("touched")
    lab.commit()
    os.utime(tmp_path / "touched", (1, 1))  # git would like to note in its index that this is no change

    def everything() -> dict[str, tuple[int, int]]:
        return {str(p): (p.lstat().st_mtime_ns, p.lstat().st_ino) for p in tmp_path.rglob("*")}

    before = everything()
    assert read_state(tmp_path).dirty == ()
    assert everything() == before


def test_uncommitted_changes_are_refused_with_the_files_and_the_remedy(tmp_path: Path) -> None:
    lab = GitLab(tmp_path)
    lab.commit()
    lab.write("tuneplane.yaml", "name: changed\n")
    for n in range(30):
        lab.write(f"new/{n:02}")
    (fault,) = commit_faults(read_state(tmp_path))
    assert "uncommitted changes" in fault.what
    assert "git add -A && git commit" in fault.remedy
    assert "untracked  new/00" in fault.what
    assert "new/29" not in fault.what
    assert "and 11 more" in fault.what
    assert commit_faults(read_state(tmp_path), allow_dirty=True) == []


def test_a_lab_without_a_commit_is_refused_with_its_files(tmp_path: Path) -> None:
    lab = GitLab(tmp_path)
    state = read_state(tmp_path)
    assert (state.commit, state.branch) == (None, "main")
    (fault,) = commit_faults(state)
    assert "has no commit yet" in fault.what
    assert "tuneplane.yaml" in fault.what
    assert COMMIT_REMEDY in fault.remedy
    assert read_tree(state) == []
    assert commit_faults(read_state(lab.root), allow_dirty=True) == []


def test_a_secret_is_not_to_be_added_by_the_remedy(tmp_path: Path) -> None:
    GitLab(tmp_path)
    (fault,) = commit_faults(read_state(tmp_path), keep_out=["secrets.env"])
    assert "first add to .gitignore what must stay secret:\n    secrets.env" in fault.remedy


def test_a_detached_head_is_refused_with_the_way_back(tmp_path: Path) -> None:
    lab = GitLab(tmp_path)
    commit = lab.commit()
    lab.git("checkout", "-q", "--detach")
    state = read_state(tmp_path)
    assert (state.commit, state.branch, state.detached) == (commit, None, True)
    (fault,) = commit_faults(state)
    assert f"HEAD is detached at {commit[:12]}" in fault.what
    assert "git switch -c NAME" in fault.remedy
    assert commit_faults(state, allow_dirty=True) == []


def test_an_unfinished_merge_is_refused_even_where_dirt_is_allowed(tmp_path: Path) -> None:
    lab = GitLab(tmp_path)
    lab.write("both", "base\n")
    lab.commit()
    lab.git("switch", "-q", "-c", "side")
    lab.write("both", "side\n")
    lab.commit()
    lab.git("switch", "-q", "main")
    lab.write("both", "main\n")
    lab.commit()
    with pytest.raises(AssertionError):
        lab.git("merge", "side")
    (fault,) = commit_faults(read_state(tmp_path), allow_dirty=True)
    assert "a merge is not finished" in fault.what
    assert "both" in fault.what


def test_a_folder_without_a_repository_is_told_how_to_become_one(tmp_path: Path) -> None:
    state = read_state(tmp_path)
    assert (state.repository, state.refusal, state.git_missing) == (None, "", False)
    (fault,) = commit_faults(state)
    assert fault.what == "the lab is not a git repository"
    assert fault.remedy == "git init && git add -A && git commit"


def test_without_git_one_message_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    GitLab(tmp_path).commit()
    monkeypatch.setenv("PATH", str(tmp_path))
    state = read_state(tmp_path)
    assert state.git_missing
    (fault,) = commit_faults(state)
    assert "git is not on the PATH" in fault.what


def test_a_bare_repository_and_the_git_folder_are_no_labs(tmp_path: Path) -> None:
    lab = GitLab(tmp_path / "lab")
    lab.commit()
    lab.git("clone", "-q", "--bare", ".", str(tmp_path / "bare.git"))
    for place in (tmp_path / "bare.git", lab.root / ".git"):
        (fault,) = commit_faults(read_state(place))
        assert "git cannot read the lab" in fault.what


def test_a_repository_of_someone_else_is_refused_in_gits_own_words(tmp_path: Path) -> None:
    lab = GitLab(tmp_path)
    lab.commit()
    if os.geteuid() != 0:
        if os.environ.get("CI"):
            pytest.fail("CI runs this as root, who can give a folder away")
        pytest.skip("only root can give a folder to another user")
    for place in (tmp_path, tmp_path / ".git"):
        os.chown(place, 65534, 65534)
    (fault,) = commit_faults(read_state(tmp_path))
    assert "dubious ownership" in fault.what
    assert f"git config --global --add safe.directory {tmp_path}" in fault.what


def test_a_damaged_repository_is_told_in_gits_words(tmp_path: Path) -> None:
    lab = GitLab(tmp_path)
    lab.write("data", "precious")
    lab.commit()
    state = read_state(tmp_path)
    entry = next(e for e in read_tree(state) if e.path == "data")
    (tmp_path / ".git" / "objects" / entry.oid[:2] / entry.oid[2:]).unlink()
    with pytest.raises(OperationError, match=f"{entry.oid}: missing") as raised:
        next(read_blobs(state, [entry.oid]))
    assert "git fsck" in str(raised.value)
    (tmp_path / ".git" / "HEAD").write_text("nonsense\n")
    (fault,) = commit_faults(read_state(tmp_path))
    assert "git" in fault.what


def test_blobs_come_as_committed_in_the_order_asked(tmp_path: Path) -> None:
    lab = GitLab(tmp_path)
    contents = {f"f{n}": os.urandom(n * 37) + b"\r\n$Id$\n" for n in range(100)}
    contents["large"] = os.urandom(3 << 20)
    contents["empty"] = b""
    for path, content in contents.items():
        lab.write(path, content)
    lab.write(".gitattributes", "f1* text eol=crlf ident export-subst\nf2* export-ignore\n")
    lab.git("-c", "core.autocrlf=false", "-c", "core.safecrlf=false", "add", "-A")
    lab.git("commit", "-q", "-m", "x")
    lab.git("config", "core.autocrlf", "true")
    state = read_state(tmp_path)
    entries = [e for e in read_tree(state) if e.path in contents and not e.path.startswith("f1")]
    assert {e.path for e in entries} == {p for p in contents if not p.startswith("f1")}
    got = {
        e.path: b"".join(b.chunks())
        for e, b in zip(entries, read_blobs(state, [e.oid for e in entries]), strict=True)
    }
    assert got == {e.path: contents[e.path] for e in entries}
    assert all(len(got[e.path]) == e.size_bytes for e in entries)


def test_a_blob_left_unread_does_not_disturb_the_next(tmp_path: Path) -> None:
    lab = GitLab(tmp_path)
    lab.write("a", b"a" * 3_000_000)
    lab.write("b", b"b")
    lab.commit()
    state = read_state(tmp_path)
    oids = {e.path: e.oid for e in read_tree(state)}
    blobs = read_blobs(state, [oids["a"], oids["b"], oids["a"]])
    next(blobs)
    assert b"".join(next(blobs).chunks()) == b"b"
    assert next(next(blobs).chunks()).startswith(b"aaa")
    blobs.close()


def test_a_replaced_commit_is_read_as_what_its_id_says(tmp_path: Path) -> None:
    lab = GitLab(tmp_path)
    first = lab.commit()
    lab.write("second")
    second = lab.commit()
    lab.git("replace", second, first)
    assert {e.path for e in read_tree(LabState(tmp_path, commit=second))} == {"second", "tuneplane.yaml"}


def test_git_status_is_parsed_field_by_field() -> None:
    output = b"\0".join(
        [
            b"# branch.oid 1234",
            b"# branch.head feature/x",
            b"# branch.ab +1 -0",
            b"1 .M N... 100644 100644 100644 aa bb sub/a b  c",
            b"2 R. N... 100644 100644 100644 aa bb R100 sub/new name",
            b"sub/old name",
            b"2 C. N... 100644 100644 100644 aa bb C75 sub/copy",
            b"sub/kept",
            b"u UU N... 100644 100644 100644 100644 aa bb cc sub/in conflict",
            b"1 .M SC.. 160000 160000 160000 aa bb sub/module",
            b"? sub/nested/",
            b"! sub/ignored",
            b"",
        ]
    )
    commit, branch, dirty = parse_status(output, "sub/")
    assert (commit, branch) == ("1234", "feature/x")
    assert {d.path: d.state for d in dirty} == {
        "a b  c": "modified",
        "new name": "staged",
        "old name": "deleted",
        "copy": "staged",
        "in conflict": "unmerged",
        "module": "submodule",
        "nested/": "untracked",
    }
