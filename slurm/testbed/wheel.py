"""TunePlane itself on the testbed: the wheel of this checkout in a venv that ordinary users can run.

Called by ``install-tp``. Dependencies are fetched once into the cache; afterwards only a changed checkout
builds a wheel anew, and nothing else is installed again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

from layout import CHECKOUT, HERE, PYTHON, Layout, TestbedError

#: What the wheel is made of (pyproject.toml); a change in none of these needs no new wheel.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "tuneplane", "configs")
BUILD_REQUIREMENT = "hatchling>=1.27"
PIP_TIMEOUT_S = 600


def run(argv: list[str], cwd: Path | None = None) -> str:
    """Run a build step on this machine. Raises TestbedError with the end of what it said."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    done = subprocess.run(
        argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
        raise TestbedError(f"{' '.join(argv)} failed:\n{tail}")
    return done.stdout


def pip(venv: Path, *arguments: str) -> None:
    run([str(venv / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])


def digest_of(checkout: Path) -> str:
    """A digest of everything that goes into the wheel."""
    digest = hashlib.sha256()
    for name in SOURCES:
        top = checkout / name
        # node_modules: what the board's page is built with, not of
        skipped = {"__pycache__", "node_modules"}
        paths = sorted(p for p in top.rglob("*") if not skipped & {*p.parts}) if top.is_dir() else [top]
        for path in paths:
            if path.is_file():
                digest.update(f"{path.relative_to(checkout)}\0{path.stat().st_size}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def make_venv(folder: Path) -> None:
    """A venv of the machine's own interpreter."""
    shutil.rmtree(folder, ignore_errors=True)
    run([PYTHON, "-m", "venv", str(folder)])


def build_wheel(layout: Layout, checkout: Path, target: Path) -> Path:
    """Build the checkout's wheel into ``target`` with a build environment that the cache keeps."""
    tools = layout.cache / "build-venv"
    if not (tools / "bin" / "hatchling").exists():
        make_venv(tools)
        pip(tools, "install", BUILD_REQUIREMENT)
    run(
        [str(tools / "bin" / "hatchling"), "build", "--target", "wheel", "--directory", str(target)],
        cwd=checkout,
    )
    return next(target.glob("*.whl"))


def read_requirements(wheel: Path) -> list[str]:
    """What the wheel requires without any extra."""
    with ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_string(archive.read(name).decode())
    return [str(line) for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in str(line)]


def install_tp(layout: Layout, checkout: Path = CHECKOUT) -> Path:
    """Make ``tp`` of the checkout runnable for the users and return its path."""
    write_site_config(layout)
    make_data_folders(layout)
    digest = digest_of(checkout)
    marker = layout.venv / "tuneplane.sha256"
    program = layout.venv / "bin" / "tp"
    if marker.exists() and marker.read_text() == digest and program.exists():
        return program
    with tempfile.TemporaryDirectory(prefix="tuneplane-wheel-") as folder:
        wheel = build_wheel(layout, checkout, Path(folder))
        requirements = read_requirements(wheel)
        key = hashlib.sha256("\n".join(requirements).encode()).hexdigest()[:12]
        ready = layout.venv / f"requirements-{key}"
        if not ready.exists():
            make_venv(layout.venv)
            wheels = layout.cache / "wheels" / key
            if not wheels.exists():
                work = layout.cache / "wheels" / "work"
                shutil.rmtree(layout.cache / "wheels", ignore_errors=True)
                pip(
                    layout.cache / "build-venv",
                    "wheel",
                    "--use-pep517",
                    "--wheel-dir",
                    str(work),
                    *requirements,
                )
                work.rename(wheels)
            pip(
                layout.venv,
                "install",
                "--no-index",
                "--no-deps",
                *(str(path) for path in sorted(wheels.glob("*.whl"))),
            )
            ready.touch()
        marker.unlink(missing_ok=True)
        pip(layout.venv, "install", "--no-index", "--no-deps", "--force-reinstall", str(wheel))
    marker.write_text(digest)
    return program


def make_data_folders(layout: Layout) -> None:
    """The folders that the site's configuration gives to every job: HF_HOME and a data set's."""
    for name, mode in (("huggingface", 0o1777), ("text", 0o755)):
        folder = layout.shared / "data" / name
        folder.mkdir(parents=True, exist_ok=True)
        folder.parent.chmod(0o755)
        folder.chmod(mode)


def write_site_config(layout: Layout) -> None:
    """Copy the site's configuration to where users find it, with this testbed's paths put in."""
    source = HERE / "config"
    layout.config.mkdir(parents=True, exist_ok=True)
    wanted = (
        {path.relative_to(source): path for path in source.rglob("*") if path.is_file()}
        if source.is_dir()
        else {}
    )
    for relative, path in wanted.items():
        target = layout.config / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8")
        text = text.replace("@SHARED@", str(layout.shared)).replace("@STATE@", str(layout.state))
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")
    for path in sorted(layout.config.rglob("*"), reverse=True):
        if path.is_file() and path.relative_to(layout.config) not in wanted:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
