"""The main job on the real Slurm, in a real container, as an ordinary user."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from slurm_lab import URL, SlurmLab
from testbed_client import Testbed

from tuneplane.kernel import env

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(240)]

PRINT_ENVIRONMENT = """
python3 - <<'END'
import json, os
print("ENVIRONMENT " + json.dumps(dict(os.environ)))
END
"""

FIRST_RUN = Path(__file__).resolve().parents[1] / "docs" / "first-run"


@pytest.fixture
def lab(testbed: Testbed) -> SlurmLab:
    return SlurmLab(testbed)


def environments(log: str) -> list[dict[str, str]]:
    """What each node's trainer printed of its environment."""
    return [
        json.loads(line.split("ENVIRONMENT ", 1)[1]) for line in log.splitlines() if "ENVIRONMENT {" in line
    ]


@pytest.mark.contract("C2")
def test_a_new_experiment_fails_until_its_owner_writes_a_command(lab: SlurmLab) -> None:
    lab.commit()
    run = lab.submit("h200:1")
    status = run.wait("FAILED")
    assert status["code"] == 1
    assert "no training command yet" in run.log()


@pytest.mark.parametrize(
    ("profile", "nodes", "gpus"), [("h200:4", 1, 4), ("h200:8", 1, 8), ("h200:16", 2, 8)]
)
def test_the_demo_trains_in_a_container(lab: SlurmLab, profile: str, nodes: int, gpus: int) -> None:
    for name in ("train.py", "edit-train-sh.sh"):
        lab.write(f"experiments/mlp/{name}", (FIRST_RUN / name).read_text())
    lab.sh(["bash", "experiments/mlp/edit-train-sh.sh", "experiments/mlp/train.sh"])
    lab.commit()
    run = lab.submit(profile, "--set", "steps=60", "--set", "pause_s=0")
    assert not [notice for notice in run.notices if "train apart" in notice]
    run.wait("COMPLETED")
    log = run.log()
    assert log.count("done at step 59") == nodes
    metrics = json.loads(run.tp("metrics", "--json").stdout)["metrics"]
    loss = next(m for m in metrics if m["name"] == "train/loss")
    assert loss["points"] == 60
    assert loss["values"][-1] < loss["values"][0] / 2
    artifacts = json.loads(run.tp("artifacts", "--json").stdout)["artifacts"]
    assert [a["path"] for a in artifacts if a["name"] == "checkpoints"] == ["checkpoints/step-59"]


@pytest.mark.contract("C9")
def test_every_node_has_the_documented_environment(lab: SlurmLab) -> None:
    """Four whole nodes: each variable of the table is there with its value, and nothing else is."""
    lab.train_sh(PRINT_ENVIRONMENT)
    lab.commit()
    run = lab.submit("h200:32", "--set", "lr=1e-4", env={"HF_TOKEN": "hf_a_planted_token"})
    run.wait("COMPLETED")
    printed = environments(run.log())
    assert len(printed) == 4
    out = str(run.folder / "out")
    for values in printed:
        assert values[env.WORK_DIR] == values["PWD"]
        assert values[env.EXP_DIR] == f"{values[env.WORK_DIR]}/experiments/mlp"
        assert values[env.OUT_DIR] == out
        assert (values[env.FRAMEWORK], values[env.RECIPE]) == ("custom", "custom")
        assert (values[env.NUM_NODES], values[env.GPUS_PER_NODE]) == ("4", "8")
        assert values[env.MACHINE_COUNT] == "4"
        assert values[env.CLUSTER_PROFILE] == "h200:32"
        assert values[env.ENABLED] == "1"
        assert values[env.ATTEMPT] == "0"
        assert values[env.RUN_ID] == values["NRL_RUN_ID"] == run.run_id
        assert values[env.ENDPOINT] == (run.folder / "ingest").as_uri()
        assert values[env.OBSERVABILITY_URL] == URL
        assert values["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
        assert 20_000 <= int(values[env.MAIN_PROCESS_PORT]) < 32_768
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", values[env.CAPSULE_DIGEST])
    assert sorted(int(values[env.MACHINE_RANK]) for values in printed) == [0, 1, 2, 3]
    heads = {values[env.MAIN_PROCESS_IP] for values in printed}
    assert len(heads) == 1
    assert heads.pop().startswith("10.77.0.1")
    assert len({values[env.TOKEN] for values in printed}) == 1


@pytest.mark.contract("C10")
def test_the_environment_is_the_documented_list_and_no_more(lab: SlurmLab) -> None:
    """Names that a real job prints, in both directions against the table that docs/environment.md shows."""
    lab.train_sh(PRINT_ENVIRONMENT)
    lab.commit()
    stray = {
        "PYTHONPATH": "/planted",
        "LD_LIBRARY_PATH": "/planted",
        "CONDA_PREFIX": "/planted",
        "MY_OWN": "1",
    }
    run = lab.submit("h200:2", env={"HF_TOKEN": "hf_a_planted_token", "TUNEPLANE_X": "1", **stray})
    run.wait("COMPLETED")
    (values,) = environments(run.log())
    unconditional = {
        v.name for v in env.VARIABLES if v.when in (env.ALWAYS, env.INGEST, env.URL, env.SLURM, env.GPU)
    }
    assert unconditional <= set(values), unconditional - set(values)
    allowed = {v.name for v in env.VARIABLES if v.when not in (env.PLATFORM, env.BARE, env.BRIDGE)}
    patterns = [re.compile(name.replace("*", ".*")) for name in allowed]
    # What the shell and the container runtime themselves add, as docs/environment.md says.
    own = {"PWD", "SHLVL", "_", "OLDPWD", "PATH", "LD_LIBRARY_PATH", "PROMPT_COMMAND", "PS1"}
    rest = {
        name
        for name in values
        if not any(p.fullmatch(name) for p in patterns)
        and name not in own
        and not name.startswith(("APPTAINER_", "SINGULARITY_"))
    }
    assert rest == set()
    assert "/planted" not in "".join(values.values())
    assert values["TEXT_DATA_DIR"].endswith("/data/text")


@pytest.mark.contract("C8")
def test_the_log_begins_with_the_command_and_tells_nodes_apart(lab: SlurmLab) -> None:
    lab.train_sh('echo "hello from $TUNEPLANE_MACHINE_RANK"')
    lab.commit()
    run = lab.submit("h200:16")
    run.wait("COMPLETED")
    for rank in (0, 1):
        lines = run.log("--node", str(rank)).splitlines()
        assert re.fullmatch(
            rf"tuneplane: node {rank} of 2 \(n\d\): bash /\S+/experiments/mlp/train.sh", lines[0]
        )
        assert lines[1] == f"hello from {rank}"
    both = run.log().splitlines()
    assert {line.split(" | ")[0] for line in both} <= {"n1", "n2", "n3", "n4"}


@pytest.mark.contract("C6")
def test_train_sh_runs_once_a_node_from_the_capsules_root(lab: SlurmLab) -> None:
    lab.train_sh('pwd; echo "$0"; ls -d tuneplane.yaml experiments')
    lab.commit()
    run = lab.submit("h200:16")
    assert [n for n in run.notices if "TUNEPLANE_MACHINE_RANK" in n], run.notices
    run.wait("COMPLETED")
    for rank in (0, 1):
        _, pwd, zero, *listed = run.log("--node", str(rank)).splitlines()
        assert zero == f"{pwd}/experiments/mlp/train.sh"
        assert sorted(listed) == ["experiments", "tuneplane.yaml"]


@pytest.mark.contract("C23")
def test_an_external_run_cannot_import_tuneplane_by_accident(lab: SlurmLab) -> None:
    lab.train_sh("if python3 -c 'import tuneplane'; then echo FOUND; else echo ABSENT; fi 2>&1")
    lab.commit()
    run = lab.submit("h200:1")
    run.wait("COMPLETED")
    assert "ABSENT" in run.log()
    assert "No module named 'tuneplane'" in run.log()


@pytest.mark.contract("C13")
def test_what_lies_under_the_output_folder_outlives_the_job(lab: SlurmLab) -> None:
    lab.train_sh(
        'mkdir -p "$TUNEPLANE_OUT_DIR/checkpoints/step-1" "$TUNEPLANE_OUT_DIR/eval"\n'
        'echo w >"$TUNEPLANE_OUT_DIR/checkpoints/step-1/w"\n'
        'ln -s /etc "$TUNEPLANE_OUT_DIR/checkpoints/outside"\n'
        'echo "{}" >"$TUNEPLANE_OUT_DIR/eval/report.json"\n'
        'echo scratch >"$TMPDIR/x"; echo "$TUNEPLANE_WORK_DIR"; exit 7'
    )
    lab.commit()
    run = lab.submit("h200:1")
    assert run.wait("FAILED")["code"] == 7
    said = json.loads(run.tp("artifacts", "--json").stdout)
    assert {a["path"] for a in said["artifacts"]} == {"checkpoints/step-1", "eval/report.json"}
    assert ["outside" in skipped for skipped in said["skipped"]] == [True]
    work = Path(run.log().splitlines()[1])
    host = run.status()["nodes"][0]["host"]
    assert lab.bed.node_exec(host, ["test", "-e", str(work.parent)], check=False).returncode == 1
    assert lab.bed.node_exec(host, ["test", "-d", str(work.parent.parent)]).returncode == 0
