"""A trainer whose final checkpoint tells whether it trained every step once, and what tests ask of its runs."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from node_leftovers import left_by
from slurm_lab import Run, SlurmLab, unique
from testbed_client import Testbed

TRAINER = r"""
import hashlib, json, os, pathlib, signal, sys, time

out, stop = pathlib.Path(os.environ["TUNEPLANE_OUT_DIR"]), os.environ["TUNEPLANE_STOP_FILE"]
rank, attempt = os.environ["TUNEPLANE_MACHINE_RANK"], os.environ["TUNEPLANE_JOB_ATTEMPT"]
last, pace_s, every = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
folder = out / "checkpoints" / rank
folder.mkdir(parents=True, exist_ok=True)
step, weights = 0, "0" * 64
for path in sorted(folder.glob("step-*.json"))[-1:]:
    step, weights = json.loads(path.read_text())
told = []
for word in sys.argv:
    if word.startswith("catches-"):
        signal.signal(getattr(signal, "SIG" + word[8:]), lambda *_: told.append(1))
print(f"attempt {attempt} begins after step {step}", flush=True)

def save():
    draft = folder / ".draft"
    draft.write_text(json.dumps([step, weights]))
    draft.rename(folder / f"step-{step:06d}.json")

with open(out / f"steps-{rank}-{attempt}.txt", "a") as steps:
    while step < last:
        time.sleep(pace_s)
        step += 1
        weights = hashlib.sha256(f"{weights} {step}".encode()).hexdigest()
        print(step, attempt, time.time(), file=steps, flush=True)
        if every and step % every == 0:
            save()
        if told or (os.path.exists(stop) and "deaf" not in sys.argv):
            save()
            print("saved and ended", flush=True)
            sys.exit(0)
save()
(out / f"final-{rank}.json").write_text(json.dumps([step, weights]))
"""


def unbroken(last: int) -> list[Any]:
    """The final checkpoint of a run that nothing interrupts."""
    weights = "0" * 64
    for step in range(1, last + 1):
        weights = hashlib.sha256(f"{weights} {step}".encode()).hexdigest()
    return [last, weights]


def make_lab(testbed: Testbed, last: int, pace_s: float, every: int, *words: str) -> SlurmLab:
    """A lab whose trainer makes `last` steps, saves at every `every`-th, and is what `words` say."""
    lab = SlurmLab(testbed, experiment=unique("goes-on"))
    lab.write(f"experiments/{lab.experiment}/train.py", TRAINER)
    train = f'python3 "$TUNEPLANE_EXP_DIR/train.py" {last} {pace_s} {every} {" ".join(words)}'
    lab.train_sh(f"sleep 100000 &\n{train}\nstatus=$?\nkill $!\nexit $status")
    lab.commit()
    return lab


@dataclass(frozen=True)
class Step:
    number: int
    attempt: int
    at: float  # seconds since the epoch


def steps(run: Run, rank: int = 0, attempt: int = 0) -> list[Step]:
    """What one rank of one attempt noted of its steps."""
    path = run.folder / f"out/steps-{rank}-{attempt}.txt"
    if not path.exists():
        return []
    words = [line.split() for line in path.read_text().splitlines() if line.count(" ") == 2]
    return [Step(int(number), int(of), float(at)) for number, of, at in words]


def steps_of(run: Run, rank: int = 0) -> list[tuple[int, int]]:
    """(step, attempt) of one rank, attempt by attempt; a file has the lines of its own attempt alone."""
    found = []
    for attempt in range(len(list((run.folder / "attempts").glob("*/start.json")))):
        noted = steps(run, rank, attempt)
        assert {step.attempt for step in noted} <= {attempt}  # none: its predecessor was just done
        found += [(step.number, attempt) for step in noted]
    return found


def left_on_nodes(run: Run) -> list[str]:
    """What a run left on any node, a moment after its end."""
    return left_by(run.lab.bed, [run])


@contextmanager
def cut(testbed: Testbed, node: str) -> Iterator[float]:
    """A node without its network, and with it again afterwards; the time of the cut."""
    testbed.cut(node)
    try:
        yield time.time()
    finally:
        testbed.join(node)


def end_of(run: Run, attempt: int) -> dict[str, Any]:
    return dict(json.loads(run.read(f"attempts/{attempt}/end.json")))
