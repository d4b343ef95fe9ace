"""A disk that is full after a few kilobytes, for one command, gone with it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


def run_on_small_disk(
    folder: Path, size_bytes: int, command: list[str], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run `command` where `folder` is a tmpfs of `size_bytes`, seen by that command alone.

    The command's last words should say what is left on the disk. Skips where the machine gives no mount namespace.
    """
    folder.mkdir(exist_ok=True)
    unshare = ["unshare", "--mount"]
    if os.geteuid() != 0:
        unshare += ["--user", "--map-root-user"]
    script = 'mount -t tmpfs -o size="$1" tmpfs "$2" || exit 99; shift 2; exec "$@"'
    done = subprocess.run(
        [*unshare, "sh", "-c", script, "sh", str(size_bytes), str(folder), *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 99 or (done.returncode == 1 and "unshare" in done.stderr):
        if os.environ.get("CI"):
            pytest.fail(f"no small disk can be mounted in CI: {done.stderr}")
        pytest.skip(f"no small disk can be mounted here: {done.stderr}")
    return done
