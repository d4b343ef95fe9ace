"""A lab: `tp init` makes one and never overwrites, and every command finds it from below by its marker."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tuneplane.kernel.errors import OperationError, UsageError
from tuneplane.lab.marker import Lab, find_lab, init_lab
from tuneplane.recipes.documents import MOST_BYTES

ODD = "lab with $HOME 'quotes\" 实验\nand a line"


def tree(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if ".git" not in p.relative_to(root).parts}


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


@pytest.mark.contract("C1")
def test_a_new_lab_is_a_git_repository_with_a_marker_and_its_folders(tmp_path: Path) -> None:
    founded = init_lab(tmp_path / "deep" / "my-lab")
    root = tmp_path / "deep" / "my-lab"
    assert founded.lab == Lab(root, "my-lab") == find_lab(root)
    assert (root / "tuneplane.yaml").read_text() == 'apiVersion: tuneplane/project/v1\nname: "my-lab"\n'
    assert tree(root) == {
        "tuneplane.yaml",
        ".gitignore",
        "experiments",
        "experiments/.gitkeep",
        "configs",
        "configs/.gitkeep",
        "common",
        "common/.gitkeep",
    }
    assert founded.git == "made"
    git(root, "add", "-A")
    assert "experiments/.gitkeep" in git(root, "diff", "--cached", "--name-only")


@pytest.mark.parametrize("name", [ODD, "null", "yes: no", "  ", "-", "'"])
def test_a_lab_at_any_path_is_found_again(tmp_path: Path, name: str) -> None:
    lab = init_lab(tmp_path / name).lab
    assert find_lab(tmp_path / name / "experiments") == lab
    assert lab.name.strip()


def test_a_lab_at_a_path_that_is_not_utf8_is_found_again(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    lab = init_lab(folder).lab
    assert find_lab(folder) == lab and lab.name == "caf_"


def test_the_lab_is_found_from_any_depth_and_through_a_link(tmp_path: Path) -> None:
    lab = init_lab(tmp_path / "lab", "Lab of Ünal").lab
    deep = lab.root / "experiments" / "x" / "y"
    deep.mkdir(parents=True)
    (tmp_path / "link").symlink_to(deep)
    assert find_lab(deep) == find_lab(tmp_path / "link") == Lab(lab.root, "Lab of Ünal")


def test_without_a_lab_the_user_is_told_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no lab here") as caught:
        find_lab(tmp_path)
    assert "tp init" in caught.value.faults[0].remedy and caught.value.exit_code == 2


def test_a_marker_of_the_public_client_with_more_keys_is_read(tmp_path: Path) -> None:
    (tmp_path / "tuneplane.yaml").write_text(
        "# ours\napiVersion: tuneplane/project/v1\nname: shared lab\nconsole:\n  url: https://x/\nteams: [a, b]\n"
    )
    assert find_lab(tmp_path).name == "shared lab"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("apiVersion: tuneplane/project/v1\nname: [\n", 3, "not the YAML"),
        ("apiVersion: tuneplane/project/v1\n\nname: [a]\n", 3, "name is a list, not text"),
        ("apiVersion: tuneplane/project/v1\nname: 7\n", 2, "name is an int, not text"),
        ("name: a\napiVersion: tuneplane/project/v9\n", 2, "tuneplane/project/v9"),
        ("name: a\n", 1, "apiVersion is missing"),
        ("apiVersion: tuneplane/project/v1\n", 1, "name is missing"),
        ("apiVersion: tuneplane/project/v1\nname: ''\n", 2, "name cannot be ''"),
        ("name: a\nname: b\n", 2, "stands twice"),
        ("- a\n- b\n", 1, "the document is a list, not a mapping"),
        ("a: &x [*x]\n", 1, "aliases"),
        ("a: \x00\n", 1, "forbids"),
        ("just words", 1, "is text, not a mapping"),
    ],
)
def test_a_malformed_marker_is_named_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    (tmp_path / "tuneplane.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        find_lab(tmp_path)
    assert f"{tmp_path}/tuneplane.yaml:{line}: " in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.slow
def test_a_marker_that_is_empty_latin1_or_huge_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "tuneplane.yaml"
    for content, words in (
        (b"", "empty"),
        (b"name: a\nx: caf\xe9", ":2: is not UTF-8"),
        (b"#" * (MOST_BYTES + 1), "larger than"),
        (b"[" * 100_000, "nested too deeply"),
    ):
        marker.write_bytes(content)
        with pytest.raises(UsageError, match=words):
            find_lab(tmp_path)


def test_a_marker_that_is_a_folder_a_pipe_or_a_dead_link_is_refused_without_waiting(tmp_path: Path) -> None:
    marker = tmp_path / "tuneplane.yaml"
    marker.mkdir()
    with pytest.raises(UsageError, match="is not a file"):
        find_lab(tmp_path)
    marker.rmdir()
    os.mkfifo(marker)
    with pytest.raises(UsageError, match="is not a file"):
        find_lab(tmp_path)
    marker.unlink()
    marker.symlink_to("nowhere")
    with pytest.raises(OperationError, match="No such file"):
        find_lab(tmp_path)


def test_a_lab_inside_a_lab_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    lab = init_lab(tmp_path / "outer").lab
    before = tree(lab.root)
    for inner in (lab.root, lab.root / "common" / "inner", lab.root / "new"):
        with pytest.raises(UsageError):
            init_lab(inner)
    (lab.root / "tuneplane.yaml").write_text("broken: [")
    with pytest.raises(UsageError, match="inside the lab"):
        init_lab(lab.root / "new")
    assert tree(lab.root) == before


def test_what_lies_in_the_folder_already_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("mine\n")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text("a: 1")
    git(tmp_path, "init", "-q")
    founded = init_lab(tmp_path)
    assert (tmp_path / ".gitignore").read_text() == "mine\n"
    assert sorted(p.name for p in (tmp_path / "configs").iterdir()) == ["mine.yaml"]
    assert founded.git == "there"


def test_a_lab_in_a_folder_of_a_repository_makes_no_repository_of_its_own(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert init_lab(tmp_path / "sub").git == "there"
    assert not (tmp_path / "sub" / ".git").exists()


def test_without_git_the_lab_is_made_and_says_that_git_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert init_lab(tmp_path / "lab").git == "missing"
    assert find_lab(tmp_path / "lab").name == "lab"


def test_a_git_directory_of_the_calling_shell_is_not_the_labs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere.git"))
    init_lab(tmp_path / "lab")
    assert (tmp_path / "lab" / ".git" / "HEAD").exists() and not (tmp_path / "elsewhere.git").exists()


def test_a_git_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "git").write_text("#!/bin/sh\nmkdir .git\necho no space left >&2\nexit 128\n")
    (programs / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "mine").write_text("")
    with pytest.raises(OperationError, match="no space left") as caught:
        init_lab(tmp_path / "lab")
    assert caught.value.exit_code == 1
    assert [p.name for p in (tmp_path / "lab").iterdir()] == ["mine"]
    with pytest.raises(OperationError):
        init_lab(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


def test_a_folder_without_permission_is_the_machines_refusal(tmp_path: Path) -> None:
    closed = Path("/proc/self/fdinfo")  # nobody, root neither, makes a file there
    with pytest.raises(OperationError, match="no lab was made"):
        init_lab(closed / "lab")


@pytest.mark.parametrize("name", ["", "   ", "two\nlines", "bell\a", "\udce9"])
def test_a_name_that_cannot_be_printed_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="not a name for a lab"):
        init_lab(tmp_path / "lab", name)
    assert not (tmp_path / "lab").exists()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lab").write_text("mine")
    with pytest.raises(UsageError, match="not a folder"):
        init_lab(tmp_path / "lab")
    with pytest.raises(OperationError):
        init_lab(tmp_path / "lab" / "below")
    assert (tmp_path / "lab").read_text() == "mine"
