"""Adapters: custom starts one command on every node, compiles train alone, and travels in the kernel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tuneplane
from tuneplane.kernel.errors import UsageError
from tuneplane.packaged import packaged_configs
from tuneplane.recipes.adapters import NodeFacts, adapter_names, check_operation, custom, load_adapter
from tuneplane.recipes.adapters.custom import multi_node_notice
from tuneplane.recipes.manifest import OPERATIONS

SCAFFOLD = packaged_configs() / "recipe/custom/custom.scaffold/train.sh"


def facts(nodes: int, rank: int, folder: str = "/work 'x' $HOME/实验") -> NodeFacts:
    return NodeFacts(
        work_dir=folder,
        exp_dir=f"{folder}/experiments/a",
        out_dir="/runs/a/out",
        entrypoint=f"{folder}/experiments/a/train.sh",
        nodes=nodes,
        gpus_per_node=8,
        node_rank=rank,
        main_ip="10.0.0.1",
        main_port=29500,
        params={"lr": 1},
        params_file="/runs/a/params.json",
    )


@pytest.mark.contract("C6")
@pytest.mark.parametrize(("nodes", "rank"), [(1, 0), (4, 0), (4, 3)])
def test_custom_runs_bash_with_the_absolute_path_in_the_work_folder_on_every_node(
    nodes: int, rank: int
) -> None:
    command = custom.train(facts(nodes, rank))
    assert list(command.argv) == ["bash", "/work 'x' $HOME/实验/experiments/a/train.sh"]
    assert command.cwd == "/work 'x' $HOME/实验"
    assert command.launch == "each-node"
    assert (dict(command.env), dict(command.files)) == ({}, {})


def test_the_command_really_runs_the_script_wherever_it_lies(tmp_path: Path) -> None:
    folder = tmp_path / "work 'x' $HOME/实验\n"
    script = folder / "experiments/a/train.sh"
    script.parent.mkdir(parents=True)
    script.write_text('printf "%s|" "$PWD" "$0" "$#"')
    command = custom.train(facts(1, 0, str(folder)))
    done = subprocess.run(
        command.argv, cwd=command.cwd, capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout == f"{folder}|{script}|0|"


@pytest.mark.contract("C7")
@pytest.mark.parametrize("operation", ["export", "eval"])
def test_custom_refuses_what_is_not_training(operation: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_operation("custom", operation)
    assert caught.value.exit_code == 2
    assert "custom adapter" in caught.value.faults[0].what and operation in caught.value.faults[0].what
    assert caught.value.faults[0].remedy


def test_custom_compiles_train() -> None:
    check_operation("custom", "train")
    assert load_adapter("custom").train(facts(1, 0)) == custom.train(facts(1, 0))


def test_every_adapter_is_found_and_compiles_known_operations() -> None:
    assert "custom" in adapter_names()
    for name in adapter_names():
        assert set(load_adapter(name).OPERATIONS) <= set(OPERATIONS)


@pytest.mark.parametrize("name", ["", "torch", "../custom", "custom.train", "os"])
def test_no_other_adapter_falls_back_to_custom(name: str) -> None:
    with pytest.raises(UsageError, match="there is no adapter"):
        load_adapter(name)


@pytest.mark.contract("C6")
def test_several_nodes_and_a_script_that_joins_none_are_told() -> None:
    notice = multi_node_notice("python3 train.py\n", 4)
    assert notice is not None and "runs once on each of 4 nodes" in notice
    for name in ("MACHINE_RANK", "MACHINE_COUNT", "MAIN_PROCESS_IP", "MAIN_PROCESS_PORT"):
        assert f"TUNEPLANE_{name}" in notice
        assert multi_node_notice(f"run --x=${{TUNEPLANE_{name}}}\n", 4) is None
    assert multi_node_notice("python3 train.py\n", 1) is None


def test_the_scaffold_unedited_joins_no_nodes_for_its_lines_are_comments() -> None:
    assert multi_node_notice(SCAFFOLD.read_text(), 2) is not None


@pytest.mark.parametrize(
    ("script", "joins"),
    [
        ("# $TUNEPLANE_MACHINE_RANK\nrun", False),
        ("run # $TUNEPLANE_MACHINE_RANK", False),
        ("run;# $TUNEPLANE_MACHINE_RANK", False),
        ("# don't\nrun # $TUNEPLANE_MACHINE_RANK", False),
        ("run $TUNEPLANE_MACHINE_RANKS", False),
        ("run $MY_TUNEPLANE_MACHINE_RANK", False),
        ("run '# '\"$TUNEPLANE_MACHINE_RANK\"", True),
        ('run "a # $TUNEPLANE_MACHINE_RANK"', True),
        ('run "a \\" # $TUNEPLANE_MACHINE_RANK"', True),
        ("run \\# $TUNEPLANE_MACHINE_RANK", True),
        ("run ${#x} $TUNEPLANE_MACHINE_RANK", True),
        ("run a#b $TUNEPLANE_MACHINE_RANK", True),
        ("run $# $TUNEPLANE_MACHINE_RANK", True),
        ("run 'it\\' # $TUNEPLANE_MACHINE_RANK", False),
        ("run \\\n  --rank=$TUNEPLANE_MACHINE_RANK", True),
        ("", False),
    ],
)
def test_a_variable_counts_where_the_shell_would_read_it(script: str, joins: bool) -> None:
    assert (multi_node_notice(script, 2) is None) is joins


def test_adapters_travel_alone_in_a_zip_with_the_standard_library(tmp_path: Path) -> None:
    """As the node agent has them: no site-packages, from the kernel's archive."""
    package = Path(tuneplane.__file__).parent
    archive = tmp_path / "kernel.pyz"
    with zipfile.ZipFile(archive, "w") as kernel:
        kernel.write(package / "__init__.py", "tuneplane/__init__.py")
        kernel.write(package / "recipes/__init__.py", "tuneplane/recipes/__init__.py")
        for folder in ("kernel", "recipes/adapters", "hf_export"):
            for file in (package / folder).glob("*.py"):
                kernel.write(file, f"tuneplane/{folder}/{file.name}")
    code = (
        f"import sys; sys.path.insert(0, {str(archive)!r});"
        "from tuneplane.recipes.adapters import adapter_names, load_adapter;"
        "print(*(o for n in adapter_names() for o in load_adapter(n).OPERATIONS))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    expected = [operation for name in adapter_names() for operation in load_adapter(name).OPERATIONS]
    assert (done.stdout.split(), done.stderr) == (expected, "")
