"""Runs the cases of `cases.py` by `tp` on a real cluster: `run.py PROFILE IMAGE FOLDER [CASE…]`.

`run.sh` calls this. Python 3.9 and `tp` on the PATH; nothing of the cluster is changed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cases import CASES

FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "LOST"}
LONG_S = 600.0
"""How long a run may wait in the queue and run, altogether."""

ARGUMENTS = r"for f in /proc/[0-9]*/cmdline; do tr '\0' ' ' <$f 2>/dev/null; echo; done"


class LiveRun:
    """One submitted run: `cases.Started`."""

    def __init__(self, site: LiveSite, run_id: str, folder: Path) -> None:
        self.site, self.run_id, self.folder = site, run_id, folder

    def status(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.site.tp("job", "status", self.run_id, "--json"))
        return value

    def logs(self) -> list[str]:
        files = sorted((self.folder / "attempts" / "0").glob("node-*.log"))
        said = [file.read_text(errors="replace") for file in files]
        return said or [file.read_text(errors="replace") for file in (self.folder / "slurm").iterdir()]

    def wait_for(self, text: str) -> None:
        until = time.monotonic() + LONG_S
        while text not in "".join(self.logs()[0].splitlines(True)[1:] if self.logs() else ""):
            assert time.monotonic() < until and self.status()["state"] not in FINAL, self.logs()
            time.sleep(0.5)

    def stop(self) -> None:
        self.site.tp("job", "stop", self.run_id)

    def shell(self, *command: str) -> str:
        return self.site.tp("job", "shell", self.run_id, *command)

    def wait(self) -> int:
        until = time.monotonic() + LONG_S
        while self.status()["state"] not in FINAL:
            assert time.monotonic() < until, f"{self.run_id} has not ended"
            time.sleep(0.5)
        code = self.status()["nodes"][0]["code"]
        assert isinstance(code, int)
        return code

    def output(self, name: str) -> str | None:
        try:
            return (self.folder / "out" / name).read_text()
        except FileNotFoundError:
            return None

    def arguments(self) -> list[str]:
        return self.shell("bash", "-c", ARGUMENTS).splitlines()


class LiveSite:
    """The cluster, with a configuration of its own on top of the site's: `cases.Site`."""

    def __init__(self, profile: str, image: str, folder: Path) -> None:
        self.profile, self.image, self.place = profile, image, folder
        self.token = f"hf_{secrets.token_hex(12)}"
        config = folder / "config"
        given = Path(os.environ.get("TUNEPLANE_CONFIG_DIR") or "/etc/tuneplane")
        if given.is_dir():
            shutil.copytree(given, config)
        (config / "site").mkdir(parents=True, exist_ok=True)
        site = {"name": "live", "secrets": ["HF_TOKEN"], "image_folders": [str(folder)]}
        text = json.dumps({**site, "environment": {"HF_HOME": self.folder()}})
        (config / "site" / "default.yaml").write_text(text)  # JSON is YAML
        self.environment = {**os.environ, "TUNEPLANE_CONFIG_DIR": str(config), "HF_TOKEN": self.token}
        self.lab = folder / "lab"
        self.tp("init", str(self.lab), where=folder)
        self.git("config", "user.name", "live")
        self.git("config", "user.email", "live@example.org")
        self.tp("new", "case", "--method", "custom/custom")

    def tp(self, *words: str, where: Path | None = None) -> str:
        done = subprocess.run(
            ["tp", *words],
            cwd=where or self.lab,
            env=self.environment,
            text=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LONG_S,
            check=False,
        )
        assert done.returncode == 0, f"tp {' '.join(words)}: {done.returncode}\n{done.stderr}{done.stdout}"
        return done.stdout

    def git(self, *words: str) -> None:
        subprocess.run(["git", *words], cwd=self.lab, check=True, stdout=subprocess.DEVNULL, timeout=60)

    def folder(self) -> str:
        path = self.place / f"shared-{secrets.token_hex(4)}"
        path.mkdir()
        (path / "in").write_text("here\n")
        return str(path)

    def start(self, train: str, *, nodes: int = 1, mounts: Sequence[tuple[str, str, bool]] = ()) -> LiveRun:
        (self.lab / "experiments" / "case" / "train.sh").write_text(f"#!/bin/bash\n{train}\n")
        self.git("add", "-A")
        self.git("commit", "--quiet", "--allow-empty", "--message=case")
        words = [
            "submit",
            "case",
            "--image",
            self.image,
            "--observability-url",
            "https://tracker.example.org/live",
        ]
        for source, target, read_only in mounts:
            words += ["--mount", f"{source}:{target}{':ro' if read_only else ''}"]
        name = self.profile.partition(":")[0]
        shape = ["--profile", self.profile] if nodes == 1 else ["--profile", name, "--nodes", str(nodes)]
        shape += [] if nodes == 1 else ["--gpus-per-node", "1"]
        done = json.loads(self.tp(*words, *shape, "--json"))
        return LiveRun(self, done["run_id"], Path(done["folder"]))


def main(profile: str, image: str, folder: str, *names: str) -> int:
    """Print a line a case; 1 where any failed."""
    site = LiveSite(profile, image, Path(folder))
    failed = 0
    for name in names or CASES:
        started = time.monotonic()
        try:
            CASES[name](site)
        except Exception:  # each case tells; the others still run
            failed += 1
            print(f"FAILED  {name}")
            traceback.print_exc(file=sys.stdout)
        else:
            print(f"ok      {name}  ({time.monotonic() - started:.0f} s)")
        sys.stdout.flush()
    print(f"{failed} failed; runs and logs are kept" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
