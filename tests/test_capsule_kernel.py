"""The kernel that travels: complete, free of anything but the standard library, and startable from one file."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from git_lab import GitLab
from interpreters import pythons

from tuneplane.capsule import build_capsule, kernel_application, write_kernel_application
from tuneplane.capsule.kernel import KERNEL_PARTS, kernel_files
from tuneplane.kernel.digests import sha256_file
from tuneplane.kernel.errors import OperationError
from tuneplane.kernel.unpack import KERNEL_FOLDER, unpack_capsule

IMPORT_ALL = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
print(sys.modules["tuneplane"].__file__)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small package with one file of each kind that travels or stays."""
    root = tmp_path / "installed" / "tuneplane"
    for path in (
        "__init__.py",
        "spec.py",
        "site.py",
        "submit.py",
        "kernel/__init__.py",
        "kernel/deep/er.py",
        "kernel/data.json",
        "kernel/native.so",
        "kernel/__pycache__/er.cpython-311.pyc",
        "node/__init__.py",
        "recipes/__init__.py",
        "recipes/catalog.py",
        "recipes/adapters/custom.py",
        "cli/main.py",
    ):
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"# {path}\n")
    (root / "node/main.py").write_text("import sys\ndef main():\n    print(sys.argv[1:])\n    return 7\n")
    return root


TRAVELS = [
    "tuneplane/__init__.py",
    "tuneplane/kernel/__init__.py",
    "tuneplane/kernel/deep/er.py",
    "tuneplane/node/__init__.py",
    "tuneplane/node/main.py",
    "tuneplane/recipes/__init__.py",
    "tuneplane/recipes/adapters/custom.py",
    "tuneplane/spec.py",
]


def test_the_parts_of_the_kernel_travel_and_nothing_else(package: Path) -> None:
    assert [f.path for f in kernel_files(package)] == TRAVELS


def test_an_installation_made_of_links_gives_the_same(package: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked" / "tuneplane"
    for source in package.rglob("*"):
        if source.is_file():
            place = linked / source.relative_to(package)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(source)
    assert kernel_application(linked) == kernel_application(package)


def test_the_application_is_an_uncompressed_zip_of_no_particular_day(package: Path, tmp_path: Path) -> None:
    target = tmp_path / "kernel.pyz"
    sha256 = write_kernel_application(target, package)
    assert sha256 == sha256_file(target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o444
    with zipfile.ZipFile(target) as application:
        assert application.namelist() == ["__main__.py", *TRAVELS]
        assert {i.date_time for i in application.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {i.compress_type for i in application.infolist()} == {zipfile.ZIP_STORED}


@pytest.mark.parametrize("version", sorted(pythons((3, 9))))
def test_the_application_starts_the_node_agent_on_every_python(
    package: Path, tmp_path: Path, version: str
) -> None:
    write_kernel_application(tmp_path / "kernel.pyz", package)
    done = subprocess.run(
        [pythons((3, 9))[version], "-I", "-S", str(tmp_path / "kernel.pyz"), "node", "a b"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "['node', 'a b']\n"), done.stderr


def test_a_python_too_old_for_the_kernel_is_told_so(package: Path, tmp_path: Path) -> None:
    main = zipfile.ZipFile(write_to(tmp_path / "kernel.pyz", package)).read("__main__.py").decode()
    script = "import sys; sys.version_info = (3, 6, 8); exec(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", script, main], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "tuneplane needs Python 3.9 or newer on a node" in done.stderr


def write_to(path: Path, package: Path) -> Path:
    write_kernel_application(path, package)
    return path


def test_an_application_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match="the kernel cannot be written"):
        write_kernel_application(tmp_path / "no such folder" / "kernel.pyz")


def real_modules() -> list[str]:
    return [
        f.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for f in kernel_files()
        if not f.path.endswith("__main__.py")
    ]


@pytest.mark.parametrize("version", sorted(pythons((3, 9))))
def test_the_unpacked_kernel_imports_whole_with_the_standard_library_alone(
    tmp_path: Path, version: str
) -> None:
    lab = GitLab(tmp_path / "lab")
    lab.commit()
    info = build_capsule(lab.root, tmp_path / "capsule.tar")
    unpack_capsule(tmp_path / "capsule.tar", tmp_path / "work", info.digest)
    kernel = tmp_path / "work" / KERNEL_FOLDER
    done = subprocess.run(
        [pythons((3, 9))[version], "-I", "-S", "-B", "-c", IMPORT_ALL, str(kernel), *real_modules()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(kernel / "tuneplane" / "__init__.py")


def test_the_real_package_has_the_parts_that_a_run_needs() -> None:
    paths = {f.path for f in kernel_files()}
    assert {"tuneplane/__init__.py", "tuneplane/spec.py", "tuneplane/kernel/unpack.py"} <= paths
    assert not [p for p in paths if p.split("/")[1] not in {part.split("/")[0] for part in KERNEL_PARTS}]


@pytest.mark.contract("C23")
def test_nothing_in_the_work_folder_itself_is_importable_as_tuneplane(tmp_path: Path) -> None:
    lab = GitLab(tmp_path / "lab")
    lab.commit()
    info = build_capsule(lab.root, tmp_path / "capsule.tar")
    unpack_capsule(tmp_path / "capsule.tar", tmp_path / "work", info.digest)
    done = subprocess.run(
        [next(iter(pythons((3, 9)).values())), "-S", "-c", "import tuneplane"],
        cwd=tmp_path / "work",
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "No module named 'tuneplane'" in done.stderr
