"""Names that break what pastes them into a shell line or a Slurm pattern: labs, storage, values, mounts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slurm_lab import SlurmLab, unique
from testbed_client import WEIRD_NAME, Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(150)]

SAVE = """
mkdir -p "$TUNEPLANE_OUT_DIR/checkpoints/step 1"
cat "$TUNEPLANE_EXP_DIR/words $HOME.txt" "common/%j.txt" >"$TUNEPLANE_OUT_DIR/checkpoints/step 1/words"
export PYTHONPATH="$TUNEPLANE_WORK_DIR/.tuneplane/kernel"
python3 -c 'from tuneplane.report import log, finish; log({"loss": 0.25}, step=1); finish()'
echo "rank $TUNEPLANE_MACHINE_RANK saved in $TUNEPLANE_OUT_DIR"
"""


def check_from_submit_to_artifacts(lab: SlurmLab, profile: str, *flags: str) -> None:
    """Everything that a user does with a run, where names are hard."""
    lab.write(f"experiments/{lab.experiment}/words $HOME.txt", "one ")
    lab.write("common/%j.txt", "two")
    lab.train_sh(SAVE.replace("words $HOME", "words \\$HOME"))
    lab.commit()
    run = lab.submit(profile, *flags)
    nodes = run.wait("COMPLETED")["nodes"]
    log = run.log()
    for node in nodes:
        prefix = f"{node['host']} | " if len(nodes) > 1 else ""
        assert f"{prefix}rank {node['rank']} saved in {run.folder}/out" in log.splitlines()
    (artifact,) = json.loads(run.tp("artifacts", "--json").stdout)["artifacts"]
    assert (artifact["name"], artifact["path"]) == ("checkpoints", "checkpoints/step 1")
    assert run.read("out/checkpoints/step 1/words") == "one two"
    (loss,) = json.loads(run.tp("metrics", "--json").stdout)["metrics"]
    assert loss["last"] == 0.25
    assert lab.sh(["ls", str(run.folder / "slurm")]).stdout == f"{run.job_id}.out\n"
    assert "as submitted" in run.tp("verify").stdout
    assert lab.sh(["bash", "-n", str(run.folder / "job.sbatch")]).stderr == ""


@pytest.mark.contract("C42")
def test_a_lab_under_a_hard_name_works_from_new_to_artifacts(testbed: Testbed) -> None:
    lab = SlurmLab(testbed, folder_name=WEIRD_NAME, experiment=unique("hard"))
    assert lab.root.name == WEIRD_NAME
    check_from_submit_to_artifacts(lab, "h200", "--nodes", "2", "--gpus-per-node", "1")
    assert WEIRD_NAME in lab.tp("submit", lab.experiment, *lab.flags("h200:1"), "--dry-run")
    assert lab.experiment in lab.tp("ls")


@pytest.mark.parametrize("profile", ["h200:1", "h200-bare:1"])
def test_storage_under_a_hard_name_works_too(testbed: Testbed, profile: str) -> None:
    lab = SlurmLab(testbed, experiment=unique("hard"))
    store = lab.base / WEIRD_NAME
    lab.own_user_config(
        "defaults.yaml", f"cluster:\n  storage_root: {json.dumps(str(store), ensure_ascii=False)}\n"
    )
    check_from_submit_to_artifacts(lab, profile)
    assert lab.sh(["ls", str(store / "runs" / "alice")]).stdout == f"{lab.experiment}\n"


@pytest.mark.parametrize("name", ["line\nbreak", "back\\slash"])
def test_storage_that_slurm_could_not_be_told_is_refused(testbed: Testbed, name: str) -> None:
    lab = SlurmLab(testbed, experiment=unique("hard"))
    lab.commit()
    store = lab.base / "stores" / name
    lab.own_user_config("defaults.yaml", f"cluster:\n  storage_root: {json.dumps(str(store))}\n")
    for command in ("validate", "submit"):
        said = lab.tp(command, lab.experiment, *lab.flags("h200:1"), code=2)
        assert "storage" in said
        assert "line break" in said or "backslash" in said
    assert not (lab.base / "stores").exists()


VALUES = {
    "NCCL_SOCKET_IFNAME": "=eth0,eth1",
    "NCCL_DEBUG_SUBSYS": "INIT,NET,  COLL",
    "NCCL_IB_HCA": "^mlx5_0:1, mlx5_1",
    "QUOTES": """'single' "double" `back` \\ slash""",
    "SHELL_WORDS": "$HOME ${PATH} $(id) %j ; | & > *",
    "CHINESE": "实验 数据",
    "EQUALS": "a=b c=d",
    "EMPTY": "",
}


@pytest.mark.contract("C10")
@pytest.mark.parametrize("profile", ["h200:1", "h200-bare:1"])
def test_a_sites_variables_arrive_as_they_were_written(testbed: Testbed, profile: str) -> None:
    lab = SlurmLab(testbed, experiment=unique("values"))
    site = lab.own_site()
    written = json.dumps(VALUES, ensure_ascii=False).replace("${", "\\\\${")
    lab.write(str(site / "defaults.yaml"), f"cluster:\n  environment: {written}\n")
    lab.train_sh("python3 -c 'import json, os; print(\"ENVIRONMENT \" + json.dumps(dict(os.environ)))'")
    lab.commit()
    run = lab.submit(profile)
    run.wait("COMPLETED")
    (line,) = [line for line in run.log().splitlines() if line.startswith("ENVIRONMENT ")]
    printed = json.loads(line.removeprefix("ENVIRONMENT "))
    assert {name: printed.get(name) for name in VALUES} == VALUES


@pytest.mark.contract("C10")
def test_a_mount_with_hard_names_is_seen_and_read_only_where_said(testbed: Testbed) -> None:
    lab = SlurmLab(testbed, experiment=unique("mounts"))
    data = lab.base / f"data, {WEIRD_NAME}"
    lab.write(str(data / "x.txt"), "from outside")
    lab.train_sh(
        'cat "/data set, 数据/x.txt"; echo\n'
        'echo changed >"/data set, 数据/x.txt" || echo "read-only"\n'
        'echo written >"/writable/y.txt"; ls "$HOME" | wc -l'
    )
    lab.commit()
    writable = lab.base / "writable"
    lab.sh(["mkdir", str(writable)])
    run = lab.submit("h200:1", "--mount", f"{data}:/data set, 数据:ro", "--mount", f"{writable}:/writable")
    run.wait("COMPLETED")
    lines = run.log().splitlines()
    assert "from outside" in lines
    assert "read-only" in lines
    assert lines[-1] == "0"
    assert lab.sh(["cat", str(data / "x.txt")]).stdout == "from outside"
    assert lab.sh(["cat", str(writable / "y.txt")]).stdout == "written\n"


MARKER = """\
apiVersion: tuneplane/project/v1
name: "a lab of the console"
console:
  endpoint: https://console.example.org
  workspace: 42
labels: {team: vision}
"""


def public_lock(lab: SlurmLab, **bindings: object) -> str:
    """A lock as the public client writes it: its own digests, version and further keys."""
    return json.dumps(
        {
            "apiVersion": "tuneplane/recipe-lock/v1",
            "recipe": {
                "name": "custom/custom",
                "version": "1.0.0",
                "digest": "sha256:" + "a" * 64,
                "manifest_digest": "sha256:" + "b" * 64,
                "template_digest": "sha256:" + "c" * 64,
                "source": "console",
            },
            "framework": {"kind": "custom", "version": "user-managed", "runtime_id": "custom-user-managed"},
            "bindings": {"entrypoint": {"kind": "experiment", "value": "train.sh"}, "params": {}, **bindings},
            "created_by": {"core_version": "0.4.2", "client": "tuneplane"},
            "requires": {"core": ">=0.4"},
        }
    )


@pytest.mark.contract("C3")
def test_a_lab_of_the_public_client_is_admitted_where_all_that_it_bound_still_exists(
    testbed: Testbed,
) -> None:
    lab = SlurmLab(testbed, experiment=unique("public"))
    lab.write("tuneplane.yaml", MARKER)
    lock = f"experiments/{lab.experiment}/recipe.lock.json"
    lab.write(lock, public_lock(lab))
    lab.train_sh("echo trained")
    lab.commit()
    assert "admitted" in lab.tp("recipe", "status", lab.experiment)
    run = lab.submit("h200:1")
    assert json.loads(run.read("job.json"))["metadata"]["lab"] == "a lab of the console"
    run.wait("COMPLETED")
    assert "trained" in run.log()

    bound = {"entrypoint": {"kind": "experiment", "value": "run.py"}}
    lab.write(lock, public_lock(lab, **bound))
    lab.commit()
    said = lab.tp("submit", lab.experiment, *lab.flags("h200:1"), code=2)
    assert "the entrypoint was experiment run.py" in said
    assert f"tp recipe upgrade {lab.experiment}" in said
    lab.write(lock, public_lock(lab).replace("custom/custom", "custom/gone"))
    lab.commit()
    said = lab.refused("submit", lab.experiment, *lab.flags("h200:1"))
    assert "the recipe custom/gone is gone from the catalog" in said
    assert Path(lab.root, lock).name in said
