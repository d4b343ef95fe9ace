"""The built wheel, in a fresh environment away from the checkout: what it needs travels in it."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    argv = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(CHECKOUT),
    ]
    subprocess.run(argv, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("tuneplane-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; its dependencies are those of the tests' own environment."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    target = next((folder / "lib").glob("python3*")) / "site-packages"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
    ]
    subprocess.run([*pip, str(wheel)], check=True, timeout=60)
    dependencies = [path for path in site.getsitepackages() if (Path(path) / "click").is_dir()]
    # Behind the wheel's own folder, and without the .pth file that makes the checkout importable.
    (target / "zz_dependencies.pth").write_text("\n".join(dependencies) + "\n")
    return folder


def tp(installed: Path, arguments: Sequence[str], cwd: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """`tp` of the wheel, as a user whose home is empty."""
    code = "import sys; from tuneplane.cli.main import main; main(sys.argv[1:])"
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    argv = [
        str(installed / "bin/python"),
        "-P" if sys.version_info >= (3, 11) else "-B",
        "-c",
        code,
        *arguments,
    ]
    return subprocess.run(
        argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_wheel_carries_configs_and_scaffolds(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "tuneplane/configs/config.yaml",
        "tuneplane/configs/cluster/local.yaml",
        "tuneplane/configs/recipe/custom/custom.yaml",
        "tuneplane/configs/recipe/custom/custom.scaffold/train.sh",
        "tuneplane/board/static/index.html",
        "tuneplane/board/static/app.js",
        "tuneplane/board/static/app.css",
        "tuneplane/board/static/licenses.txt",
    ):
        assert needed in names, "tuneplane/board/static comes of make board"
    assert not [name for name in names if name.startswith("tuneplane/board/web/")]
    assert not [name for name in names if name.startswith(("tests/", "slurm/", "docs/"))]


def test_the_main_job_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    where = tp(installed, ["config", "local"], tmp_path, home)
    assert str(CHECKOUT) not in where.stdout, where.stdout
    assert tp(installed, ["init", "lab"], tmp_path, home).returncode == 0
    lab = tmp_path / "lab"
    assert tp(installed, ["new", "mlp", "--method", "custom/custom"], lab, home).returncode == 0
    git = ["git", "-C", str(lab), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "add", "-A"], check=True, timeout=30)
    subprocess.run([*git, "commit", "-qm", "first"], check=True, timeout=30)
    flags = ["--profile", "local:1", "--observability-url", "https://tracker.example.org"]
    done = tp(installed, ["submit", "mlp", *flags, "--follow"], lab, home)
    assert done.returncode == 3, done.stderr
    assert "no training command yet" in done.stdout
