"""docs/adapters.md: who follows it has a framework that trains. Its files are put where it says, and used."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from doc_pages import ROOT, read_blocks
from interpreters import pythons

from tuneplane.capsule.kernel import write_kernel_application
from tuneplane.recipes.adapters import Command, Launch, NodeFacts
from tuneplane.recipes.catalog import load_catalog
from tuneplane.recipes.manifest import PARAMETER_KEYS, RECIPE_KEYS

PAGE = ROOT / "docs/adapters.md"

pytestmark = pytest.mark.timeout(120)


def test_the_page_names_every_key_field_and_style() -> None:
    text = PAGE.read_text()
    words = [*RECIPE_KEYS, *PARAMETER_KEYS, *(style.value for style in Launch)]
    words += [field.name for kind in (NodeFacts, Command) for field in dataclasses.fields(kind)]
    missing = [
        word
        for word in words
        if not any(form.format(word) in text for form in ("`{}`", "{{{},", " {}, ", ", {}}}"))
    ]
    assert missing == []


@dataclasses.dataclass(frozen=True)
class Site:
    """A TunePlane with the page's adapter and methods, and a lab of somebody who uses it."""

    where: Path

    @property
    def source(self) -> Path:
        return self.where / "source"

    @property
    def lab(self) -> Path:
        return self.where / "lab"

    def python(self, *words: str, cwd: Path | None = None) -> CompletedProcess[str]:
        environ = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.where),
            "PYTHONPATH": str(self.source),
            "PYTHONDONTWRITEBYTECODE": "1",
            "LANG": "C.UTF-8",
            "TUNEPLANE_CONFIG_DIR": str(self.where / "no-site"),
            "TUNEPLANE_STORE_DIR": str(self.where / "store"),
        }
        argv = [sys.executable, *words]
        return subprocess.run(
            argv, cwd=cwd or self.where, env=environ, capture_output=True, text=True, timeout=100, check=False
        )

    def tp(self, *words: str) -> str:
        done = self.python("-m", "tuneplane.cli.main", *words, cwd=self.lab if self.lab.exists() else None)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def commit(self) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        for words in (["add", "-A"], [*who, "commit", "-qm", "x"]):
            subprocess.run(["git", *words], cwd=self.lab, check=True, timeout=30)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The package as it is, and every file of the page in it."""
    site = Site(tmp_path_factory.mktemp("site"))
    for name in ("tuneplane", "configs"):
        shutil.copytree(
            ROOT / name, site.source / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules")
        )
    (site.where / "no-site").mkdir()
    for block in read_blocks(PAGE):
        if "file" in block.notes:
            path = site.source / block.notes["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            assert not path.exists(), f"{block.where}: the package has it"
            path.write_text(block.text, encoding="utf-8")
    (site.where / "points.csv").write_text("".join(f"{x / 10},{2 * x / 10 + 1}\n" for x in range(-10, 11)))
    return site


def test_every_manifest_of_the_page_reads_and_has_its_scaffold(site: Site) -> None:
    code = (
        "from tuneplane.cli.context import load_methods\n"
        "catalog = load_methods()\n"
        "found = [m for m in catalog.methods() if catalog.scaffold(catalog.get(m)).files]\n"
        "import json; print(json.dumps(found))"
    )
    done = site.python("-c", code)
    published = load_catalog([ROOT / "configs"]).methods()
    assert json.loads(done.stdout) == sorted([*published, "site/reported", "toy/linear"]), done.stderr
    for word in (
        "learning_rate",
        "0 to 1",
        "--train-data",
        "loss, mse",
        "minimize train/loss",
        "train, export",
    ):
        assert word in site.tp("methods", "toy/linear")


def test_the_adapter_of_the_page_obeys_the_rules_of_adapters(site: Site) -> None:
    adapter = site.source / "tuneplane/recipes/adapters/toy.py"
    run = [sys.executable, "-m"]
    checks: Sequence[list[str]] = (
        [*run, "ruff", "check", "--config", str(ROOT / "pyproject.toml"), str(adapter)],
        [*run, "ruff", "format", "--check", "--config", str(ROOT / "pyproject.toml"), str(adapter)],
        [*run, "mypy", "--strict", "--config-file=", "-c", adapter.read_text()],
    )
    for argv in checks:
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    kernel = site.where / "kernel.pyz"
    write_kernel_application(kernel, site.source / "tuneplane")
    code = (
        f"import sys; sys.path.insert(0, {str(kernel)!r})\n"
        "from tuneplane.recipes.adapters import load_adapter\n"
        "print(sorted(load_adapter('toy').OPERATIONS))"
    )
    for python in pythons((3, 9)).values():
        argv = [python, "-I", "-S", "-c", code]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert (done.stdout, done.stderr) == ("['export', 'train']\n", ""), python


def test_the_tests_of_the_page_pass(site: Site) -> None:
    done = site.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_toy.py", cwd=site.source)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.contract("C5")
def test_an_experiment_of_the_page_s_method_trains_reports_and_saves(site: Site) -> None:
    site.tp("init", "lab")
    site.tp("new", "line", "--method", "toy/linear")
    site.commit()
    data = ("--profile", "local:1", "--train-data", "../points.csv")
    wrong = site.python(
        "-m", "tuneplane.cli.main", "validate", "line", *data, "--set", "stps=3", cwd=site.lab
    )
    shown = next(block.text for block in read_blocks(PAGE) if "stps=3" in block.text)
    assert wrong.returncode == 2
    for line in wrong.stderr.splitlines():
        assert line in shown, f"the page does not show {line!r}"
    site.tp("validate", "line", *data)
    folder = Path(json.loads(site.tp("submit", "line", *data, "--set", "steps=40", "--json"))["folder"])
    deadline = time.monotonic() + 60
    while not (folder / "attempts/0/end.json").exists():
        assert time.monotonic() < deadline, list(folder.rglob("*"))
        time.sleep(0.05)
    assert json.loads((folder / "attempts/0/end.json").read_text())["code"] == 0, site.tp(
        "job", "logs", folder.name
    )
    (metric,) = json.loads(site.tp("job", "metrics", folder.name, "--json"))["metrics"]
    assert metric["name"] == "train/loss" and metric["steps"] == list(range(40))
    assert metric["values"][0] > 1 > metric["values"][-1]
    assert sorted(path.name for path in (folder / "out/checkpoints").iterdir()) == ["step-20", "step-40"]
    site.tp("export", folder.name, "--follow")
    line = json.loads((folder / "out/hf_export/line.json").read_text())
    assert line["step"] == 40 and abs(line["a"] - 2) < 0.7 and abs(line["b"] - 1) < 0.7
