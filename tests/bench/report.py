"""What reporting costs a trainer, beside trackio, wandb offline, TensorBoard and plain json. Part of `make bench`.

The peers go into an environment of their own (`peers.txt`); one that cannot be had is told and left out.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = Path(sys.prefix) / "peers"
PYTHON = PEERS / "bin/python"
NAMES = {
    "tuneplane": "tuneplane.report",
    "plain_json": "json and flush",
    "tensorboard": "TensorBoard",
    "trackio": "trackio",
    "wandb": "wandb offline",
}
IMPORTS = {
    "tuneplane": f"import sys; sys.path.insert(0, {str(HERE.parents[1])!r}); import tuneplane.report",
    "plain_json": "import json",
    "tensorboard": "import tensorboard.summary.writer.event_file_writer",
    "trackio": "import trackio",
    "wandb": "import wandb",
}
KILLS = 3
KILLED_AFTER_S = 2.0
IMPORT_RUNS = 7
TIMEOUT_S = 60

Row = tuple[str, str, str, str, str, bool]
"""What, measured, floor, figure, target, whether it holds."""


def install_peers() -> list[str]:
    """Make their environment where it is not there; the backends that can be measured."""
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True, timeout=120)
        for name in (HERE / "peers.txt").read_text().splitlines():
            if name and not name.startswith(
                "#"
            ):  # one by one: one that fails is no reason to lack the others
                pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", name]
                subprocess.run(pip, check=False, timeout=600, stderr=subprocess.DEVNULL)
    found = []
    for name, statement in IMPORTS.items():
        done = subprocess.run([str(PYTHON), "-c", statement], capture_output=True, timeout=120, check=False)
        if done.returncode == 0:
            found.append(name)
        else:
            print(f"{NAMES[name]} cannot be installed here: its row is left out")
    return found


def backend(name: str, mode: str, folder: str) -> list[str]:
    return [str(PYTHON), str(HERE / "report_backend.py"), name, mode, folder]


def run_mode(name: str, mode: str) -> dict[str, float] | None:
    """What a backend says of itself in one mode; None where it could not."""
    with tempfile.TemporaryDirectory() as folder:
        return last_words(backend(name, mode, folder), {})


def run_stalled(name: str) -> dict[str, float] | None:
    """The same on a small ext4 of its own that is frozen meanwhile; needs root."""
    with tempfile.TemporaryDirectory() as folder:
        disk, mount = Path(folder, "disk"), Path(folder, "mount")
        mount.mkdir()
        with disk.open("wb") as image:
            image.truncate(64 << 20)
        script = 'mkfs.ext4 -qF "$1" && mount -o loop "$1" "$2" && shift 2 && exec "$@"'
        argv = ["unshare", "--mount", "sh", "-c", script, "sh", str(disk), str(mount)]
        return last_words([*argv, *backend(name, "stall", str(mount))], {"BENCH_MOUNT": str(mount)})


def last_words(argv: list[str], more: dict[str, str]) -> dict[str, float] | None:
    environment = {**os.environ, **more, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 and lines else None


def lost_points(name: str) -> int:
    """The most points lost of those logged before a SIGKILL, of several."""
    worst = 0
    for _ in range(KILLS):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            trainer = subprocess.Popen(
                backend(name, "kill", folder), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            assert trainer.stdout is not None
            while trainer.stdout.readline().strip() != "ready":
                pass
            time.sleep(KILLED_AFTER_S)
            trainer.kill()
            steps = [int(line) for line in trainer.communicate()[0].splitlines() if line.isdigit()]
            time.sleep(1)  # what its helpers still write counts as kept
            counted = subprocess.run(
                backend(name, "count", folder), capture_output=True, text=True, timeout=TIMEOUT_S, check=True
            )
            worst = max(worst, steps[-1] + 1 - int(counted.stdout.split()[-1]))
    return worst


def import_s(name: str) -> float:
    """Median of importing it, over a Python that does nothing."""

    def once(statement: str) -> float:
        start = time.perf_counter()
        subprocess.run([str(PYTHON), "-c", statement], check=True, timeout=TIMEOUT_S, capture_output=True)
        return time.perf_counter() - start

    pairs = [(once("pass"), once(IMPORTS[name])) for _ in range(IMPORT_RUNS)]
    return statistics.median(took - bare for bare, took in pairs)


def report_rows() -> list[Row]:
    """One row a backend and figure; those of ours have a target."""
    names = install_peers()
    tight = {name: run_mode(name, "tight") for name in names}
    paced = {name: run_mode(name, "paced") for name in names}
    stall = {name: run_stalled(name) for name in names} if os.geteuid() == 0 else {}
    lost = {name: lost_points(name) for name in names}
    imported = {name: import_s(name) for name in names}
    return [
        *_call_rows("log of 5 scalars", tight, {"trackio": 1 / 2, "wandb": 1 / 20}),
        *_call_rows("the same at 100 Hz", paced, {}),
        *(_row("lost by SIGKILL, 100 Hz", name, f"{lost[name]}", "0", lost[name] == 0) for name in names),
        *(
            _row("longest call in a stall", name, _stalled(said), "<= 1 ms", said["ms"] <= 1)
            for name, said in stall.items()
            if said
        ),
        *(
            _row("import", name, f"{took * 1e3:.0f} ms", "<= 15 ms", took <= 0.015)
            for name, took in imported.items()
        ),
    ]


def _call_rows(what: str, said: dict[str, dict[str, float] | None], targets: dict[str, float]) -> list[Row]:
    ours = said["tuneplane"]
    assert ours is not None
    rows: list[Row] = [(what, f"{ours['us']:.1f} us", "", "", "", True)]
    for name, its in said.items():
        if name == "tuneplane" or its is None:
            continue
        ratio, target = ours["us"] / its["us"], targets.get(name)
        told = f"<= {target:.2g} x" if target else ""
        rows.append(
            (
                what,
                "",
                f"{NAMES[name]} {its['us']:.1f} us",
                f"{ratio:.2f} x",
                told,
                not target or ratio <= target,
            )
        )
    return rows


def _stalled(said: dict[str, float]) -> str:
    return f"{said['ms']:.1f} ms" + (", raises" if said["raised"] else "")


def _row(what: str, name: str, figure: str, target: str, holds: bool) -> Row:
    """Ours has the target, peers stand beside it."""
    if name == "tuneplane":
        return (what, figure, "", "", target, holds)
    return (what, "", f"{NAMES[name]} {figure}", "", "", True)


if __name__ == "__main__":
    for what, measured, floor, figure, target, holds in report_rows():
        word = ("holds" if holds else "MISSED") if target else ""
        print(f"{what:<26} {measured:>9}   {floor:<28} {figure:>9}   {target:<10} {word}".rstrip())
