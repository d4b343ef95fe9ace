"""This machine and this user: git, Python, folders and their permissions, the site's configuration."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tuneplane import __version__
from tuneplane.compose import list_profiles
from tuneplane.compose.layers import find_layers
from tuneplane.doctor.check import FAIL, OK, WARN, Check
from tuneplane.kernel.errors import TunePlaneError
from tuneplane.runs.index import state_folder
from tuneplane.runs.token import KEY_BYTES

OLDEST_GIT = (2, 20)
PROGRAM_S = 10.0


def look_at_machine(environ: Mapping[str, str], lab: Path | None) -> list[Check]:
    """Everything that no profile and no Slurm is needed for."""
    version = ".".join(map(str, sys.version_info[:3]))
    return [
        Check("tuneplane", OK, f"{__version__}, Python {version} ({sys.executable})"),
        *_git(environ),
        *_state(),
        *_configuration(environ, lab),
    ]


def _git(environ: Mapping[str, str]) -> list[Check]:
    program = shutil.which("git", path=environ.get("PATH", os.defpath))
    if program is None:
        return [Check("git", FAIL, "it is not on the PATH", "install git: what is committed is what runs")]
    said = _said([program, "--version"], environ)
    version = tuple(int(part) for part in said.split()[2].split(".")[:2]) if len(said.split()) > 2 else ()
    checks = [
        Check("git", OK, said)
        if version >= OLDEST_GIT
        else Check("git", WARN, f"{said}: older than 2.20, the oldest that was tried", "install a newer git")
    ]
    missing = [name for name in ("user.name", "user.email") if not _said([program, "config", name], environ)]
    if missing:
        told = f"{' and '.join(missing)} not set, so git commit will refuse"
        example = {"user.name": '"Your Name"', "user.email": "you@example.org"}
        mend = " && ".join(f"git config --global {name} {example[name]}" for name in missing)
        checks.append(Check("git identity", WARN, told, mend))
    return checks


def _said(argv: list[str], environ: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROGRAM_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _state() -> list[Check]:
    """The user's state folder and the key in it, by which a run's token is made."""
    try:
        folder = state_folder()
    except TunePlaneError as error:
        return [Check("state folder", FAIL, str(error.faults[0].what), f"mkdir -p {error.faults[0].where}")]
    checks = [_private("state folder", folder, 0o700, f"chmod 700 {folder}")]
    if not os.access(folder, os.W_OK):
        checks = [Check("state folder", FAIL, f"{folder} cannot be written", f"chmod u+w {folder}")]
    key = folder / "key"
    if key.exists():
        sound = _private("key", key, 0o600, f"rm {key}: the next submit makes another")
        try:
            size = key.stat().st_size
        except OSError:
            size = KEY_BYTES
        if size != KEY_BYTES:
            sound = Check("key", FAIL, f"{key} is damaged", f"rm {key}: the next submit makes another")
        checks.append(sound)
    return checks


def _private(name: str, path: Path, mode: int, mend: str) -> Check:
    status = path.stat()
    if status.st_uid != os.getuid():
        return Check(name, FAIL, f"{path} belongs to user id {status.st_uid}", "have its owner remove it")
    if stat.S_IMODE(status.st_mode) & ~mode & 0o777:
        return Check(name, FAIL, f"{path} is open to others (mode {stat.S_IMODE(status.st_mode):04o})", mend)
    return Check(name, OK, str(path))


def _configuration(environ: Mapping[str, str], lab: Path | None) -> list[Check]:
    try:
        layers = find_layers(lab, environ)
        profiles = list_profiles(lab, environ)
    except TunePlaneError as error:
        return [Check("configuration", FAIL, fault.what, fault.remedy) for fault in error.faults]
    read = ", ".join(f"{layer.name} {layer.folder}" for layer in layers if layer.present)
    told = f"profiles: {', '.join(profiles)}; read from {read}"
    if profiles == ["local"]:
        return [Check("configuration", OK, f"{told}. A first profile of a cluster: tp cluster discover NAME")]
    return [Check("configuration", OK, told)]
