"""The board on the real Slurm, in a real browser, over the way that `ssh -L` takes, while the job runs."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from board_browser import browser
from slurm_lab import Run, SlurmLab, unique
from testbed_client import PROGRAM, Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.slow, pytest.mark.timeout(300)]

TRAINER = """
python3 - <<'END'
import os, time
from pathlib import Path
import tuneplane
from tuneplane.report import init, log
print("FROM", tuneplane.__file__, flush=True)
out = Path(os.environ["TUNEPLANE_OUT_DIR"])
init(hparams={"lr": 0.5}, all_ranks=True)
for step in range(40):
    log({"train": {"loss": 100.0 - step}, "lr": 0.5}, step=step)
while not (out / "more").exists():
    time.sleep(0.05)
log({"train": {"loss": 7.0}}, step=40)
Path(out, f"logged-{os.environ['TUNEPLANE_MACHINE_RANK']}").write_text(str(time.time()))
while not (out / "go").exists():
    time.sleep(0.05)
END
"""


@pytest.fixture
def run(testbed: Testbed) -> Run:
    """A run of two nodes whose image has the wheel, once it has logged its first points."""
    lab = SlurmLab(testbed, experiment=unique("curve"))
    (packages,) = (testbed.shared / "venv" / "lib").glob("python3*/site-packages")
    image = lab.base / "with-wheel.sif"
    script = (Path(__file__).parent / "make_wheel_image.sh").read_text(encoding="utf-8")
    made = ["bash", "-c", script, "bash", str(testbed.image), str(packages), str(image)]
    lab.sh(made, cwd=str(lab.base), timeout=200)
    lab.train_sh(TRAINER)
    lab.commit()
    run = lab.submit("h200:16", image=image)
    run.wait_for(lambda: run.log().count("FROM /usr/lib/python3/dist-packages/") == 2, "both nodes train")
    return run


@contextmanager
def served(run: Run) -> Iterator[tuple[str, Path]]:
    """`tp board RUN` on the login host: its link, and its socket."""
    lab = run.lab
    folder = lab.base / "run"
    lab.sh(["mkdir", "-m", "700", str(folder)])
    argv = [str(PROGRAM), "exec", "--user", lab.user, "--cwd", str(lab.root), "--", "env"]
    argv += [f"XDG_RUNTIME_DIR={folder}", "tp", "board", run.run_id]
    process = subprocess.Popen(
        argv, env=lab.bed.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.strip())
            if line.strip().startswith("http://"):
                break
        (command,) = (line for line in said if line.startswith("ssh "))
        words = shlex.split(command)
        assert words[:3] == ["ssh", "-N", "-L"] and words[-1].startswith(f"{lab.user}@")
        port, path = words[3].split(":")
        assert said[-1].startswith(f"http://localhost:{port}/?token=")
        yield said[-1], Path(path)
    finally:
        process.terminate()
        lab.sh(["pkill", "-INT", "-f", f"tp board {run.run_id}"], check=False)
        process.wait(timeout=20)


@contextmanager
def tunnel(target: Path) -> Iterator[int]:
    """What `ssh -L` does on the user's own machine: a port there whose bytes come out at the socket."""
    listening = socket.create_server(("127.0.0.1", 0))

    def copy(source: socket.socket, sink: socket.socket) -> None:
        try:
            while block := source.recv(65536):
                sink.sendall(block)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def accept() -> None:
        while True:
            try:
                near, _ = listening.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(str(target))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=copy, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.close()


@pytest.mark.contract("C21")
def test_the_board_shows_the_curve_of_two_nodes_while_the_job_runs(run: Run, tmp_path: Path) -> None:
    with served(run) as (link, path), tunnel(path) as port, browser(tmp_path) as page:
        assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
        page.open(re.sub(r"localhost:\d+", f"localhost:{port}", link))
        card = page.card("loss")
        page.wait(lambda: page.inked(card), "a line is drawn")
        page.wait(lambda: "step 39" in page.hover(card, 0.999) and "61" in page.text(".tooltip"), "a value")
        # The other node's points stand beside it, under a name of their own.
        assert any("rank1" in text or "rank 1" in text for text in page.texts(".card-title, .tooltip, .card"))

        run.lab.sh(["touch", str(run.folder / "out" / "more")])
        seen = page.wait(lambda: "step 40" in page.hover(card, 0.999) and time.time(), "the new point")
        logged = float(run.read("out/logged-0"))
        assert seen - logged < 5
        assert run.status()["state"] == "RUNNING"
        page.type(".toolbar input[type=search]", "^lr$")
        page.wait(lambda: set(page.texts(".card-title")) == {"lr"}, "the filter holds")
        page.driver.save_screenshot(str(tmp_path / "board.png"))
        assert page.complaints() == []
        run.release()
        run.wait("COMPLETED")
        page.wait(lambda: "completed" in page.text("body").lower(), "its end is shown", 20)
    last = {m["name"]: m["last"] for m in json.loads(run.tp("metrics", "--json").stdout)["metrics"]}
    assert last["train/loss"] == 7.0
