"""A small trainer without dependencies: a two-layer network learns which points lie inside a ring.

Shows the three things that a trainer does here: report points, save checkpoints, end when asked.
"""

import json
import math
import os
import random
import time
from pathlib import Path

from tuneplane.report import finish, init, log, should_stop

params = json.loads(Path(os.environ["TUNEPLANE_PARAMS_FILE"]).read_text())
lr = float(params.get("lr", 0.3))
steps = int(params.get("steps", 300))
hidden = int(params.get("hidden", 12))
pause_s = float(params.get("pause_s", 0.01))

random.seed(7)
points = [(random.uniform(-1, 1), random.uniform(-1, 1)) for _ in range(96)]
data = [((x, y), 1.0 if 0.3 < math.hypot(x, y) < 0.8 else 0.0) for x, y in points]
w1 = [[random.gauss(0, 1.5) for _ in range(3)] for _ in range(hidden)]
w2 = [random.gauss(0, 0.5) for _ in range(hidden + 1)]


def forward(x, y):
    """Hidden activations and the probability of lying inside the ring."""
    h = [math.tanh(a * x + b * y + c) for a, b, c in w1]
    z = w2[-1] + sum(w * v for w, v in zip(w2, h))
    return h, 1 / (1 + math.exp(-max(-30.0, min(30.0, z))))


def save(step):
    """A checkpoint, whole or not at all."""
    folder = Path(os.environ["TUNEPLANE_OUT_DIR"]) / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    half = folder / "weights.json.tmp"
    half.write_text(json.dumps({"step": step, "w1": w1, "w2": w2}))
    half.replace(folder / "weights.json")


init(hparams={"lr": lr, "steps": steps, "hidden": hidden})
for step in range(steps):
    loss, right = 0.0, 0
    for (x, y), target in data:
        h, p = forward(x, y)
        loss -= math.log(max(1e-9, p if target else 1 - p))
        right += (p > 0.5) == (target > 0.5)
        error = (p - target) * lr / 8
        for i in range(hidden):
            back = error * w2[i] * (1 - h[i] ** 2)
            w2[i] -= error * h[i]
            w1[i] = [w1[i][0] - back * x, w1[i][1] - back * y, w1[i][2] - back]
        w2[-1] -= error
    log({"loss": loss / len(data), "accuracy": right / len(data)}, step=step, prefix="train")
    if step % 50 == 0:
        print(f"step {step:4d}  loss {loss / len(data):.4f}  accuracy {right / len(data):.3f}")
    if should_stop():
        print(f"asked to stop: saved at step {step}")
        break
    time.sleep(pause_s)
save(step)
finish()
print(f"done: loss {loss / len(data):.4f}")
