"""A lab becomes a capsule: what goes in, what stays out, what is refused, and nothing half-made."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from git_lab import GitLab
from small_disk import run_on_small_disk

from tuneplane.capsule import CapsuleInfo, build_capsule, check_capsule, verify_run, write_kernel_application
from tuneplane.kernel.errors import Exit, OperationError, UsageError
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.kernel.unpack import KERNEL_FOLDER, read_manifest, unpack_capsule

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture
def lab(tmp_path: Path) -> GitLab:
    return GitLab(tmp_path / "lab")


def unpacked(lab: GitLab, **flags: bool) -> tuple[CapsuleInfo, Path]:
    """Build the lab's capsule beside it and unpack it as a node does."""
    capsule = lab.repository.parent / "capsule.tar"
    info = build_capsule(lab.root, capsule, **flags)
    work = lab.repository.parent / f"work-{len(list(lab.repository.parent.iterdir()))}"
    unpack_capsule(capsule, work, info.digest)
    return info, work


def lab_files(work: Path) -> dict[str, bytes]:
    """What lies in the work folder beside the kernel, links as their targets."""
    found = {}
    for path in work.rglob("*"):
        name = str(path.relative_to(work))
        if name.startswith(".tuneplane") or (path.is_dir() and not path.is_symlink()):
            continue
        found[name] = os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()  # noqa: PTH115
    return found


def refusal(lab: GitLab, **flags: object) -> str:
    """All that both building and checking say; building leaves nothing."""
    capsule = lab.repository.parent / "capsule.tar"
    before = sorted(lab.repository.parent.iterdir())
    with pytest.raises(UsageError) as raised:
        build_capsule(lab.root, capsule, **flags)  # type: ignore[arg-type]
    faults, info = check_capsule(lab.root, **flags)  # type: ignore[arg-type]
    assert info is None
    assert tuple(faults) == raised.value.faults
    assert raised.value.exit_code == Exit.WRONG_USE
    assert sorted(lab.repository.parent.iterdir()) == before
    return str(raised.value)


def test_the_commit_and_the_kernel_and_nothing_else(lab: GitLab) -> None:
    lab.write("experiments/a/train.sh", "#!/bin/bash\n", 0o755)
    lab.write("configs/x.yaml", "x: 1\n", 0o600)
    lab.write(".gitignore", "data/\n")
    commit = lab.commit()
    lab.write("data/huge", "ignored, so neither dirt nor content")
    info, work = unpacked(lab)
    assert lab_files(work) == {
        "tuneplane.yaml": (lab.root / "tuneplane.yaml").read_bytes(),
        "experiments/a/train.sh": b"#!/bin/bash\n",
        "configs/x.yaml": b"x: 1\n",
        ".gitignore": b"data/\n",
    }
    assert stat.S_IMODE((work / "experiments/a/train.sh").stat().st_mode) == 0o555
    assert stat.S_IMODE((work / "configs/x.yaml").stat().st_mode) == 0o444
    assert (work / KERNEL_FOLDER / "tuneplane/kernel/unpack.py").is_file()
    capsule = lab.root.parent / "capsule.tar"
    assert (info.commit, info.dirty, info.left_out, info.files) == (commit, [], [], 4)
    assert info.paths == lab_files(work).keys()
    assert info.size_bytes == capsule.stat().st_size
    assert stat.S_IMODE(capsule.stat().st_mode) == 0o444


def test_checking_tells_what_building_would_and_writes_nothing(lab: GitLab) -> None:
    lab.write("a", "1")
    lab.commit()
    before = {p: p.lstat().st_mtime_ns for p in lab.root.parent.rglob("*")}
    faults, foreseen = check_capsule(lab.root)
    assert faults == []
    assert {p: p.lstat().st_mtime_ns for p in lab.root.parent.rglob("*")} == before
    assert foreseen == build_capsule(lab.root, lab.root.parent / "capsule.tar")


def test_git_attributes_and_line_endings_change_nothing(lab: GitLab) -> None:
    lab.write("kept.py", "version = '$Format:%H$'\r\n")
    lab.write("secret-plan.md", "not exported by git archive\n")
    lab.write(".gitattributes", "kept.py export-subst -text\nsecret-plan.md export-ignore\n")
    lab.commit()
    lab.git("config", "core.autocrlf", "true")
    _, work = unpacked(lab)
    assert (work / "kept.py").read_bytes() == b"version = '$Format:%H$'\r\n"
    assert (work / "secret-plan.md").read_bytes() == b"not exported by git archive\n"


@pytest.mark.contract("C26")
def test_a_dirty_tree_is_refused_with_its_files_and_the_way_out(lab: GitLab) -> None:
    lab.write("experiments/a/train.sh", "old")
    lab.commit()
    lab.write("experiments/a/train.sh", "new")
    lab.write("forgotten.py")
    told = refusal(lab)
    assert "modified   experiments/a/train.sh" in told
    assert "untracked  forgotten.py" in told
    assert "git add -A && git commit" in told
    assert "--allow-dirty" in told


def test_a_lab_without_a_commit_is_refused(lab: GitLab) -> None:
    told = refusal(lab)
    assert "no commit yet" in told
    assert "tuneplane.yaml" in told
    assert "git add -A && git commit" in told


def test_allow_dirty_takes_what_stands_on_disk_and_records_it(lab: GitLab) -> None:
    for name in ("changed", "staged", "gone", "plain"):
        lab.write(name, "old")
    lab.write("was file", "old")
    lab.write("was/folder", "old")
    lab.write(".gitignore", "ignored\nuntracked now\n")
    lab.write("untracked now", "old")
    commit = lab.commit()
    lab.write("changed", "new")
    lab.write("staged", "index")
    lab.git("add", "staged")
    lab.write("staged", "disk")
    (lab.root / "gone").unlink()
    lab.write("new\nname", "new", 0o755)
    lab.link("new link", "changed")
    lab.write("ignored", "no")
    (lab.root / "was file").unlink()
    lab.write("was file/inner", "new")
    (lab.root / "was/folder").unlink()
    (lab.root / "was").rmdir()
    lab.write("was", "new")
    lab.git("rm", "-q", "--cached", "untracked now")
    info, work = unpacked(lab, allow_dirty=True)
    assert lab_files(work) == {
        "tuneplane.yaml": (lab.root / "tuneplane.yaml").read_bytes(),
        ".gitignore": b"ignored\nuntracked now\n",
        "plain": b"old",
        "changed": b"new",
        "staged": b"disk",
        "new\nname": b"new",
        "new link": b"changed",
        "was file/inner": b"new",
        "was": b"new",
    }
    assert (work / "new\nname").stat().st_mode & 0o111
    assert info.commit == commit
    assert set(info.dirty) == {
        "changed",
        "staged",
        "gone",
        r"'new\nname'",
        "new link",
        "was file",
        "was file/inner",
        "was",
        "was/folder",
        "untracked now",
    }


def test_allow_dirty_on_a_clean_lab_is_the_very_same_capsule(lab: GitLab) -> None:
    lab.write("script.sh", "x\r\n", 0o755)
    lab.write(".gitattributes", "*.sh text eol=crlf\n")
    lab.git("config", "core.safecrlf", "false")
    lab.commit()
    clean = build_capsule(lab.root, lab.root.parent / "a.tar")
    dirty = build_capsule(lab.root, lab.root.parent / "b.tar", allow_dirty=True)
    assert clean == dirty
    assert (lab.root.parent / "a.tar").read_bytes() == (lab.root.parent / "b.tar").read_bytes()


def test_a_sparse_checkout_submits_its_whole_commit(lab: GitLab) -> None:
    lab.write("a/here", "1")
    lab.write("b/not checked out", "2")
    lab.commit()
    lab.git("sparse-checkout", "set", "a")
    assert not (lab.root / "b").exists()
    lab.write("a/here", "changed")
    _, work = unpacked(lab, allow_dirty=True)
    assert (work / "b/not checked out").read_bytes() == b"2"
    assert (work / "a/here").read_bytes() == b"changed"


def test_allow_dirty_takes_a_lab_without_a_commit(lab: GitLab) -> None:
    lab.write("train.py", "1")
    info, work = unpacked(lab, allow_dirty=True)
    assert info.commit is None
    assert info.dirty == ["train.py", "tuneplane.yaml"]
    assert lab_files(work).keys() == {"train.py", "tuneplane.yaml"}


def test_modes_on_a_disk_that_has_none_are_the_commits(lab: GitLab) -> None:
    lab.write("train.sh", "1", 0o755)
    lab.commit()
    lab.git("config", "core.fileMode", "false")
    lab.write("train.sh", "2", 0o644)
    lab.write("new.sh", "2", 0o755)
    _, work = unpacked(lab, allow_dirty=True)
    assert (work / "train.sh").stat().st_mode & 0o111
    assert not (work / "new.sh").stat().st_mode & 0o111


@pytest.mark.contract("C11")
def test_keys_secrets_and_caches_never_enter_a_capsule_and_are_listed(lab: GitLab) -> None:
    out = [
        "server.key",
        "deep/er/.key",
        "secrets.env",
        "experiments/a/secrets.env",
        "private.key/inside",
        "__pycache__/a.cpython-311.pyc",
        "pkg/__pycache__/b.pyc",
        "lone.pyc",
        ".ipynb_checkpoints/n.ipynb",
        ".pytest_cache/v",
        "x/.mypy_cache/y",
        ".ruff_cache/z",
    ]
    stays = ["keys.py", "a.key.txt", "secrets.env.example", "my-secrets.env", "pycache/x"]
    for path in [*out, *stays]:
        lab.write(path, "the very secret")
    lab.commit()
    info, work = unpacked(lab)
    assert sorted(info.left_out) == sorted(out)
    assert lab_files(work).keys() == {*stays, "tuneplane.yaml"}
    assert not {e.path for e in read_manifest(lab.root.parent / "capsule.tar")} & set(out)


def test_what_never_travels_makes_no_lab_dirty_and_is_not_to_be_committed(lab: GitLab) -> None:
    lab.write("old.key", "1")
    lab.commit()
    lab.write("old.key", "2")
    lab.write("secrets.env", "HF_TOKEN=hf_real")
    lab.write("pkg/__pycache__/m.pyc", "cache")
    info = build_capsule(lab.root, lab.root.parent / "capsule.tar")
    assert info.left_out == ["old.key"]
    lab.write("new.py")
    told = refusal(lab)
    assert "first add to .gitignore what must stay secret:\n    secrets.env" in told
    assert "m.pyc" not in told
    assert "old.key" not in told
    info = build_capsule(lab.root, lab.root.parent / "capsule.tar", allow_dirty=True)
    assert (info.dirty, info.left_out) == (["new.py"], ["old.key", "secrets.env"])


def test_submodules_are_refused_by_name(lab: GitLab, tmp_path: Path) -> None:
    other = GitLab(tmp_path / "other")
    other.commit()
    lab.commit()
    lab.git("-c", "protocol.file.allow=always", "submodule", "-q", "add", str(other.root), "third party/dep")
    lab.commit()
    told = refusal(lab)
    assert "submodules" in told
    assert "third party/dep" in told
    assert "--mount SRC:DST" in told
    other_inside = GitLab(lab.root / "nested")
    other_inside.commit()
    assert "nested/" in refusal(lab, allow_dirty=True)


@pytest.mark.parametrize("committed", [True, False])
def test_lfs_pointers_are_refused_by_name(lab: GitLab, committed: bool) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 12345\n"
    lab.commit()
    lab.write("weights/model.bin", pointer)
    lab.write("docs/about-lfs.md", "A pointer begins with\n" + pointer)
    if committed:
        lab.commit()
    told = refusal(lab, allow_dirty=not committed)
    assert "Git LFS" in told
    assert "weights/model.bin" in told
    assert "about-lfs" not in told


def test_links_inside_are_kept_and_links_that_lead_out_are_refused(lab: GitLab) -> None:
    lab.write("a/file", "1")
    lab.link("a/inside", "../a/file")
    lab.link("folder", "a")
    lab.link("dangling", "nowhere/yet")
    lab.link("to the top", ".")
    lab.commit()
    _, work = unpacked(lab)
    assert (work / "folder/inside").read_bytes() == b"1"
    assert lab_files(work)["dangling"] == b"nowhere/yet"
    lab.link("abs", "/data/sets")
    lab.link("a/out", "../../elsewhere")
    lab.link("folder out", "folder/../../x")
    lab.commit()
    told = refusal(lab)
    assert "abs is a link that leads out: /data/sets" in told
    assert "a/out is a link that leads out: ../../elsewhere" in told
    assert "folder out is a link that leads out" in told
    assert "a/inside" not in told
    assert "dangling" not in told


def test_a_link_to_the_repository_above_the_lab_leads_out(tmp_path: Path) -> None:
    lab = GitLab(tmp_path / "repo" / "lab", repository=tmp_path / "repo")
    (tmp_path / "repo" / "shared").write_text("1")
    lab.link("shared", "../shared")
    lab.git("-C", "..", "add", "-A")
    lab.commit()
    assert "shared is a link that leads out: ../shared" in refusal(lab)


@pytest.mark.parametrize(
    "path",
    [
        "tuneplane/__init__.py",
        "tuneplane/data.txt",
        "tuneplane.py",
        "tuneplane.cpython-311-x86_64-linux-gnu.so",
    ],
)
def test_a_lab_that_would_shadow_the_installed_package_is_refused(lab: GitLab, path: str) -> None:
    lab.write(path)
    lab.commit()
    assert "would be imported in place of the installed tuneplane" in refusal(lab)


def test_the_name_elsewhere_shadows_nothing(lab: GitLab) -> None:
    for path in ("common/tuneplane/x.py", "tuneplane.toml", "tuneplane_extra/x.py", "tuneplane.so.d/x"):
        lab.write(path)
    lab.commit()
    assert check_capsule(lab.root)[0] == []


def test_the_kernels_place_is_reserved(lab: GitLab) -> None:
    lab.write(".tuneplane/kernel/tuneplane/__init__.py", "evil")
    lab.commit()
    assert ".tuneplane at the lab's top is where a capsule keeps the kernel" in refusal(lab)


def test_a_lab_too_large_names_its_largest_files(lab: GitLab) -> None:
    for n in range(15):
        lab.write(f"data/{n:02}.bin", b"\0" * (100_000 + n * 20_000))
    lab.commit()
    told = refusal(lab, limit_bytes=1 << 20)
    assert "a capsule holds 1.0 MiB" in told
    assert told.index("data/14.bin") < told.index("data/05.bin")
    assert "data/04.bin" not in told
    assert "--mount SRC:DST" in told


def test_a_lab_that_git_ignores_is_refused(tmp_path: Path) -> None:
    lab = GitLab(tmp_path / "repo" / "lab", repository=tmp_path / "repo")
    (tmp_path / "repo" / ".gitignore").write_text("lab/\n")
    lab.git("-C", "..", "add", ".gitignore")
    lab.git("commit", "-q", "-m", "x")
    for allow_dirty in (False, True):
        told = refusal(lab, allow_dirty=allow_dirty)
        assert "tuneplane.yaml is not in the commit" in told
        assert "git check-ignore -v tuneplane.yaml" in told


def test_all_faults_come_at_once(lab: GitLab) -> None:
    lab.commit()
    lab.write("tuneplane.py")
    lab.write(".tuneplane/x")
    lab.link("out", "/")
    lab.write("big", b"0" * 2000)
    lab.write("pointer", "version https://git-lfs.github.com/spec/v1\n")
    lab.commit()
    lab.write("dirty")
    with pytest.raises(UsageError) as raised:
        build_capsule(lab.root, lab.root.parent / "capsule.tar", limit_bytes=1000)
    assert len(raised.value.faults) == 6


def test_what_is_neither_file_nor_link_is_refused(lab: GitLab) -> None:
    lab.write("pipe", "was a file")
    lab.commit()
    (lab.root / "pipe").unlink()
    os.mkfifo(lab.root / "pipe")
    told = refusal(lab, allow_dirty=True)
    assert "neither file nor link, so it cannot travel:\n    pipe" in told


def test_a_file_that_changes_while_it_is_packed_is_noticed(
    lab: GitLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.commit()
    growing = lab.write("growing.log", "1")
    import tuneplane.capsule as module

    plan = module._plan

    def plan_then_grow(*arguments: object) -> object:
        planned = plan(*arguments)  # type: ignore[arg-type]
        growing.write_text("12")
        return planned

    monkeypatch.setattr(module, "_plan", plan_then_grow)
    with pytest.raises(OperationError, match="changed while it was packed") as raised:
        build_capsule(lab.root, lab.root.parent / "capsule.tar", allow_dirty=True)
    assert "growing.log" in str(raised.value)
    assert [p.name for p in lab.root.parent.iterdir()] == ["lab"]


def test_names_that_a_message_cannot_hold_are_told_escaped(lab: GitLab) -> None:
    lab.commit()
    lab.write("bad \udcff\nname")
    told = refusal(lab)
    assert r"untracked  'bad \udcff\nname'" in told
    told.encode()


def test_a_full_disk_leaves_nothing(lab: GitLab) -> None:
    lab.write("large", os.urandom(500_000))
    lab.commit()
    script = (
        "import sys; from pathlib import Path\n"
        "from tuneplane.capsule import build_capsule\n"
        "from tuneplane.kernel.errors import OperationError\n"
        "disk = Path(sys.argv[2])\n"
        "try: build_capsule(Path(sys.argv[1]), disk / 'capsule.tar')\n"
        "except OperationError as error: print(error)\n"
        "print('left:', list(disk.iterdir()))\n"
    )
    disk = lab.root.parent / "disk"
    command = [sys.executable, "-c", script, str(lab.root), str(disk)]
    done = run_on_small_disk(disk, 256 << 10, command, {**os.environ, "PYTHONPATH": str(REPOSITORY)})
    assert "the capsule cannot be written (No space left on device)" in done.stdout, done.stderr
    assert "left: []" in done.stdout


def test_a_destination_that_does_not_exist_is_told(lab: GitLab) -> None:
    lab.commit()
    with pytest.raises(OperationError, match=r"cannot be written \(No such file"):
        build_capsule(lab.root, lab.root.parent / "no such folder" / "capsule.tar")


def test_a_run_is_verified_from_what_lies_in_its_folder(lab: GitLab, tmp_path: Path) -> None:
    lab.write("a", "1")
    lab.commit()
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    info = build_capsule(lab.root, run.capsule)
    kernel = write_kernel_application(run.kernel)
    assert verify_run(run, info.digest, kernel) == []
    lab.write("a", "2")
    lab.commit()
    other = build_capsule(lab.root, run.capsule)
    run.kernel.chmod(0o644)
    run.kernel.write_bytes(run.kernel.read_bytes() + b"x")
    found = "\n".join(map(str, verify_run(run, info.digest, kernel)))
    assert f"the capsule's digest is {other.digest}, not {info.digest}" in found
    assert f"not {kernel} as recorded at submit" in found
    run.kernel.unlink()
    run.capsule.unlink()
    assert len(verify_run(run, info.digest, kernel)) == 2


def test_packing_imports_nothing_heavy() -> None:
    script = (
        "import sys, tuneplane.capsule; print([m for m in sys.modules if m.split('.')[0] in sys.argv[1:]])"
    )
    heavy = ["hydra", "omegaconf", "submitit", "msgspec", "rich", "yaml", "click"]
    done = subprocess.run(
        [sys.executable, "-c", script, *heavy], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_large_file_is_streamed(lab: GitLab) -> None:
    size_bytes = 200 << 20
    with (lab.root / "weights.bin").open("wb") as file:
        file.truncate(size_bytes)  # zeros: git maps its own small file, so what it holds is content
    lab.commit()
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from tuneplane.capsule import build_capsule\n"
        "from tuneplane.kernel.unpack import unpack_capsule\n"
        "capsule = Path(sys.argv[1]).parent / 'capsule.tar'\n"
        "info = build_capsule(Path(sys.argv[1]), capsule)\n"
        "unpack_capsule(capsule, capsule.parent / 'work', info.digest)\n"
        # Its own peak since exec: ru_maxrss would count what the process that started it held.
        "status = Path('/proc/self/status').read_text()\n"
        "print(status.split('VmHWM:')[1].split()[0], resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(lab.root)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    own_kib, git_kib = map(int, done.stdout.split())
    assert own_kib < 60 << 10
    assert git_kib < 100 << 10
