"""A lab of this machine whose runs train tiny language models by the TRL methods, and what such a run left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from warm_tp import run_tp

from tuneplane.collect.metrics import Metrics, metrics_of
from tuneplane.collect.store import Store
from tuneplane.kernel.runfolder import RunFolder
from tuneplane.runs.sources import read_source

TRAINERS = Path(__file__).parent / "trainers"

SEEN_BY_SOME = "total_flos"
"""A callback of the trainer itself takes this out of the log before those that are added later see it."""

SITE = """\
environment:
  HF_HUB_OFFLINE: "1"
  OMP_NUM_THREADS: "1"
"""
LOCAL = """\
defaults:
  - /container@container: none
  - _self_
description: this machine's processors
scheduler: local
device: cpu
gpus_per_node: 2
storage_root: {root}
scratch: {scratch}
path: {path}
"""

QUICK = ("logging_steps=1", "save_steps=4", "per_device_train_batch_size=2", "learning_rate=1e-3")


def make_tiny_model(folder: Path) -> Path:
    """The folder with `tiny model`, `sft.jsonl`, `held [out].jsonl`, `dpo.jsonl` and `grpo.jsonl`."""
    environ = {"PATH": os.defpath, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, TRAINERS / "tiny_language_model.py", folder], env=environ, check=True, timeout=100
    )
    return folder


class TrlRun:
    """A run of this machine, once it has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"

    def ended(self, attempt: int = 0, timeout: float = 150) -> dict[str, Any]:
        """How the attempt ended; waits for it."""
        record = self.folder / f"attempts/{attempt}/end.json"
        deadline = time.monotonic() + timeout
        while not record.exists():
            assert time.monotonic() < deadline, self.log(attempt)
            time.sleep(0.1)
        told: dict[str, Any] = json.loads(record.read_text())
        return told

    def log(self, attempt: int = 0) -> str:
        log = self.folder / f"attempts/{attempt}/node-0.log"
        return log.read_text(errors="replace")[-6000:] if log.exists() else "no log"

    def metrics(self) -> Metrics:
        """What was reported, under the recipe's canonical names."""
        with Store(memory=True) as store:
            store.refresh([read_source(RunFolder(self.folder))])
            return metrics_of(store, self.folder.name)

    def canonical(self) -> dict[str, str]:
        """The canonical name of each other name that the recipe knows."""
        metrics = json.loads((self.folder / "job.json").read_text())["spec"]["metrics"]
        return {alias: name for name, aliases in metrics.items() for alias in aliases}

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.out / "checkpoints").iterdir() if path.is_dir())

    def history(self, checkpoint: str) -> dict[str, dict[int, Any]]:
        """The trainer's own log_history, by canonical names: value by step."""
        state = json.loads((self.out / "checkpoints" / checkpoint / "trainer_state.json").read_text())
        found: dict[str, dict[int, Any]] = {}
        canonical = self.canonical()
        for entry in state["log_history"]:
            evaluation = any(key.startswith("eval_") for key in entry)
            for key, value in entry.items():
                if key in ("step", SEEN_BY_SOME) or (evaluation and key == "epoch"):
                    continue
                name = key if "/" in key else f"train/{key}"
                name = f"validation/{key[5:]}" if key.startswith("eval_") else name
                name = canonical.get(name, name)
                found.setdefault(name, {})[entry["step"]] = pytest.approx(value, rel=1e-6)
        return found


class TrlLab:
    """A committed lab with an experiment `chat` of a TRL method, and a site whose only profile is this machine."""

    def __init__(self, where: Path, method: str, shared: Path) -> None:
        self.where, self.shared = where, shared
        self.site = where / "site"
        (self.site / "cluster").mkdir(parents=True)
        (self.site / "site").mkdir()
        (self.site / "site/default.yaml").write_text(SITE)
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        (where / "scratch").mkdir()
        profile = LOCAL.format(root=where / "runs", scratch=where / "scratch", path=path)
        (self.site / "cluster/local.yaml").write_text(profile)
        self.tp("init", "lab", cwd=where)
        self.tp("new", "chat", "--method", method)
        self.folder = where / "lab/experiments/chat"
        self.commit()

    def commit(self) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "x", "--allow-empty"]):
            subprocess.run(["git", *words], cwd=self.where / "lab", check=True, timeout=30)

    def tp(self, *words: str | Path, cwd: Path | None = None) -> CompletedProcess[str]:
        environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.where),
            "TUNEPLANE_CONFIG_DIR": str(self.site),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        return run_tp(words, cwd=cwd or self.where / "lab", env=environ)

    def words(self, data: str, *sets: str, ranks: int = 2) -> list[str | Path]:
        """The flags of a submit or a validate, on a tiny model and a file of data."""
        words: list[str | Path] = ["chat", "--profile", f"local:{ranks}"]
        words += ["--model", self.shared / "tiny model", "--train-data", self.shared / data]
        return words + [word for text in (*QUICK, *sets) for word in ("--set", text)]

    def submit(self, *words: str | Path) -> TrlRun:
        done = self.tp("submit", *words, "--json")
        assert done.returncode == 0, done.stderr + done.stdout
        return TrlRun(Path(json.loads(done.stdout)["folder"]))
