"""Curves on the real Slurm, in a real container, while the job runs: by the platform, and by the user."""

from __future__ import annotations

import re
import time

import pytest
from slurm_lab import SlurmLab, unique
from test_slurm_platform import MANIFEST
from testbed_client import Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(120)]

TRAINER = """
{before}
python3 - <<'END'
import os, time
from pathlib import Path
from tuneplane.report import init, log
init(hparams={{"lr": 0.5}})
go = Path(os.environ["TUNEPLANE_OUT_DIR"], "go")
for step in range(40):
    log({{"train": {{"loss": 1 / (step + 1)}}}}, step=step)
    time.sleep(0.02)
print("LOGGED", time.time(), flush=True)
while not go.exists():
    time.sleep(0.05)
END
"""


@pytest.mark.contract("C21")
@pytest.mark.parametrize("kind", ["platform", "external"])
def test_the_curve_is_in_the_terminal_while_the_job_runs(testbed: Testbed, kind: str) -> None:
    """Two nodes of an image without the wheel, and a recipe whose user put the module on PYTHONPATH."""
    lab = SlurmLab(testbed, experiment=unique("curve"))
    if kind == "platform":
        lab.write(str(lab.own_site() / "recipe" / "test" / "platform.yaml"), MANIFEST)
        lab.experiment = unique("platform")
        lab.tp("new", lab.experiment, "--method", "test/platform")
        lab.train_sh(TRAINER.format(before=""))
        lab.commit()
        run = lab.submit_words("--profile", "h200:16", "--image", str(testbed.image))
    else:
        export = 'export PYTHONPATH="$TUNEPLANE_WORK_DIR/.tuneplane/kernel"'
        lab.train_sh(TRAINER.format(before=export))
        lab.commit()
        run = lab.submit("h200:1")

    def curve() -> list[str]:
        lines = run.tp("metrics", "train/loss").stdout.splitlines()
        return lines if any(line.split()[-2:] == ["39", "40"] for line in lines) else []

    lines = run.wait_for(curve, "the last of the points")
    seen_at = time.time()
    assert run.status()["state"] == "RUNNING"
    logged = [float(stamp) for stamp in re.findall(r"LOGGED (\d+\.\d+)", run.log())]
    assert len(logged) == (2 if kind == "platform" else 1)
    assert seen_at - min(logged) < 5
    assert lines[0] == "train/loss  last 0.025  min 0.025  max 1"
    assert sum(any("\u2800" < c <= "\u28ff" for c in line) for line in lines) > 8, "a curve is drawn"
    assert "hparams  lr=0.5" in lines and max(map(len, lines)) <= 80
    run.release()
    run.wait("COMPLETED")
