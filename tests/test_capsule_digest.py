"""Same commit, same tuneplane: the same digest, whoever packs, wherever, with whatever Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from git_lab import GitLab
from interpreters import pythons

from tuneplane.kernel.digests import Entry, manifest, sha256_bytes, tree_digest

REPOSITORY = Path(__file__).parent.parent

PACK = """
import hashlib, json, os, sys, time
from pathlib import Path
os.umask(int(sys.argv[3], 8))
from tuneplane.capsule import build_capsule, write_kernel_application
lab, target = Path(sys.argv[1]), Path(sys.argv[2])
info = build_capsule(lab, target)
kernel = write_kernel_application(target.with_suffix(".pyz"))
print(json.dumps([info.digest, hashlib.sha256(target.read_bytes()).hexdigest(), kernel]))
"""

CIRCUMSTANCES = {
    "plain": ("022", {"LC_ALL": "C.UTF-8", "TZ": "UTC"}),
    "private": ("077", {"LC_ALL": "C", "TZ": "Asia/Shanghai"}),
    "ascii": ("000", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TZ": "America/Caracas"}),
    "no such locale": ("027", {"LC_ALL": "xx_XX.ISO-8859-1", "LANGUAGE": "de", "TZ": "Pacific/Chatham"}),
    "hash seed": ("022", {"PYTHONHASHSEED": "4711", "PYTHONUTF8": "1"}),
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> GitLab:
    lab = GitLab(tmp_path_factory.mktemp("digest") / "the lab")
    lab.write("experiments/a/train.sh", "#!/bin/sh\n", 0o755)
    lab.write("中文/训练.py", "print('训练')\n")
    lab.write("not utf-8 \udcff\n", "x")
    lab.write("d" * 90 + "/" + "é" * 60, "long")
    lab.link("link \udcfe", "中文/训练.py")
    lab.commit()
    return lab


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it is now, in a folder of its own."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(
        REPOSITORY / "tuneplane", folder / "tuneplane", ignore=shutil.ignore_patterns("__pycache__")
    )
    return folder


def packed(
    python: str, package: Path, lab: Path, folder: Path, umask: str, environment: dict[str, str]
) -> list[str]:
    done = subprocess.run(
        [python, "-S", "-c", PACK, str(lab), str(folder / "capsule.tar"), umask],
        cwd=folder,  # and not where another tuneplane lies
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(package), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@pytest.mark.slow
def test_the_digest_does_not_depend_on_who_packs(tmp_path: Path, lab: GitLab, package: Path) -> None:
    results = {}
    clone = tmp_path / "an other place" / "clone"
    lab.git("clone", "-q", ".", str(clone))
    subprocess.run(["git", "gc", "-q"], cwd=clone, check=True, timeout=60)  # packed here, loose there
    for version, python in pythons((3, 10)).items():
        for name, (umask, environment) in CIRCUMSTANCES.items():
            for place in (lab.root, clone):
                folder = tmp_path / f"{version} {name} {place.name}"
                folder.mkdir()
                results[folder.name] = packed(python, package, place, folder, umask, environment)
    expected = next(iter(results.values()))
    assert results == dict.fromkeys(results, expected)


@pytest.mark.slow
def test_another_commit_mode_name_or_kernel_is_another_digest(tmp_path: Path, package: Path) -> None:
    lab = GitLab(tmp_path / "lab")
    lab.write("f", "1")
    lab.commit()
    python = next(iter(pythons((3, 10)).values()))

    def digest() -> str:
        return packed(python, package, lab.root, tmp_path, "022", {})[0]

    digests = [digest()]
    lab.git("commit", "-q", "--allow-empty", "-m", "same content")
    assert digest() == digests[0], "the digest is that of the content"
    for change in (
        lambda: lab.write("f", "2"),
        lambda: (lab.root / "f").chmod(0o755),
        lambda: (lab.root / "f").rename(lab.root / "g"),
        lambda: lab.link("l", "g"),
    ):
        change()
        lab.commit()
        digests.append(digest())
    spec = package / "tuneplane" / "spec.py"
    spec.write_text(spec.read_text() + "# another kernel\n")
    digests.append(digest())
    assert len(set(digests)) == len(digests)


def test_the_manifest_is_one_line_an_entry_in_the_order_of_bytes() -> None:
    entries = [
        Entry("é", "file", 0o644, 0, sha256_bytes(b"")),
        Entry("a/b", "link", 0o777, 1, sha256_bytes(b"c")),
        Entry("a b", "file", 0o755, 2, sha256_bytes(b"de")),
        Entry("line\nbreak %41", "file", 0o644, 0, sha256_bytes(b"")),
    ]
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    text = manifest(entries).decode()
    assert text == (
        f"file 755 2 {sha256_bytes(b'de')} a b\n"
        f"link 777 1 {sha256_bytes(b'c')} a/b\n"
        f"file 644 0 {empty} line%0Abreak %2541\n"
        f"file 644 0 {empty} %C3%A9\n"
    )
    assert tree_digest(reversed(entries)) == f"sha256:{sha256_bytes(text.encode())}"


def test_the_digest_of_a_known_tree_never_changes() -> None:
    """Runs of past versions are verified by what is recorded of them."""
    entries = [Entry("train.sh", "file", 0o755, 3, sha256_bytes(b"a b"))]
    assert tree_digest(entries) == "sha256:f5c3d97e23e706ed9c6f0b8beab78418330bb605c096a653cf24de4d954e8182"
