"""What a node loads before the user's program starts: each needless module is time on every node of every job."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from run_fixture import PYTHON

from tuneplane.capsule import write_kernel_application

NEEDLESS = frozenset(
    (
        *(
            "argparse",
            "asyncio",
            "configparser",
            "csv",
            "email",
            "http",
            "html",
            "logging",
            "multiprocessing",
        ),
        *(
            "pickle",
            "platform",
            "pydoc",
            "queue",
            "sqlite3",
            "ssl",
            "string",
            "tempfile",
            "unittest",
            "uuid",
            "xml",
        ),
        *("concurrent", "urllib.request", "importlib.metadata"),
    )
)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernel") / "kernel.pyz"
    write_kernel_application(path)
    return path


def loaded(kernel: Path, *modules: str) -> set[str]:
    """What importing some modules of the kernel loads, as a node does it."""
    script = (
        f"import sys; sys.path.insert(0, {str(kernel)!r}); import {', '.join(modules)}; print(*sys.modules)"
    )
    done = subprocess.run(
        [PYTHON, "-I", "-S", "-c", script], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["attempt", "agent", "outcome", "local", "shell"])
def test_a_command_of_the_kernel_loads_no_more_than_it_needs(kernel: Path, module: str) -> None:
    assert not loaded(kernel, "tuneplane.node.main", f"tuneplane.node.{module}") & NEEDLESS


def test_the_end_of_an_attempt_reads_no_job(kernel: Path) -> None:
    """The batch script waits for it with every node still allocated."""
    names = loaded(kernel, "tuneplane.node.main", "tuneplane.node.outcome")
    assert not names & {"tuneplane.spec", "tuneplane.containers", "subprocess", "socket", "ctypes"}


def test_a_node_that_starts_well_does_not_load_the_questions_to_an_image(kernel: Path) -> None:
    names = loaded(kernel, "tuneplane.node.main", "tuneplane.node.agent")
    assert "tuneplane.node.early" in names and "tuneplane.containers.probe" not in names


def test_a_node_asks_no_network_for_its_address_again(kernel: Path) -> None:
    assert "tuneplane.node.address" not in loaded(kernel, "tuneplane.node.main", "tuneplane.node.agent")
