"""A small trainer without dependencies: a two-layer network learns which points lie inside a ring.

Shows what a trainer does here: read its parameters, train on one node or on several together, report points,
save a checkpoint, end when asked. Started by train.sh, once on every node.
"""

import json
import math
import os
import random
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path

from tuneplane.report import finish, init, log, should_stop

params = json.loads(Path(os.environ["TUNEPLANE_PARAMS_FILE"]).read_text())
lr = float(params.get("lr", 1.0))
steps = int(params.get("steps", 300))
hidden = int(params.get("hidden", 12))
pause_s = float(params.get("pause_s", 0.01))  # so that there is something to watch

rank = int(os.environ["TUNEPLANE_MACHINE_RANK"])
nodes = int(os.environ["TUNEPLANE_MACHINE_COUNT"])
head = (os.environ["TUNEPLANE_MAIN_PROCESS_IP"], int(os.environ["TUNEPLANE_MAIN_PROCESS_PORT"]))
key = os.environ["NRL_RUN_ID"].encode()

random.seed(7)  # the same network and data on every node; each trains on its own share
w1 = [[random.gauss(0, 1.5) for _ in range(3)] for _ in range(hidden)]
w2 = [random.gauss(0, 0.5) for _ in range(hidden + 1)]
points = [(random.uniform(-1, 1), random.uniform(-1, 1)) for _ in range(96)]
data = [(x, y, 0.3 < math.hypot(x, y) < 0.8) for x, y in points][rank::nodes]


def connect():
    """Connections to the other nodes (on node 0), or to node 0; retried until it listens."""
    if nodes == 1:
        return []
    if rank == 0:
        with Listener(head, authkey=key) as listener:
            return [listener.accept() for _ in range(nodes - 1)]
    for _ in range(100):
        try:
            return [Client(head, authkey=key)]
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"node 0 at {head} does not answer")


def summed(values, peers):
    """The sum of `values` over all nodes: node 0 adds up and tells the others."""
    if rank == 0:
        parts = [values, *(peer.recv() for peer in peers)]
        values = [sum(column) for column in zip(*parts)]
        for peer in peers:
            peer.send(values)
    else:
        peers[0].send(values)
        values = peers[0].recv()
    return values


def gradients():
    """Loss, right answers, count and gradients over this node's share of the data."""
    loss, right = 0.0, 0
    g1, g2 = [[0.0] * 3 for _ in range(hidden)], [0.0] * (hidden + 1)
    for x, y, inside in data:
        h = [math.tanh(a * x + b * y + c) for a, b, c in w1]
        z = w2[-1] + sum(w * v for w, v in zip(w2, h))
        p = 1 / (1 + math.exp(-max(-30.0, min(30.0, z))))
        loss -= math.log(max(1e-9, p if inside else 1 - p))
        right += (p > 0.5) == inside
        error = p - inside
        for i, v in enumerate(h):
            back = error * w2[i] * (1 - v * v)
            g2[i] += error * v
            g1[i] = [g1[i][0] + back * x, g1[i][1] + back * y, g1[i][2] + back]
        g2[-1] += error
    return [loss, right, len(data), *g2, *(g for row in g1 for g in row)]


def save(step):
    """A checkpoint, whole or not at all."""
    folder = Path(os.environ["TUNEPLANE_OUT_DIR"]) / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    half = folder / "weights.json.tmp"
    half.write_text(json.dumps({"step": step, "w1": w1, "w2": w2}))
    half.replace(folder / "weights.json")


peers = connect()
init(hparams={"lr": lr, "steps": steps, "hidden": hidden, "nodes": nodes})
for step in range(steps):
    loss, right, count, *g = summed(gradients(), peers)
    loss, accuracy = loss / count, right / count
    scale = lr / count
    w2 = [w - scale * d for w, d in zip(w2, g)]
    rows = [g[i : i + 3] for i in range(hidden + 1, len(g), 3)]
    w1 = [[w - scale * d for w, d in zip(old, row)] for old, row in zip(w1, rows)]
    log({"loss": loss, "accuracy": accuracy}, step=step, prefix="train")  # node 0's alone is written
    if step % 50 == 0:
        print(f"step {step:4d}  loss {loss:.4f}  accuracy {accuracy:.3f}")
    if summed([should_stop()], peers)[0]:  # all nodes end at the same step
        print(f"asked to stop at step {step}")
        break
    time.sleep(pause_s)
if rank == 0:
    save(step)
finish()
print(f"done at step {step}: loss {loss:.4f}")
