"""The environment that the contract lists is the same with a container and without (C9, C10)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from container_environment import table
from slurm_lab import Run, SlurmLab
from testbed_client import Testbed

from tuneplane.kernel import env

sys.path.append(str(Path(__file__).parent / "live"))

from cases import PRINT_ENVIRONMENT, printed_environment

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(240)]

OF_THE_IMAGE = {"TUNEPLANE_OUT_DIR": "/image", "HF_HOME": "/image/hf", "HF_TOKEN": "image-planted-token"}
"""What minimal-env.sif sets itself and the job has another value of."""


def environment_of(run: Run) -> dict[str, str]:
    run.wait("COMPLETED")
    return printed_environment((run.folder / "attempts/0/node-0.log").read_text())


def test_apptainer_and_no_container_give_the_same_table(testbed: Testbed) -> None:
    """With an image that sets TUNEPLANE_OUT_DIR, PATH, PYTHONPATH, HF_HOME and HF_TOKEN itself."""
    lab = SlurmLab(testbed)
    site = lab.own_site() / "site/default.yaml"
    text = lab.sh(["cat", str(site)]).stdout
    lab.write(str(site), text.replace("environment:\n", 'environment:\n  ODD_DATA_DIR: "/usr/share"\n', 1))
    lab.train_sh(PRINT_ENVIRONMENT)
    lab.commit()
    given = {"HF_TOKEN": 'hf_\'a "b" $c\\'}
    # One after the other, and whole nodes: GPUs that others hold would have other numbers.
    inside = environment_of(lab.submit("h200:8", image=testbed.env_image, env=given))
    bare = environment_of(lab.submit("h200-bare:8", env=given))
    profiles = [values.pop(env.CLUSTER_PROFILE) for values in (inside, bare)]
    assert profiles == ["h200:8", "h200-bare:8"]
    assert table(inside) == table(bare)
    assert json.dumps(given["HF_TOKEN"]) == json.dumps(inside["HF_TOKEN"])
    assert set(OF_THE_IMAGE) <= set(table(inside))
    for name, value in OF_THE_IMAGE.items():
        assert inside[name] != value
    assert inside["PYTHONPATH"] == "/opt/image/py", "an external recipe leaves it to the image (C23)"
    assert inside["PATH"].startswith("/opt/image/bin:") and "/opt/image" not in bare["PATH"]
