"""What of a user's own surroundings reaches the trainer: nothing, with a container and without (C10).

The user is carol, whose login profile is this module's and test_slurm_secrets's alone.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import hold
from slurm_lab import SlurmLab, login_profile, unique
from testbed_client import Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(150)]

USER = "carol"

LOOK = """
python3 - <<'END'
import importlib.util, json, os, shutil, sys
modules = ("planted_by_profile", "planted_by_shell", "planted_in_local", "image_module", "tuneplane", "psutil")
print("LOOK " + json.dumps({
    "environ": dict(os.environ),
    "modules": [name for name in modules if importlib.util.find_spec(name)],
    "python": sys.executable,
    "tool": shutil.which("planted-tool"),
}))
END
"""

OF_THE_RUNTIME = ("APPTAINER_", "SINGULARITY_", "LD_LIBRARY_PATH", "PROMPT_COMMAND", "PS1")
"""What Apptainer adds of its own, as docs/environment.md says."""

OF_SHELLS = {"PWD", "OLDPWD", "SHLVL", "_"}

Look = dict[str, Any]


@pytest.fixture(scope="module")
def looks(testbed: Testbed) -> Iterator[dict[str, Look]]:
    """What trainers saw: in the image that has an environment of its own, without a container, by plain sbatch."""
    lab = SlurmLab(testbed, user=USER, experiment=unique("isolated"))
    lab.train_sh(LOOK)
    lab.commit()
    local = testbed.home(USER) / ".local/lib/python3.11/site-packages"
    for folder, name in ((lab.base / "profile", "profile"), (lab.base / "shell", "shell")):
        lab.write(str(folder / f"planted_by_{name}.py"), "")
        for tool in ("planted-tool", "python3", "bash", "apptainer"):
            lab.write(str(folder / "bin" / tool), "#!/bin/sh\necho PLANTED\n")
            lab.sh(["chmod", "755", str(folder / "bin" / tool)])
    lab.write(str(local / "planted_in_local.py"), "")
    profile = "".join(
        f"export {name}={lab.base}/profile{tail}\n"
        for name, tail in (("PATH", "/bin:$PATH"), ("PYTHONPATH", ""), ("LD_LIBRARY_PATH", "/lib"))
    )
    profile += "export PLANTED=1 TUNEPLANE_OUT_DIR=/planted BASH_ENV=/planted\n"
    shell = {
        "PYTHONPATH": f"{lab.base}/shell",
        "LD_LIBRARY_PATH": f"{lab.base}/shell/lib",
        "VIRTUAL_ENV": f"{testbed.shared}/venv",
        "CONDA_PREFIX": "/planted/conda",
        "CONDA_DEFAULT_ENV": "planted",
        "TUNEPLANE_OUT_DIR": "/planted",
        "TUNEPLANE_JOB_ENABLED": "0",
        "APPTAINERENV_PLANTED": "1",
        "APPTAINER_BIND": "/etc:/planted",
        "HF_HOME": "/planted",
        "PLANTED": "1",
    }
    path = f"{lab.base}/shell/bin:{testbed.shared}/venv/bin:/usr/local/bin:/usr/bin:/bin"
    with hold(fcntl.LOCK_SH), login_profile(testbed, USER, profile):
        # tp itself runs with the shell's own PATH in front, but by its full name: its shebang is absolute.
        runs = {
            "image": lab.submit("h200:1", image=testbed.env_image, env=shell),
            "bare": lab.submit("h200-bare:1", env={**shell, "PATH": path}),
        }
        control = ["sbatch", "--export=NONE", "--wait", "-o", str(lab.base / "control"), "--wrap"]
        lab.sh([*control, f"/usr/bin/python3 -c '{LOOK.split(chr(10), 2)[2].rsplit(chr(10), 2)[0]}'"])
        said = {"control": lab.sh(["cat", str(lab.base / "control")]).stdout}
        for name, run in runs.items():
            run.wait("COMPLETED")
            said[name] = run.log()
    found = {}
    for name, text in said.items():
        (line,) = [line for line in text.splitlines() if line.startswith("LOOK ")]
        found[name] = json.loads(line.removeprefix("LOOK "))
        found[name]["run"] = runs.get(name)
    yield found
    lab.sh(["rm", "-rf", str(testbed.home(USER) / ".local/lib")], cwd="/")


def own(look: Look) -> dict[str, str]:
    """Variables that TunePlane answers for."""
    return {
        k: v for k, v in look["environ"].items() if not k.startswith(OF_THE_RUNTIME) and k not in OF_SHELLS
    }


def test_a_plain_batch_job_does_get_the_login_profile_and_local_packages(looks: dict[str, Look]) -> None:
    """What is planted works, so that its absence elsewhere means something."""
    control = looks["control"]
    assert control["environ"]["PLANTED"] == "1"
    assert {"planted_by_profile", "planted_in_local"} <= set(control["modules"])
    assert "/profile/bin/planted-tool" in control["tool"]


@pytest.mark.contract("C10")
@pytest.mark.parametrize("where", ["image", "bare"])
def test_profile_shell_and_local_packages_do_not_reach_the_trainer(
    looks: dict[str, Look], where: str
) -> None:
    look = looks[where]
    assert [m for m in look["modules"] if m != "image_module"] == []
    assert look["tool"] is None
    values = own(look)
    values.pop("HF_TOKEN", None)  # of the image
    assert [name for name, value in values.items() if "planted" in value.lower()] == []
    assert not {"PLANTED", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "BASH_ENV"} & set(values)
    for text in ("/profile", "/shell", "/venv"):
        assert text not in "".join(look["environ"].values()).replace(str(look["run"].folder), "")
    assert values["TUNEPLANE_OUT_DIR"] == f"{look['run'].folder}/out"
    assert values["TUNEPLANE_JOB_ENABLED"] == "1"


@pytest.mark.contract("C10")
def test_the_images_own_variables_lose_but_path_is_the_images(
    looks: dict[str, Look], testbed: Testbed
) -> None:
    values = looks["image"]["environ"]
    assert values["PATH"].split(":")[0] == "/opt/image/bin"
    assert values["TUNEPLANE_OUT_DIR"] != "/image"
    assert values["HF_HOME"] == f"{testbed.shared}/data/huggingface"
    # external: PYTHONPATH is left alone (C23), so what the image has there still works
    assert values["PYTHONPATH"] == "/opt/image/py"
    assert "image_module" in looks["image"]["modules"]


def test_without_a_container_path_is_the_profiles(looks: dict[str, Look]) -> None:
    assert looks["bare"]["environ"]["PATH"] == "/usr/local/bin:/usr/bin:/bin"
    assert looks["bare"]["python"] == "/usr/bin/python3"
    assert "PYTHONPATH" not in looks["bare"]["environ"]
    assert "LD_LIBRARY_PATH" not in looks["bare"]["environ"]


@pytest.mark.contract("C10")
def test_with_and_without_a_container_the_variables_are_the_same(looks: dict[str, Look]) -> None:
    image, bare = own(looks["image"]), own(looks["bare"])
    del image["PYTHONPATH"]  # the image's own
    image.pop("HF_TOKEN")  # the image's own: this shell has none
    assert set(image) == set(bare)
    own_to_a_run = {
        "PATH",
        "HOME",
        "TMPDIR",
        "NRL_RUN_ID",
        "CLUSTER_PROFILE",
        "SLURM_JOB_ID",
        "SLURM_JOB_NODELIST",
    }
    own_to_a_run |= {"TUNEPLANE_MAIN_PROCESS_PORT", "CUDA_VISIBLE_DEVICES", "TUNEPLANE_JOB_TOKEN"}
    own_to_a_run |= {"TUNEPLANE_JOB_RUN_ID"}
    pairs = [(looks["image"]["run"].run_id, looks["bare"]["run"].run_id)]
    pairs.append((image["TUNEPLANE_WORK_DIR"], bare["TUNEPLANE_WORK_DIR"]))
    for name in sorted(set(image) - own_to_a_run):
        value = image[name]
        for one, other in pairs:
            value = value.replace(one, other)
        assert value == bare[name], name
