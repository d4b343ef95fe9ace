"""A stand-in for a job: the environment that the node agent gives a trainer, and real processes in it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tuneplane.collect.metrics import Metrics, read_metrics

REPOSITORY = Path(__file__).resolve().parents[1]
RUN_ID = "mnist-20260102-030405-ab12"
TOKEN = "a-token-that-nobody-else-has"
TOKEN_SHA256 = hashlib.sha256(TOKEN.encode()).hexdigest()


class ReportJob:
    """A run folder and processes that report to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ingest = folder / "ingest"
        self.ingest.mkdir(parents=True)

    def environment(self, **more: str) -> dict[str, str]:
        """What a trainer finds in its environment; a value of "" takes a name out."""
        given = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TUNEPLANE_JOB_ENABLED": "1",
            "TUNEPLANE_JOB_ENDPOINT": self.ingest.as_uri(),
            "TUNEPLANE_JOB_RUN_ID": RUN_ID,
            "TUNEPLANE_JOB_TOKEN": TOKEN,
            "TUNEPLANE_JOB_ATTEMPT": "0",
            "TUNEPLANE_MACHINE_RANK": "0",
            **more,
        }
        return {name: value for name, value in given.items() if value}

    def start(self, program: str, *arguments: str, python: str = sys.executable, **more: str) -> Any:
        """A running trainer whose source is `program`."""
        return subprocess.Popen(
            [python, "-c", textwrap.dedent(program), *arguments],
            env=self.environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(
        self, program: str, *arguments: str, python: str = sys.executable, code: int = 0, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """A trainer from start to end; it must end with `code`."""
        done = subprocess.run(
            [python, "-c", textwrap.dedent(program), *arguments],
            env=self.environment(**more),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def run_with_mounts(self, program: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """`run` where the program may mount what it likes, seen by itself alone. Skips without root."""
        trainer = self.start_with_mounts(program, *arguments, **more)
        try:
            out, err = trainer.communicate(timeout=90)
        finally:
            trainer.kill()
        return subprocess.CompletedProcess(trainer.args, trainer.returncode, out, err)

    def start_with_mounts(self, program: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
        """`start` in the same way."""
        needs_root()
        return subprocess.Popen(
            ["unshare", "--mount", sys.executable, "-c", textwrap.dedent(program), *arguments],
            env=self.environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def metrics(self) -> Metrics:
        """What `tp job metrics` would find."""
        return read_metrics(self.folder, RUN_ID, TOKEN_SHA256)

    def lines(self) -> list[Any]:
        """All lines of all ingest files but the headers, by file name."""
        found = []
        for path in sorted(self.ingest.glob("*.jsonl")):
            records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
            assert "v" in records[0]
            found += records[1:]
        return found


def needs_root() -> None:
    """Skip where the test cannot mount file systems; in CI that is a failure."""
    if os.geteuid() == 0:
        return
    if os.environ.get("CI"):
        pytest.fail("this test mounts file systems and must not be skipped in CI: run it as root")
    pytest.skip("needs root to mount a file system that fails")


DEAD_MOUNT = """
import ctypes, os
def mount_dead(folder):
    "A file system whose server never answers, as a network mount with its server gone."
    server = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % server
    if libc.mount(b"dead", os.fsencode(folder), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return server
"""
