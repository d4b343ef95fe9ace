"""Fixtures that several test modules share."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
import slurm_lab
from filelock import FileLock
from node_leftovers import left_by
from testbed_client import WEIRD_NAME, Testbed, unusable_because
from training_lab import Training, install_training

FAKES = Path(__file__).parent / "fakes"
LOCKS = Path(tempfile.gettempdir())
STATE = os.environ.get("TUNEPLANE_TESTBED_DIR", "").replace("/", "-")
"""In the locks' names, so that tests of one testbed do not wait for those of another."""


def pytest_configure() -> None:
    """What tests start has its signals as in a terminal, also under `nohup` and `&`, which have them ignored.

    A signal that is ignored stays so in every program that is started; one with a handler, which does nothing
    here, is at its default there.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


LONGEST = (
    "test_slurm_restarts.py",
    "test_slurm_pause.py",
    "test_slurm_refusals.py",
    "test_containers_apptainer.py",
)
"""Files that take minutes: begun first, so that no worker is left with one of them at the end."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need the testbed to themselves are marked `alone`; files that take longest come first."""
    for item in items:
        if "testbed_alone" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.alone)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(scope="session", autouse=True)
def own_store(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests read of runs is not cached where the developer's own runs are."""
    os.environ["TUNEPLANE_STORE_DIR"] = str(tmp_path_factory.mktemp("store"))


@pytest.fixture
def weird_dir(tmp_path: Path) -> Path:
    """A folder whose name has spaces, ``$``, ``%``, both quotes and Chinese characters."""
    folder = tmp_path / WEIRD_NAME
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def boxes() -> None:
    """The fake container runtimes of tests/fakes can run here."""
    done = subprocess.run([sys.executable, FAKES / "box.py"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = f"no mount namespaces here: {done.stderr.strip()}"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}, and this is a CI run: it must not be skipped")
        pytest.skip(reason)


@pytest.fixture(scope="session")
def testbed() -> Iterator[Testbed]:
    """The real Slurm of slurm/testbed, started on first use and left running.

    Several workers share it. A test that changes it for all (cuts a node, turns accounting off, sets values
    of slurm.conf) takes ``testbed_alone``. TUNEPLANE_TESTBED_DOWN=1 takes it down after the last worker.
    """
    reason = unusable_because()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(f"{reason}, and this is a CI run: it must not be skipped")
        pytest.skip(reason)
    cluster = Testbed()
    with (LOCKS / f"tuneplane-testbed-sessions{STATE}.lock").open("w") as sessions:
        fcntl.flock(sessions, fcntl.LOCK_SH)
        with FileLock(LOCKS / "tuneplane-testbed-start.lock"):
            cluster.start()
        yield cluster
        if os.environ.get("TUNEPLANE_TESTBED_DOWN") == "1":
            try:
                fcntl.flock(sessions, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            cluster.down()


@pytest.fixture(scope="session")
def training(testbed: Testbed) -> Training:
    """torch, transformers and TRL for jobs of the testbed's users: see training_lab.py."""
    return install_training(testbed)


def hold(mode: int) -> IO[str]:
    """Take the lock by which tests of several workers share the testbed (LOCK_SH) or have it alone (LOCK_EX)."""
    handle = (LOCKS / f"tuneplane-testbed-tests{STATE}.lock").open("w")
    fcntl.flock(handle, mode)
    return handle


@pytest.fixture
def testbed_alone(testbed: Testbed) -> Iterator[Testbed]:
    """The testbed with no other worker's test running on it; put back to its defaults afterwards."""
    with hold(fcntl.LOCK_EX):
        yield testbed
        testbed.cancel_all()
        testbed.reset()


@pytest.fixture(autouse=True)
def _share_testbed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep ``testbed_alone`` tests of other workers away while a test uses the testbed."""
    names = request.fixturenames
    if "testbed" not in names or "testbed_alone" in names:
        yield
        return
    request.getfixturevalue("testbed")
    with hold(fcntl.LOCK_SH):
        yield


@pytest.fixture(scope="module")
def nothing_left_of_module(testbed: Testbed) -> Iterator[None]:
    """As `nothing_left`, once the fixtures of a whole module have ended their runs too."""
    yield from _looked_after(testbed)


@pytest.fixture
def nothing_left(request: pytest.FixtureRequest, nothing_left_of_module: None) -> Iterator[None]:
    """After the test no node has a process, a mount or a folder of a run of this process that does not run."""
    alone = "testbed_alone" in request.fixturenames  # looked at before that one cancels all jobs
    yield from _looked_after(request.getfixturevalue("testbed_alone" if alone else "testbed"))


def _looked_after(cluster: Testbed) -> Iterator[None]:
    yield
    left = left_by(cluster, slurm_lab.MADE)
    assert left == [], "\n".join(left)
