"""Programs that tests need beside the Python packages: said, and on Debian installed where root may.

Called by `make test`. What the testbed needs it fetches itself (slurm/testbed/packages.py). Never fails for
want of an optional program: a test that lacks one says so; exit 1 is for apt's own failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

APT_TIMEOUT_S = 600
SYSTEM_PYTHON = "/usr/bin/python3"


@dataclass(frozen=True)
class Program:
    """A program, the Debian package that holds it, and which tests are for nothing without it."""

    name: str
    package: str
    used_by: str


NEEDED = (
    Program("git", "git", "all tests of labs and capsules"),
    Program("shellcheck", "shellcheck", "tests of scripts"),
    Program("ps", "procps", "tests that look for secrets in processes"),
    Program("unshare", "util-linux", "tests of full disks, and the testbed"),
    Program("mount", "mount", "tests of full and stalled disks"),
    Program("mkfs.ext4", "e2fsprogs", "tests of stalled disks"),
    Program("fusermount3", "fuse3", "tests of disks that fail now and then"),
    Program("gcc", "build-essential", "tests of GPU metrics, which compile a fake NVML"),
    Program("node", "nodejs", "the board's page and its tests"),
    Program("npm", "npm", "the board's page"),
    Program("chromium", "chromium", "tests of the board in a browser"),
    Program("chromedriver", "chromium-driver", "tests of the board in a browser"),
    Program("ensurepip", "python3-venv", "the testbed, which makes an environment with the system's Python"),
)


def is_there(program: Program) -> bool:
    """Whether a program can be run here; `ensurepip` is a module of the system's Python."""
    if program.name == "ensurepip":
        argv = [SYSTEM_PYTHON, "-I", "-c", "import ensurepip, venv"]
        return (
            Path(SYSTEM_PYTHON).exists()
            and subprocess.run(argv, capture_output=True, check=False).returncode == 0
        )
    # Administrators' programs are not on everybody's PATH.
    return shutil.which(program.name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") is not None


def plan(missing: Sequence[Program], *, root: bool, apt: bool) -> tuple[list[str], list[str]]:
    """Packages to install, and lines for the reader. Pure."""
    if not missing:
        return [], ["system packages: nothing is missing"]
    packages = sorted({program.package for program in missing})
    if root and apt:
        return packages, [f"system packages: installing {', '.join(packages)}"]
    why = "this is not root" if apt else "there is no apt-get here"
    lines = [f"system packages: {program.name} is missing ({program.used_by})" for program in missing]
    return [], [
        *lines,
        f"nothing was installed, because {why}; on Debian: apt-get install {' '.join(packages)}",
    ]


def install(packages: Sequence[str]) -> int:
    """Install packages from the machine's own apt sources; apt's exit code, its last words on stderr."""
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    steps = (["update"], ["install", "-y", "--no-install-recommends", *packages])
    for step in steps:
        done = subprocess.run(
            ["apt-get", "-q", *step],
            env=environ,
            capture_output=True,
            text=True,
            timeout=APT_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0 and step[0] == "install":
            print("\n".join((done.stdout + done.stderr).splitlines()[-8:]), file=sys.stderr)
            return done.returncode
    return 0


def main(found: Callable[[Program], bool] = is_there) -> int:
    """Look, say, install; 1 where apt failed."""
    missing = [program for program in NEEDED if not found(program)]
    packages, lines = plan(missing, root=os.geteuid() == 0, apt=shutil.which("apt-get") is not None)
    print("\n".join(lines))
    return 1 if packages and install(packages) else 0


if __name__ == "__main__":
    sys.exit(main())
