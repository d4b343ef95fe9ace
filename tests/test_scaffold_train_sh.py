"""The train.sh that `tp new` writes: it refuses to start half-wired, and its launch lines really launch."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tuneplane.kernel.env import VARIABLES
from tuneplane.lab.experiments import new_experiment
from tuneplane.lab.marker import init_lab
from tuneplane.packaged import packaged_configs
from tuneplane.recipes.catalog import load_catalog

EVERY_JOB = (
    "TUNEPLANE_WORK_DIR",
    "TUNEPLANE_EXP_DIR",
    "TUNEPLANE_OUT_DIR",
    "TUNEPLANE_FRAMEWORK",
    "TUNEPLANE_RECIPE",
    "TUNEPLANE_CLUSTER_NUM_NODES",
    "TUNEPLANE_CLUSTER_GPUS_PER_NODE",
    "TUNEPLANE_JOB_ENABLED",
)
CREDENTIALS = ("TUNEPLANE_JOB_ENDPOINT", "TUNEPLANE_JOB_RUN_ID", "TUNEPLANE_JOB_TOKEN")
TRAINER = """\
import json, os, sys
json.dump({"argv": sys.argv, "cwd": os.getcwd(), "env": dict(os.environ)}, open(os.environ["SEEN"], "w"))
"""
ODD = "lab with $HOME 'quotes\" and 实验"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of an experiment fresh from `tp new`, at a path that breaks careless quoting."""
    lab = init_lab(tmp_path / ODD).lab
    experiment = new_experiment(lab, "fresh", "custom/custom", load_catalog([packaged_configs()]))
    (experiment / "train.py").write_text(TRAINER)
    return experiment


def environment(folder: Path, nodes: int = 1, gpus: int = 2, rank: int = 0) -> dict[str, str]:
    out = folder.parent / "out"
    out.mkdir(exist_ok=True)
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "SEEN": str(folder.parent / "seen.json"),
        "TUNEPLANE_WORK_DIR": str(folder.parents[1]),
        "TUNEPLANE_EXP_DIR": str(folder),
        "TUNEPLANE_OUT_DIR": str(out),
        "TUNEPLANE_FRAMEWORK": "custom",
        "TUNEPLANE_RECIPE": "custom",
        "TUNEPLANE_CLUSTER_NUM_NODES": str(nodes),
        "TUNEPLANE_CLUSTER_GPUS_PER_NODE": str(gpus),
        "TUNEPLANE_MACHINE_RANK": str(rank),
        "TUNEPLANE_MACHINE_COUNT": str(nodes),
        "TUNEPLANE_MAIN_PROCESS_IP": "127.0.0.1",
        "TUNEPLANE_MAIN_PROCESS_PORT": "29511",
        "TUNEPLANE_JOB_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }


def run(script: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """As the custom adapter starts it: bash, the absolute path, the work folder."""
    return subprocess.run(
        ["bash", str(script)],
        cwd=script.parents[2],
        env=env,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def launch_line(script: str, title: str) -> str:
    """The commented lines below a title, their `# ` taken off and nothing else changed."""
    block = re.search(rf"^# {re.escape(title)}[^\n]*:\n((?:# \S.*\n|#   .*\n)+)", script, re.MULTILINE)
    assert block, f"train.sh shows no launch line for {title!r}"
    return "".join(line.removeprefix("# ") + "\n" for line in block[1].splitlines())


def with_line(folder: Path, title: str, replace_end: bool = True) -> Path:
    """train.sh as its owner edits it: one launch line instead of the end, or merely uncommented before it."""
    path = folder / "train.sh"
    text = path.read_text()
    line = launch_line(text, title)
    head, end = text[: text.index('echo "no training command yet"')], text[text.index("echo ") :]
    path.write_text(head + line + ("" if replace_end else end))
    return path


def fake(folder: Path, name: str, wanted: list[str], env: dict[str, str]) -> None:
    """An executable of that name on PATH that takes these arguments and no others, then runs the trainer."""
    programs = folder.parent / "programs"
    programs.mkdir(exist_ok=True)
    program = programs / name
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nwanted = json.loads({json.dumps(json.dumps(wanted))})\n"
        "if sys.argv[1:] != wanted:\n    sys.exit(f'{sys.argv[1:]} are not {wanted}')\n"
        "os.execv(sys.executable, [sys.executable, sys.argv[-1]])\n"
    )
    program.chmod(0o755)
    env["PATH"] = f"{programs}:{env['PATH']}"


@pytest.mark.contract("C2")
def test_unedited_it_says_that_no_training_command_stands_there_and_fails(folder: Path) -> None:
    done = run(folder / "train.sh", environment(folder))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "no training command yet\n")


def test_it_starts_by_stopping_at_errors_and_can_be_executed(folder: Path) -> None:
    lines = (folder / "train.sh").read_text().splitlines()
    assert lines[:2] == ["#!/usr/bin/env bash", "set -euo pipefail"]
    assert stat.S_IMODE((folder / "train.sh").stat().st_mode) & 0o100


@pytest.mark.parametrize("state", ["missing", "empty"])
@pytest.mark.parametrize("name", EVERY_JOB)
def test_each_variable_that_every_job_has_stops_it_when_missing(folder: Path, name: str, state: str) -> None:
    env = environment(folder)
    if state == "empty":
        env[name] = ""
    else:
        del env[name]
    script = with_line(folder, "One node, plain python")
    script.write_text(script.read_text().replace("$TUNEPLANE_EXP_DIR", str(folder).replace("$", r"\$")))
    done = run(script, env)
    assert done.returncode != 0
    assert name in done.stderr and "start it with tp submit" in done.stderr
    assert not Path(env["SEEN"]).exists(), "the trainer ran all the same"


@pytest.mark.parametrize("name", CREDENTIALS)
def test_credentials_are_asked_for_where_reporting_is_on(folder: Path, name: str) -> None:
    env = environment(folder) | {"TUNEPLANE_JOB_ENABLED": "1"} | dict.fromkeys(CREDENTIALS, "x")
    assert "no training command yet" in run(folder / "train.sh", env).stderr
    del env[name]
    done = run(folder / "train.sh", env)
    assert done.returncode != 0 and name in done.stderr and "no training command yet" not in done.stderr


def test_the_variables_it_names_are_variables_of_a_job(folder: Path) -> None:
    named = set(re.findall(r"TUNEPLANE_[A-Z_]*[A-Z]", (folder / "train.sh").read_text()))
    assert named <= {v.name for v in VARIABLES}
    assert named >= {*EVERY_JOB, *CREDENTIALS}


def test_the_plain_python_line_runs_the_trainer_beside_the_script(folder: Path) -> None:
    env = environment(folder)
    done = run(with_line(folder, "One node, plain python"), env)
    assert done.returncode == 0, done.stderr
    seen = json.loads(Path(env["SEEN"]).read_text())
    assert seen["argv"] == [str(folder / "train.py")]
    assert seen["cwd"] == str(folder.parents[1])


def test_a_line_that_is_only_uncommented_ends_as_its_trainer_does(folder: Path) -> None:
    env = environment(folder)
    script = with_line(folder, "One node, plain python", replace_end=False)
    assert run(script, env).returncode == 0
    (folder / "train.py").write_text("raise SystemExit(7)")
    assert run(script, env).returncode == 7


def test_the_accelerate_line_asks_for_as_many_processes_as_the_node_has_gpus(folder: Path) -> None:
    env = environment(folder, gpus=8)
    wanted = ["launch", "--num_machines", "1", "--num_processes", "8", str(folder / "train.py")]
    fake(folder, "accelerate", wanted, env)
    done = run(with_line(folder, "One node, accelerate"), env)
    assert done.returncode == 0 and Path(env["SEEN"]).exists(), done.stderr


def test_the_torchrun_line_asks_for_as_many_processes_as_the_node_has_gpus(folder: Path) -> None:
    env = environment(folder, gpus=8)
    fake(folder, "torchrun", ["--standalone", "--nproc_per_node", "8", str(folder / "train.py")], env)
    done = run(with_line(folder, "One node, torchrun"), env)
    assert done.returncode == 0 and Path(env["SEEN"]).exists(), done.stderr


def test_the_lines_for_several_nodes_pass_on_place_and_address(folder: Path) -> None:
    original = (folder / "train.sh").read_text()
    env = environment(folder, nodes=4, gpus=8, rank=3)
    trainer = str(folder / "train.py")
    accelerate = "launch --multi_gpu --num_machines 4 --machine_rank 3 --main_process_ip 127.0.0.1"
    accelerate += " --main_process_port 29511 --num_processes 32"
    torchrun = "--nnodes 4 --node_rank 3 --master_addr 127.0.0.1 --master_port 29511 --nproc_per_node 8"
    fake(folder, "accelerate", [*accelerate.split(), trainer], env)
    fake(folder, "torchrun", [*torchrun.split(), trainer], env)
    for title in ("Several nodes, accelerate", "Several nodes, torchrun", "Several nodes, plain python"):
        (folder / "train.sh").write_text(original)
        Path(env["SEEN"]).unlink(missing_ok=True)
        done = run(with_line(folder, title), env)
        assert done.returncode == 0 and Path(env["SEEN"]).exists(), f"{title}: {done.stderr}"
    seen = json.loads(Path(env["SEEN"]).read_text())["env"]
    place = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
    assert [seen[name] for name in place] == ["127.0.0.1", "29511", "4", "3", "0"]


RANKS = """\
import os
name = f"{os.environ['RANK']}-{os.environ['LOCAL_RANK']}-of-{os.environ['WORLD_SIZE']}"
open(os.path.join(os.environ["TUNEPLANE_OUT_DIR"], name), "w").close()
"""


@pytest.mark.slow
def test_the_torchrun_lines_run_under_the_real_torchrun(folder: Path) -> None:
    torchrun = shutil.which("torchrun")
    if torchrun is None:
        pytest.skip("no torchrun on PATH: pip install tuneplane[torch]")
    (folder / "train.py").write_text(RANKS)
    original = (folder / "train.sh").read_text()
    env = environment(folder) | {"PATH": f"{Path(torchrun).parent}:/usr/bin:/bin"}
    done = run(with_line(folder, "One node, torchrun"), env)
    out = Path(env["TUNEPLANE_OUT_DIR"])
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(out)) == ["0-0-of-2", "1-1-of-2"]

    (folder / "train.sh").write_text(original)
    script = with_line(folder, "Several nodes, torchrun")
    nodes = [
        subprocess.Popen(
            ["bash", str(script)],
            env=env | {"TUNEPLANE_CLUSTER_NUM_NODES": "2", "TUNEPLANE_MACHINE_RANK": rank},
            stderr=subprocess.PIPE,
        )
        for rank in "01"
    ]
    try:
        said = [node.communicate(timeout=90)[1].decode() for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    assert {"0-0-of-4", "1-1-of-4", "2-0-of-4", "3-1-of-4"} <= set(os.listdir(out))


@pytest.mark.parametrize("title", [None, "One node, torchrun", "Several nodes, accelerate"])
def test_shellcheck_has_nothing_to_say(folder: Path, title: str | None) -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    script = folder / "train.sh" if title is None else with_line(folder, title)
    done = subprocess.run(
        [shellcheck, "--severity=style", str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout
