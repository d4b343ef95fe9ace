"""The Pythons that this machine has, for what must not depend on which one runs."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path


@functools.cache
def pythons(minimum: tuple[int, int]) -> dict[str, str]:
    """Version (`3.9`) to executable: the one running the tests, those on the PATH and pyenv's."""
    found = {f"{sys.version_info.major}.{sys.version_info.minor}": sys.executable}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [shutil.which(f"python3.{minor}") for minor in range(minimum[1], 20)]
    if os.access(pyenv, os.R_OK | os.X_OK):
        candidates += sorted(map(str, pyenv.glob("3.*/bin/python3")))
    for candidate in filter(None, candidates):
        answer = subprocess.run(
            [candidate, "-I", "-S", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        version = answer.stdout.strip()
        if answer.returncode == 0 and tuple(map(int, version.split("."))) >= minimum:
            found.setdefault(version, candidate)
    return found
