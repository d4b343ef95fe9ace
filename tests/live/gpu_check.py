#!/usr/bin/env python3
"""Do the catalog's methods train on the GPUs of this machine? Image classification and SFT, a minute each.

    .venv/bin/python tests/live/gpu_check.py                      # packages of this Python
    .venv/bin/python tests/live/gpu_check.py --image trl.sif      # packages of an image, by Apptainer
    .venv/bin/python tests/live/gpu_check.py --cpu                # a few seconds, to try the check itself

`tp` beside this Python, or on the PATH, submits by a copy of the profile `local`. What is trained on is made on
the spot (`gpu_data.py`), nothing is fetched. It prints throughput, metrics, artifacts, GPU and driver, and leaves
with 1 where anything is missing; runs and data are then kept.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_data import write_images, write_sums

FINAL = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "LOST"}
LONG_S = 900.0
"""How long one run may take, its start included."""

PROFILE = "gpu-check"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Size:
    """How much of everything: on GPUs enough to keep one busy, on CPUs enough to see that it works."""

    steps: int  # of the first run, by which the minute's steps are reckoned
    images: Mapping[str, object]  # parameters of pytorch/image-classification
    sft: Mapping[str, object]  # of trl/sft
    hidden: int  # of the language model
    layers: int
    rows: int
    terms: int  # numbers in a row of its data


GPU = Size(
    steps=60,
    images={"architecture": "resnet18", "image_size": 64, "batch_size": 256, "precision": "bf16"},
    sft={"per_device_train_batch_size": 16, "max_length": 512, "bf16": "true"},
    hidden=768,
    layers=12,
    rows=4000,
    terms=120,
)
CPU = Size(
    steps=8,
    images={"architecture": "small-cnn", "image_size": 8, "batch_size": 64, "num_workers": 0},
    sft={"per_device_train_batch_size": 2, "max_length": 64},
    hidden=32,
    layers=2,
    rows=64,
    terms=8,
)


# Where it runs --------------------------------------------------------------------------------------------------


class Machine:
    """This machine as a site of its own: a configuration, a lab and a storage root below one folder."""

    def __init__(self, folder: Path, cpu: bool, image: str | None, gpus: int | None) -> None:
        self.folder, self.cpu, self.image, self.gpus = folder, cpu, image, gpus
        self.python = Path(sys.executable)
        config = folder / "config"
        environment = {**OFFLINE, "HF_HOME": str(folder / "hf"), **({"OMP_NUM_THREADS": "1"} if cpu else {})}
        container = {"override /container@container": "apptainer"}
        profile: dict[str, Any] = {
            "defaults": ["local", *([container] if image else []), "_self_"],
            "device": "cpu" if cpu else "gpu",
            "storage_root": str(folder / "storage"),
            "scratch": str(folder / "scratch"),
            "path": f"{self.python.parent}:/usr/local/bin:/usr/bin:/bin",
            "mounts": [f"{folder / 'data'}:{folder / 'data'}:ro"],
        }
        for name, value in (
            (f"cluster/{PROFILE}.yaml", profile),
            ("site/default.yaml", {"name": PROFILE, "environment": environment}),
        ):
            (config / name).parent.mkdir(parents=True)
            (config / name).write_text(json.dumps(value))  # JSON is YAML
        for name in ("hf", "scratch", "data"):
            (folder / name).mkdir()
        self.environment = {
            **os.environ,
            "PATH": f"{self.python.parent}:{os.environ.get('PATH', os.defpath)}",
            "TUNEPLANE_CONFIG_DIR": str(config),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "GIT_CONFIG_COUNT": "2",
            **{"GIT_CONFIG_KEY_0": "user.name", "GIT_CONFIG_VALUE_0": "check"},
            **{"GIT_CONFIG_KEY_1": "user.email", "GIT_CONFIG_VALUE_1": "check@example.org"},
        }
        self.lab = folder / "lab"
        self.tp("init", str(self.lab), where=folder)

    def call(self, *words: str, where: Path | None = None, fails: bool = False) -> str:
        done = subprocess.run(
            words,
            cwd=where or self.lab,
            env=self.environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if not fails else subprocess.STDOUT,
            timeout=LONG_S,
            check=not fails,
        )
        return done.stdout

    def tp(self, *words: str, where: Path | None = None, fails: bool = False) -> str:
        """What `tp` printed. fails: whatever its exit code, and with what it said on standard error."""
        return self.call("tp", *words, where=where, fails=fails)

    def trainer(self, *words: str) -> str:
        """What the Python that trains printed: this one, or that of the image."""
        argv = [str(self.python)]
        if self.image:
            binds = f"{self.folder},{Path(__file__).resolve().parent}"
            argv = ["apptainer", "exec", "--cleanenv", *(() if self.cpu else ("--nv",)), "--bind", binds]
            argv += [self.image, "python3"]
        return self.call(*argv, *words, where=self.folder)

    def submit(self, experiment: str, sets: Mapping[str, object], *words: str) -> str:
        """Start a run; its id."""
        profile = f"{PROFILE}:{self.gpus or 1}" if self.cpu or self.gpus else PROFILE
        given = [*(w for name, value in sets.items() for w in ("--set", f"{name}={value}")), *words]
        image = ["--image", self.image] if self.image else []
        said = json.loads(self.tp("submit", experiment, "--profile", profile, *image, *given, "--json"))
        return str(said["run_id"])

    def wait(self, run_id: str) -> str:
        """The state in which a run ended."""
        until = time.monotonic() + LONG_S
        while True:
            state = str(json.loads(self.tp("job", "status", run_id, "--json"))["state"])
            if state in FINAL:
                return state
            if time.monotonic() > until:
                self.tp("job", "stop", run_id)
                return f"{state} after {LONG_S:.0f} s"
            time.sleep(0.5)


# What is looked at ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    steps: list[float]
    values: list[float]
    times_s: list[float]

    def per_second(self) -> float:
        """How fast the values grow."""
        seconds = self.times_s[-1] - self.times_s[0]
        return (self.values[-1] - self.values[0]) / seconds if seconds > 0 else math.nan

    def steps_per_second(self) -> float:
        return Curve(self.steps, self.steps, self.times_s).per_second()


@dataclass(frozen=True)
class Method:
    """One method of the catalog: how it is run here, and what a run of it must leave."""

    name: str
    experiment: str
    sets: Mapping[str, object]
    flags: tuple[str, ...]
    speed: str  # a metric
    grows: bool  # whether the speed is how fast it grows, not its last value
    unit: str
    metrics: tuple[str, ...]
    artifacts: tuple[str, ...]

    def steps(self, number: int) -> dict[str, object]:
        """Parameters for so many steps, with some logs and checkpoints on the way."""
        some = max(1, number // 3)
        if self.name == "trl/sft":
            return {"max_steps": number, "logging_steps": max(1, number // 20), "save_steps": some}
        every = {"log_every_steps": max(1, number // 20), "eval_every_steps": some}
        return {"epochs": 100_000, "max_steps": number, **every, "checkpoint_every_steps": some}


def methods(size: Size, data: Path) -> tuple[Method, Method]:
    grey = {"color": "false", "augmentation": "none", "learning_rate": 0.05}
    return (
        Method(
            "pytorch/image-classification",
            "images",
            {**grey, **size.images},
            ("--train-data", str(data / "images")),
            "train/images_per_second",
            False,
            "images/s",
            ("train/loss", "validation/loss", "validation/accuracy"),
            ("checkpoints",),
        ),
        Method(
            "trl/sft",
            "chat",
            size.sft,
            ("--model", str(data / "model"), "--train-data", str(data / "sums.jsonl")),
            "train/tokens",
            True,
            "tokens/s",
            ("train/loss", "train/learning_rate", "train/grad_norm"),
            ("checkpoints", "hf_export"),
        ),
    )


class Check:
    """One method on this machine. `missing` fills with what is not as it must be."""

    def __init__(self, machine: Machine, method: Method) -> None:
        self.machine, self.method = machine, method
        self.missing: list[str] = []

    def run(self, first: int, seconds: float) -> None:
        """Once for `first` steps; then, where seconds are wanted, for as many as they take by its speed."""
        method = self.method
        print(f"\n{method.name}")
        curves = self._train(first, "first steps")
        if seconds and not self.missing:
            rate = curves["train/loss"].steps_per_second()
            more = int(rate * seconds) if math.isfinite(rate) else 0
            if more > first:
                self._train(more, f"{seconds:.0f} s of steps")
            else:
                print(f"  {first} steps took longer than {seconds:.0f} s: once is enough")
        for lacking in self.missing:
            print(f"  MISSING     {lacking}")

    def _train(self, steps: int, what: str) -> dict[str, Curve]:
        method, machine = self.method, self.machine
        started = time.monotonic()
        run_id = machine.submit(method.experiment, {**method.sets, **method.steps(steps)}, *method.flags)
        state = machine.wait(run_id)
        print(f"  {what}: {steps} steps, {run_id} {state} in {time.monotonic() - started:.0f} s")
        if state != "COMPLETED":
            self.missing.append(f"{run_id} is {state}")
            for line in machine.tp("job", "why", run_id, fails=True).splitlines()[:20]:
                print(f"    {line}")
            return {}
        curves = self._metrics(run_id)
        self._artifacts(run_id)
        return curves

    def _metrics(self, run_id: str) -> dict[str, Curve]:
        said = json.loads(self.machine.tp("job", "metrics", run_id, "--json"))
        curves = {m["name"]: Curve(m["steps"], m["values"], m["times"]) for m in said["metrics"]}
        method = self.method
        for name in (method.speed, *method.metrics):
            curve = curves.get(name)
            if curve is None or not curve.values:
                self.missing.append(f"no metric {name}: {', '.join(sorted(curves)) or 'there is none'}")
            elif not all(isinstance(value, (int, float)) for value in curve.values):
                self.missing.append(f"{name} has values that are no finite numbers")
            else:
                print(f"  {name:<26} {curve.values[-1]:<12.6g} {len(curve.values)} points")
        curve = curves.get(method.speed)
        if curve and curve.values:
            speed = curve.per_second() if method.grows else curve.values[-1]
            print(f"  {'throughput':<26} {speed:,.0f} {method.unit}")
            if not speed > 0:
                self.missing.append(f"no throughput by {method.speed}")
        self._hardware(curves)
        return curves

    def _hardware(self, curves: Mapping[str, Curve]) -> None:
        """What the GPUs did meanwhile, by the platform's own sampler."""
        used = {name: curve for name, curve in curves.items() if name.startswith("system/node0/gpu")}
        for name, curve in sorted(used.items()):
            if name.endswith(("utilization_percent", "memory_used_bytes", "power_watts")):
                print(f"  {name:<42} at most {max(curve.values):,.0f}")
        busy = [max(c.values) for name, c in used.items() if name.endswith("utilization_percent")]
        if not self.machine.cpu and not any(busy):
            self.missing.append("no GPU was seen at work: system/node0/gpu…/utilization_percent")

    def _artifacts(self, run_id: str) -> None:
        said = json.loads(self.machine.tp("job", "artifacts", run_id, "--json"))
        there = {a["name"]: a for a in said["artifacts"]}
        for artifact in said["artifacts"]:
            print(f"  {artifact['name']:<11} {artifact['path']}  {artifact['size_bytes']:,} bytes")
        self.missing += [
            f"no artifact {name} of {run_id}" for name in self.method.artifacts if name not in there
        ]


# ----------------------------------------------------------------------------------------------------------------


def gpus() -> list[str]:
    """Name, driver and memory of each. Raises OSError or SubprocessError where no driver answers."""
    argv = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    said = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout
    return [line.strip() for line in said.splitlines() if line.strip()]


VERSIONS = """\
import importlib.metadata as m, platform
names = ("torch", "transformers", "trl", "accelerate", "numpy")
print("python", platform.python_version(), *(f"{n} {m.version(n)}" for n in names), sep=", ")
import torch
print("torch's CUDA", torch.version.cuda, "sees", torch.cuda.device_count(), "GPUs")
"""


def main(argv: Sequence[str]) -> int:
    """Check both methods; 1 where anything is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="a few steps on CPUs")
    parser.add_argument("--image", help="a .sif whose Python trains, by Apptainer; else this Python")
    parser.add_argument("--gpus", type=int, help="how many GPUs (all), or processes with --cpu (1)")
    parser.add_argument(
        "--seconds", type=float, help="how long each trains (60; with --cpu 0: first steps alone)"
    )
    parser.add_argument("--folder", type=Path, help="where everything is made (a new one in the home folder)")
    given = parser.parse_args(argv)
    size = CPU if given.cpu else GPU
    seconds = (0.0 if given.cpu else 60.0) if given.seconds is None else given.seconds
    folder = given.folder or Path(tempfile.mkdtemp(prefix="tuneplane-gpu-check-", dir=Path.home()))
    folder = folder.resolve()
    folder.mkdir(exist_ok=True)
    if not given.cpu:
        try:
            print("\n".join(f"GPU {number}: {text}" for number, text in enumerate(gpus())))
        except (OSError, subprocess.SubprocessError) as error:
            print(f"no GPU here: {error}; --cpu tries the check itself", file=sys.stderr)
            return 1
    image = str(Path(given.image).resolve()) if given.image else None
    machine = Machine(folder, given.cpu, image, given.gpus)
    data = folder / "data"
    print(machine.trainer("-c", VERSIONS).strip())
    write_images(data / "images")
    write_sums(data / "sums.jsonl", size.rows, size.terms)
    words = [str(data / "model"), str(data / "sums.jsonl"), str(size.hidden), str(size.layers)]
    machine.trainer(str(Path(__file__).resolve().with_name("gpu_data.py")), *words)
    checks = [Check(machine, method) for method in methods(size, data)]
    for check in checks:
        machine.tp("new", check.method.experiment, "--method", check.method.name)
    machine.call("git", "add", "-A")
    machine.call("git", "commit", "--quiet", "--message=check")
    for check in checks:
        check.run(size.steps, seconds)
    missing = [lacking for check in checks for lacking in check.missing]
    print(
        f"\n{len(missing)} missing; all is kept in {folder}"
        if missing
        else "\nboth trained, nothing is missing"
    )
    if not missing:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
