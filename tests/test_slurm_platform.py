"""A recipe of the site that reports to the platform: refused flags, the reporting module, live points."""

from __future__ import annotations

import json
import time

import pytest
from slurm_lab import URL, SlurmLab, unique
from testbed_client import Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(120)]

MANIFEST = """\
schema: tuneplane/recipe/v1
id: test/platform
version: 1.0.0
title: {en: Your own script with platform reporting, zh: 自己的脚本，由平台收集指标}
adapter: custom
entrypoint: {kind: experiment, value: train.sh}
scaffold: custom/custom
free_parameters: true
observability: platform
runtime: {default_version: user-managed}
"""

TRAINER = """
python3 - <<'END'
import os, time
from pathlib import Path
import tuneplane
from tuneplane.report import log
log({"train": {"loss": 0.75}}, step=3)
print("LOGGED", time.time())
print("FROM", tuneplane.__file__)
print("FIRST", os.environ["PYTHONPATH"].split(":")[0])
import image_module
print("IMAGE", image_module.ORIGIN, os.environ["PYTHONPATH"].split(":")[1:])
while not Path(os.environ["TUNEPLANE_OUT_DIR"], "go").exists():
    time.sleep(0.05)
END
"""


ASKS_FOR_HARDWARE = """
python3 - <<'END'
import os, threading, time
from pathlib import Path
from tuneplane.report import init, log, finish
init(monitor_hardware=True)
log({"train/loss": 0.5}, step=1)
print("SAMPLERS", sum("hardware" in t.name for t in threading.enumerate()),
      os.environ["TUNEPLANE_JOB_HARDWARE_BRIDGE"])
kept = bytearray(32 << 20)
while not Path(os.environ["TUNEPLANE_OUT_DIR"], "go").exists():
    sum(range(10000)); time.sleep(0.05)
finish()
END
"""


@pytest.fixture
def lab(testbed: Testbed) -> SlurmLab:
    """A lab at a site that publishes the recipe, with an experiment of it."""
    lab = SlurmLab(testbed, experiment=unique("unused"))
    site = lab.own_site()
    lab.write(str(site / "recipe" / "test" / "platform.yaml"), MANIFEST)
    lab.experiment = unique("platform")
    lab.tp("new", lab.experiment, "--method", "test/platform")
    lab.train_sh(TRAINER)
    lab.commit()
    return lab


@pytest.mark.contract("C24")
def test_a_platform_recipe_refuses_the_address_of_another_tracker(lab: SlurmLab) -> None:
    flags = ["--profile", "h200:1", "--image", str(lab.bed.image)]
    for url in (URL, ""):
        said = lab.refused("submit", lab.experiment, *flags, "--observability-url", url)
        assert "--observability-url is refused" in said
    assert "nothing to fault" in lab.tp("validate", lab.experiment, *flags)


@pytest.mark.contract("C20")
def test_each_node_of_a_job_is_seen_at_work(lab: SlurmLab) -> None:
    """By the node agents: the trainer is told so, and its own sampler stays off in an image without the wheel."""
    lab.train_sh(f"#!/bin/bash{ASKS_FOR_HARDWARE}", keep_head=False)
    lab.commit()
    run = lab.submit_words("--profile", "h200:16", "--image", str(lab.bed.image))

    def nodes() -> set[str]:
        said = json.loads(run.tp("metrics", "--json").stdout)
        return {
            metric["name"].split("/")[1] for metric in said["metrics"] if metric["name"].startswith("system/")
        }

    run.wait_for(lambda: nodes() == {"node0", "node1"}, "not both nodes are seen")
    assert run.status()["state"] == "RUNNING"
    run.release()
    run.wait("COMPLETED")
    metrics = {metric["name"]: metric for metric in json.loads(run.tp("metrics", "--json").stdout)["metrics"]}
    for node in ("node0", "node1"):
        assert metrics[f"system/{node}/memory_used_bytes"]["max"] > 0
        assert metrics[f"system/{node}/cpu_percent"]["max"] >= 0
    assert metrics["train/loss"]["last"] == 0.5
    assert not [name for name in metrics if "@rank" in name]
    assert run.log().count("SAMPLERS 0 1") == 2


@pytest.mark.contract("C24", "C21")
def test_points_of_an_image_without_the_wheel_are_seen_while_the_job_runs(lab: SlurmLab) -> None:
    """The image has a PYTHONPATH of its own: the kernel's folder comes before it, and what is there is found."""
    run = lab.submit_words("--profile", "h200:1", "--image", str(lab.bed.env_image))

    def points() -> dict[str, float]:
        said = json.loads(run.tp("metrics", "--json").stdout)
        metrics = {metric["name"]: metric["last"] for metric in said["metrics"]}
        return {name: last for name, last in metrics.items() if not name.startswith("system/")}

    found = run.wait_for(points, "no points")
    seen_at = time.time()
    assert found == {"train/loss": 0.75}
    assert run.status()["state"] == "RUNNING"
    printed = dict(line.split(" ", 1) for line in run.log().splitlines() if line.isascii())
    assert seen_at - float(printed["LOGGED"]) < 5
    assert printed["FIRST"].endswith("/work/.tuneplane/kernel")
    assert printed["FROM"] == f"{printed['FIRST']}/tuneplane/__init__.py"
    assert printed["IMAGE"] == "image ['/opt/image/py']"
    run.release()
    run.wait("COMPLETED")
