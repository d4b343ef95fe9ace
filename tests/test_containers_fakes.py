"""Whole jobs through the node agent in enroot and pyxis, where strict fakes of both stand for the real ones.

The cases are those of tests/live, which a site that has enroot or pyxis runs on them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from run_fixture import Run, make_run, wait_until

from tuneplane.spec import Container, Image, Mount

sys.path += [str(Path(__file__).parent / name) for name in ("fakes", "live")]

import box
from cases import CASES, HOSTILE_IMAGE, PRINT_ENVIRONMENT, Site, printed_environment

FAKES = Path(__file__).parent / "fakes"

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(box.can_become() is not None, reason=str(box.can_become())),
]


class FakeRun:
    """A run that was started: `cases.Started`."""

    def __init__(self, run: Run, nodes: int, more: dict[str, str]) -> None:
        self.run, self.more = run, more
        self.number = run.claimed(**more)
        self.agents = [run.start_node(self.number, rank=rank, nodes=nodes, **more) for rank in range(nodes)]

    def logs(self) -> list[str]:
        return [self.run.log(rank) for rank in range(len(self.agents))]

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in "".join(self.run.log().splitlines(True)[1:]), f"{text!r} in {self.logs()}")

    def stop(self) -> None:
        """TERM to what slurmstepd is the parent of: the agent, and under pyxis the first process inside."""
        self.agents[0].send_signal(signal.SIGTERM)
        for pid in self.leaders():
            os.kill(pid, signal.SIGTERM)

    def leaders(self) -> list[int]:
        start = f"/bin/sh\0{self.run.scratch().runtime}/start.sh\0run\0"
        return [pid for pid, words in command_lines() if words.startswith(start)]

    def shell(self, *command: str) -> str:
        done = self.run.call(
            "shell", str(self.run.path), "0", "0", *command, environment=self.run.environment(**self.more)
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def wait(self) -> int:
        codes = [self.run.finish(agent).returncode for agent in self.agents]
        return codes[0]

    def output(self, name: str) -> str | None:
        with suppress(FileNotFoundError):
            return (self.run.folder.out / name).read_text()
        return None

    def arguments(self) -> list[str]:
        return [words for _, words in command_lines()]


class FakeSite:
    """Starts runs below a folder: `cases.Site`."""

    token = "hf_secret-of-this-run"

    def __init__(self, runtime: str, where: Path) -> None:
        self.runtime, self.where = runtime, where
        self.image = box.write_image(where / "image.sqsh", HOSTILE_IMAGE)
        self.runs: list[Run] = []
        self.environment: dict[str, str] = {"HF_HOME": self.folder()}
        self.more: dict[str, str] = {}

    def folder(self) -> str:
        path = self.where / f"shared-{len(list(self.where.iterdir()))}"
        path.mkdir()
        (path / "in").write_text("here\n")
        return str(path)

    def make(self, train: str, nodes: int = 1, mounts: Sequence[tuple[str, str, bool]] = (), **spec: Any) -> Run:
        image = Image(str(self.image), "--image", str(self.image), "0" * 64)
        container = Container(self.runtime, image=image, mounts=[Mount(*mount) for mount in mounts])
        run = make_run(
            self.where,
            train,
            number=len(self.runs),
            nodes=nodes,
            container=container,
            secrets={"HF_TOKEN": self.token},
            environment=self.environment,
            **spec,
        )
        self.runs.append(run)
        run.bin.mkdir(exist_ok=True)
        for name in ("enroot", "srun"):
            with suppress(FileExistsError):
                (run.bin / name).symlink_to(FAKES / name)
        return run

    def start(self, train: str, *, nodes: int = 1, mounts: Sequence[tuple[str, str, bool]] = ()) -> FakeRun:
        return FakeRun(self.make(train, nodes, mounts), nodes, self.more)


def command_lines() -> list[tuple[int, str]]:
    """Every process with its argv, NUL after each word."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                found.append((int(entry.name), (entry / "cmdline").read_text(errors="replace")))
    return found


@pytest.fixture(params=["enroot", "pyxis"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeSite]:
    found = FakeSite(request.param, tmp_path)
    slurmd = None
    if request.param == "pyxis":
        conf = tmp_path / "slurm.conf"
        address = str(tmp_path / "slurmd.socket")
        known = {"socket": address, "job": "4242", "nodes": "n1,n2", "cpus": "2", "folder": str(tmp_path)}
        conf.write_text(json.dumps(known))
        found.more["SLURM_CONF"] = str(conf)
        slurmd = subprocess.Popen([sys.executable, str(FAKES / "slurmd.py"), address, str(conf)])
        wait_until(lambda: Path(address).exists(), "slurmd listens")
    yield found
    for run in found.runs:
        run.kill_all()
    if slurmd is not None:
        slurmd.kill()
        slurmd.wait()


@pytest.mark.parametrize("case", CASES)
def test_a_job_behaves_as_on_a_real_site(site: Site, case: str) -> None:
    CASES[case](site)
