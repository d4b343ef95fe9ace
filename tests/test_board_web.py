"""The sources of the board's page: what they decide by themselves, and where they come from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

WEB = Path(__file__).resolve().parents[1] / "tuneplane" / "board" / "web"


@pytest.mark.slow
def test_what_the_page_decides_without_a_browser() -> None:
    if not (WEB / "node_modules").is_dir() or shutil.which("npm") is None:
        reason = "the page's tools are not here: make board"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    done = subprocess.run(
        ["npm", "--prefix", str(WEB), "test"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout and "# pass 0" not in done.stdout


def test_the_lockfile_names_no_registry_and_pins_everything() -> None:
    text = (WEB / "package-lock.json").read_text()
    assert '"resolved"' not in text and "http" not in text.replace("https://opencollective.com", "")
    packages = json.loads(text)["packages"]
    assert all("integrity" in package for name, package in packages.items() if name)
    wanted = json.loads((WEB / "package.json").read_text())["devDependencies"]
    assert all(version[0].isdigit() for version in wanted.values()), "exact versions"


def test_nothing_in_the_sources_makes_markup_of_text() -> None:
    sources = "".join(path.read_text() for path in (WEB / "src").glob("*.ts"))
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in sources, word
