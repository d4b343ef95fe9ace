"""How the testbed reads apt's configuration and dpkg's status, and where it refuses to start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from testbed_client import PROGRAM

QUESTION = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import packages
sources = packages.read_sources(Path(sys.argv[2]))
print(json.dumps([source.line().strip() for source in sources]))
"""


def ask(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script with the testbed's modules importable, as the testbed itself runs: apart from this Python."""
    command = [sys.executable, "-c", script, str(PROGRAM.parent), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture
def apt(tmp_path: Path) -> Path:
    (tmp_path / "sources.list.d").mkdir()
    return tmp_path


debian_12 = pytest.mark.skipif(
    "VERSION_CODENAME=bookworm" not in Path("/etc/os-release").read_text(encoding="utf-8"),
    reason="the testbed reads the sources of Debian 12 alone",
)


@debian_12
def test_archives_are_found_in_both_formats_of_apt(apt: Path) -> None:
    (apt / "sources.list.d" / "debian.sources").write_text(
        "# a comment\nTypes: deb deb-src\nURIs: http://mirror.invalid/debian\n"
        "Suites: bookworm\n bookworm-updates\nComponents: main contrib\nSigned-By: /usr/share/keyrings/k.gpg\n"
        "\nTypes: deb\nEnabled: no\nURIs: http://off.invalid/debian\nSuites: bookworm\nComponents: main\n"
        "\nTypes: deb\nURIs: http://other.invalid/\nSuites: stable\nComponents: main\n",
        encoding="utf-8",
    )
    (apt / "sources.list.d" / "security.list").write_text(
        "#deb http://off.invalid/ bookworm main\n"
        "deb [arch=amd64 signed-by=/etc/k.asc] http://mirror.invalid/security bookworm-security main\n"
        "deb http://mirror.invalid/extra bookworm non-free\n",
        encoding="utf-8",
    )
    done = ask(QUESTION, apt)
    assert done.stdout.strip() == (
        '["deb [signed-by=/usr/share/keyrings/k.gpg] http://mirror.invalid/debian bookworm main",'
        ' "deb [signed-by=/etc/k.asc] http://mirror.invalid/security bookworm-security main",'
        ' "deb [signed-by=/usr/share/keyrings/k.gpg] http://mirror.invalid/debian bookworm-updates main"]'
    )


@debian_12
def test_a_machine_without_an_archive_of_its_release_is_told_so(apt: Path) -> None:
    (apt / "sources.list").write_text("deb http://mirror.invalid/debian trixie main\n", encoding="utf-8")
    assert "no archive with the suite bookworm" in ask(QUESTION, apt).stderr


def test_only_what_every_debian_has_counts_as_present(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text(
        "Package: bash\nStatus: install ok installed\nPriority: required\nPre-Depends: libc6 (>= 2.36), awk\n\n"
        "Package: libc6\nStatus: install ok installed\nPriority: optional\nDepends: libgcc-s1\n\n"
        "Package: libgcc-s1\nStatus: install ok installed\nPriority: optional\n\n"
        "Package: mawk\nStatus: install ok installed\nPriority: important\nProvides: awk\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nPriority: required\n\n"
        "Package: squashfuse\nStatus: install ok installed\nPriority: optional\nDepends: libc6\n",
        encoding="utf-8",
    )
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import packages\n"
        "from pathlib import Path; print(packages.base_status(Path(sys.argv[2]).read_text()))"
    )
    lines = ask(script, status).stdout.splitlines()
    names = [line.removeprefix("Package: ") for line in lines if line.startswith("Package: ")]
    assert names == ["bash", "libc6", "libgcc-s1", "mawk"]


@pytest.mark.parametrize(
    "folder", ["relative", "/one", "/var/lib/with space", "/var/lib/a,b", "/var/lib/../x"]
)
def test_a_state_folder_that_mounts_and_slurm_would_misread_is_refused(folder: str) -> None:
    script = "import sys; sys.path.insert(0, sys.argv[1]); import layout; layout.read_layout()"
    environment = {**os.environ, "TUNEPLANE_TESTBED_DIR": folder}
    command = [sys.executable, "-c", script, str(PROGRAM.parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "TUNEPLANE_TESTBED_DIR=" in done.stderr
    assert "give an absolute path of plain letters" in done.stderr


def test_a_user_without_root_is_told_what_is_missing() -> None:
    if os.geteuid() != 0:
        command = [str(PROGRAM), "up"]
    else:
        command = [
            "setpriv",
            "--reuid",
            "65534",
            "--clear-groups",
            "/usr/bin/python3",
            "-I",
            str(PROGRAM),
            "up",
        ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 125
    assert done.stderr == "testbed: this needs root: namespaces, mounts and cgroups\n"
