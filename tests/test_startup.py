"""Starting `tp` is quick: what a command does not need is not imported.

No test asserts a time; each prints the ratio to a bare Python, as `make bench` measures it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_jobs import local_job, write_run

from tuneplane.kernel.submission import record_submission
from tuneplane.runs.index import current_user

HEAVY = (
    "hydra",
    "omegaconf",
    "submitit",
    "torch",
    "msgspec",
    "yaml",
    "rich",
    "jsonschema",
    "numpy",
    "packaging",
    "starlette",
    "uvicorn",
)

WATCHED = """
import json, sys
from tuneplane.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user with a run that has ended, one on Slurm, one in between."""
    for number in range(3):
        run_id = f"ring-20260114-09301{number}-x3k9"
        run = write_run(local_job(tmp_path / "tuneplane" / "runs" / current_user() / "ring" / run_id))
        if number:
            record_submission(run, "4242" if number == 1 else "local-1", "tp", 1)
    return tmp_path


def environment(home: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "PYTHONPATH") if name in os.environ}
    return {**kept, "HOME": str(home)}


def modules_of(home: Path, *words: str, code: int = 0) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *words],
        env=environment(home),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    modules: list[str] = json.loads(done.stderr.splitlines()[-1])
    return set(modules)


COMMANDS = [
    ("--help",),
    ("--version",),
    ("job", "--help"),
    ("submit", "--help"),
    ("job", "ls"),
    ("job", "ls", "--json"),
    ("job", "status", "ring-20260114-093010"),
    ("job", "logs", "ring-20260114-093010"),
    ("job", "artifacts", "ring-20260114-093010"),
    ("job", "stop", "ring-20260114-093010"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_that_looks_at_runs_imports_nothing_heavy(home: Path, words: tuple[str, ...]) -> None:
    modules = modules_of(home, *words)
    assert [name for name in HEAVY if name in modules] == []
    assert "tuneplane.cli.main" in modules


def test_help_knows_nothing_of_runs_and_compose(home: Path) -> None:
    ours = {name for name in modules_of(home, "--help") if name.startswith("tuneplane.")}
    cli = {"tuneplane.cli", "tuneplane.cli.main", "tuneplane.cli.pipe"}
    assert ours <= cli | {"tuneplane.kernel", "tuneplane.kernel.errors"}


@pytest.mark.parametrize("words", [("--help",), ("job", "ls")], ids=" ".join)
def test_its_time_as_a_ratio_to_a_bare_python(home: Path, words: tuple[str, ...]) -> None:
    program = Path(sys.executable).with_name("tp")

    def best_s(argv: list[str]) -> float:
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            subprocess.run(argv, env=environment(home), cwd=home, capture_output=True, timeout=60, check=True)
            times.append(time.perf_counter() - begun)
        return min(times)

    bare, ours = best_s([sys.executable, "-c", "pass"]), best_s([str(program), *words])
    print(
        f"tp {' '.join(words)}: {ours * 1000:.0f} ms, {ours / bare:.1f} x a bare python of {bare * 1000:.0f} ms"
    )
