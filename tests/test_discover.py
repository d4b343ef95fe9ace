"""What `tp cluster discover` makes of a site: recorded ones of two Slurm versions, made-up ones with traps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tuneplane.discover.choice import choose, usable
from tuneplane.discover.here import Here, is_shared, look, mount_of, python_version, read_mounts
from tuneplane.discover.profile import profile_path, profile_text, write_profile
from tuneplane.discover.said import Said, ask, commands
from tuneplane.discover.slurm import parse_config, parse_gres, parse_pairs, read_site
from tuneplane.kernel.errors import Fault, OperationError, UsageError

RECORDED = Path(__file__).parent / "discover"
HERE = Here(
    home="/home/ada", storage="~/tuneplane", python="/usr/bin/python3", python_why="3.11.2 on this machine"
)

GPU_NODE = (
    "NodeName={name} Arch=x86_64 CPUEfctv=124 CPUTot=128 AvailableFeatures=ib,a100 Gres=gpu:a100:4(S:0-3) "
    "OS=Linux 5.14.0 #1 SMP Fri Nov 1 RealMemory=1031000 MemSpecLimit=4000 State={state} Partitions={partitions} "
    "Comment=rack 7 = left"
)
CPU_NODE = (
    "NodeName={name} Arch=x86_64 CPUTot=64 AvailableFeatures=(null) Gres=(null) RealMemory=256000 State=IDLE "
    "Partitions=cpu,debug"
)
CONFIG = """\
Configuration data as of 2026-11-29T10:00:00
AccountingStorageEnforce = associations,limits,qos,safe
ClusterName             = big
DefMemPerCPU            = 2000
GresTypes               = gpu,shard
MpiDefault              = pmix
PreemptType             = preempt/partition_prio
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE_MEMORY
SLURM_VERSION           = 24.05.3
"""
PARTITIONS = """\
PartitionName=cpu AllowAccounts=ALL AllowQos=ALL Default=YES DefaultTime=01:00:00 MaxNodes=UNLIMITED \
MaxTime=2-00:00:00 OverSubscribe=NO PreemptMode=OFF PriorityTier=1 RootOnly=NO State=UP
PartitionName=debug AllowAccounts=ALL AllowQos=ALL Default=NO MaxNodes=1 MaxTime=00:30:00 State=UP
PartitionName=gpu AllowAccounts=ALL AllowQos=gpu-normal,gpu-long Default=NO DefaultTime=NONE MaxNodes=8 \
MaxTime=3-00:00:00 OverSubscribe=EXCLUSIVE PreemptMode=REQUEUE PriorityTier=5 RootOnly=NO State=UP
PartitionName=gpu-admin AllowAccounts=ALL AllowQos=ALL Default=NO RootOnly=YES State=UP
PartitionName=gpu-owners AllowAccounts=physics AllowQos=ALL Default=NO PriorityTier=9 State=UP
"""
ASSOCIATIONS = """\
other|wrong||x|x
big|bio||normal,gpu-normal|normal
big|chem||normal|normal
"""


def site_texts(**more: Any) -> Said:
    nodes = [
        GPU_NODE.format(
            name=f"g{n:02}", state="IDLE" if n else "DOWN*", partitions="gpu,gpu-admin,gpu-owners"
        )
        for n in range(12)
    ]
    nodes += [CPU_NODE.format(name=f"c{n}") for n in range(40)]
    texts: dict[str, Any] = {
        "version": "slurm 24.05.3",
        "config": CONFIG,
        "partitions": PARTITIONS,
        "nodes": "\n".join(nodes),
        "associations": ASSOCIATIONS,
        "user": "ada|bio\n",
    }
    return Said(**{**texts, **more})


def recorded(name: str) -> Said:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in (RECORDED / name).glob("*.txt")}
    return Said(**texts)


def values(said: Said, partition: str | None = None, here: Here = HERE) -> dict[str, Any]:
    return {value.key: value.value for value in choose(read_site(said), here, partition).values}


def text_of(said: Said, partition: str | None = None, here: Here = HERE) -> str:
    site = read_site(said)
    return profile_text("mine", choose(site, here, partition), site, here, "2026-11-29")


def test_a_recorded_site_of_slurm_22_05_is_described() -> None:
    found = values(recorded("slurm-22.05"))
    assert (found["gpus_per_node"], found["cpus_per_node"], found["max_nodes"]) == (8, 64, 4)
    assert (found["slurm.partition"], found["slurm.gpu_type"]) == ("gpu", "h200")
    assert found["slurm.gpu_request"] == "gpus-per-node"
    assert "slurm.account" not in found, "Slurm takes the user's default account by itself"


def test_a_recorded_site_of_slurm_26_05_without_accounting_is_described() -> None:
    found = values(recorded("slurm-26.05"))
    assert (found["gpus_per_node"], found["cpus_per_node"], found["max_nodes"]) == (4, 32, 2)
    assert found["memory_per_node"] == "498000M", "what the site keeps for itself is no job's"
    assert (found["slurm.partition"], found["slurm.gpu_type"]) == ("batch", "b200")


def test_a_recorded_site_of_slurm_26_05_with_accounting_is_described() -> None:
    found = values(recorded("slurm-26.05-accounting"))
    assert (found["slurm.partition"], found["slurm.gpu_type"]) == ("gpu", "h200")
    assert (found["gpus_per_node"], found["cpus_per_node"], found["memory_per_node"]) == (4, 32, "500000M")
    assert found["request_memory"] is True, (
        "its default would give a whole node's job a fifteenth of the memory"
    )
    site = read_site(recorded("slurm-26.05-accounting"))
    assert site.version == "26.05.5"
    assert [(a.account, a.qos) for a in site.associations] == [("research", ("high", "normal"))]
    assert "slurm.account" not in found, "Slurm takes the user's default account by itself"


def test_of_many_partitions_one_with_gpus_that_the_user_may_use_is_chosen() -> None:
    site = read_site(site_texts())
    assert [p.name for p in site.partitions if usable(site, p)] == ["cpu", "debug", "gpu"]
    found = values(site_texts())
    assert found["slurm.partition"] == "gpu"
    assert found["max_nodes"] == 8, "the partition gives a job fewer nodes than it has"
    assert (found["cpus_per_node"], found["memory_per_node"]) == (124, "1027000M")
    assert found["slurm.exclusive"] is True
    assert found["slurm.srun_options"] == ["--mpi=none"]
    assert found["slurm.qos"] == "gpu-normal", "the partition does not take the user's default QOS"
    assert found["request_memory"] is True, "Slurm's default would give a quarter of the node"


def test_a_short_kill_wait_shortens_the_grace_of_trainers() -> None:
    def grace(config: str) -> list[object]:
        return [
            v.value for v in choose(read_site(site_texts(config=config)), HERE).values if "grace" in v.key
        ]

    assert grace(CONFIG + "KillWait                = 30 sec\n") == []
    assert grace(CONFIG + "KillWait                = 12 sec\n") == [8]
    assert grace(CONFIG + "KillWait                = 0 sec\n") == [1]


def test_a_partition_of_cpus_is_described_when_asked_for() -> None:
    found = values(site_texts(), "cpu")
    assert (found["device"], found["gpus_per_node"], found["slurm.gpu_request"]) == ("cpu", 64, "none")
    assert "slurm.qos" not in found


def test_a_partition_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="there is no partition h100") as error:
        values(site_texts(), "h100")
    assert "gpu-owners" in str(error.value)


def test_without_any_partition_the_user_is_told_so() -> None:
    for said in (Said(), site_texts(partitions="", nodes="", sinfo="")):
        with pytest.raises(UsageError, match="Slurm shows no partition"):
            values(said)


def test_where_scontrol_shows_no_nodes_sinfo_is_asked() -> None:
    rows = [f"g{n}|gpu|128|1031000|gpu:a100:4|ib|idle" for n in range(3)] + [
        "g9|gpu|128|1031000|gpu:a100:4|ib|down*"
    ]
    found = values(site_texts(nodes="", sinfo="\n".join(rows)))
    assert (found["gpus_per_node"], found["max_nodes"], found["slurm.gpu_type"]) == (4, 4, "a100")
    alone = Said(version="slurm 20.11.9", sinfo="c1|batch*|16|64000|(null)|(null)|idle\n")
    assert values(alone)["slurm.partition"] == "batch"


def test_a_user_without_a_default_account_gets_one_that_the_partition_takes() -> None:
    found = values(site_texts(user=""))
    assert found["slurm.account"] == "bio"
    partitions = PARTITIONS.replace(
        "PartitionName=gpu AllowAccounts=ALL", "PartitionName=gpu AllowAccounts=chem,geo"
    )
    assert values(site_texts(partitions=partitions))["slurm.account"] == "chem"


@pytest.mark.parametrize(
    ("select", "asked"),
    [("select/cons_tres", "gpus-per-node"), ("select/cons_res", "gres"), ("select/linear", "gres")],
)
def test_how_gpus_are_asked_for_is_slurm_s_own_setting(select: str, asked: str) -> None:
    said = site_texts(config=CONFIG.replace("select/cons_tres", select))
    assert values(said)["slurm.gpu_request"] == asked
    if select == "select/linear":
        assert values(said)["request_cpus"] is False


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        ("gpu:h200:8(S:0-1)", (8, "h200")),
        ("gpu:8", (8, "")),
        ("gpu", (1, "")),
        ("gpu:a100:4,shard:a100:16", (4, "a100")),
        ("craynetwork:4,gpu:mi250x:8(S:0-7)", (8, "mi250x")),
        ("gpu:nvidia_h100_80gb_hbm3:4", (4, "nvidia_h100_80gb_hbm3")),
        ("gpu:1g.10gb:7", (7, "1g.10gb")),
        ("gpu:a100:2,gpu:v100:6", (6, "v100")),
        ("(null)", (0, "")),
        ("", (0, "")),
        ("nic:2", (0, "")),
    ],
)
def test_gpus_are_read_from_every_form_of_gres(gres: str, found: tuple[int, str]) -> None:
    assert parse_gres(gres) == found


def test_values_with_blanks_and_equal_signs_are_read_whole() -> None:
    fields = parse_pairs(GPU_NODE.format(name="g1", state="IDLE+DRAIN", partitions="a,b"))
    assert fields["OS"] == "Linux 5.14.0 #1 SMP Fri Nov 1"
    assert fields["State"] == "IDLE+DRAIN"
    assert fields["Partitions"] == "a,b"
    assert parse_config("A = b = c\nnothing\n")["A"] == "b = c"


def test_nodes_of_several_kinds_are_told_with_the_way_to_get_one() -> None:
    more = [GPU_NODE.format(name=f"h{n}", state="IDLE", partitions="gpu").replace("ib,a100", "ib,fat")
            .replace("RealMemory=1031000", "RealMemory=2063000") for n in range(2)]  # fmt: skip
    said = site_texts(nodes=site_texts().nodes + "\n" + "\n".join(more))
    text = text_of(said)
    assert "# Note: the partition has other nodes too: 2 of 4 a100, 124 CPUs, 2059000 MB (h0…)" in text
    assert "# Note: to get only this kind of node: constraint: a100" in text
    assert yaml.safe_load(text)["max_nodes"] == 8


def test_every_value_says_where_it_came_from_and_guesses_are_marked() -> None:
    for said in (
        recorded("slurm-22.05"),
        recorded("slurm-26.05"),
        recorded("slurm-26.05-accounting"),
        site_texts(),
    ):
        text = text_of(said)
        for line in text.splitlines():
            if re.match(r"^\s*[a-z_]+: \S", line) and not line.startswith("description"):
                assert " # " in line, line
        guessed = {v.key.rpartition(".")[2] for v in choose(read_site(said), HERE).values if v.guess}
        marked = {line.split(":")[0].strip() for line in text.splitlines() if "# GUESS: " in line}
        assert guessed <= marked


def test_the_file_is_yaml_whatever_slurm_calls_its_things() -> None:
    strange = site_texts(
        partitions="PartitionName=on AllowAccounts=ALL Default=YES State=UP\n",
        nodes=GPU_NODE.format(name="n'1", state="IDLE", partitions="on").replace("gpu:a100:4", "gpu:1e3:4"),
    )
    found = yaml.safe_load(text_of(strange))
    assert found["slurm"]["partition"] == "on"
    assert found["slurm"]["gpu_type"] == "1e3"


def test_an_old_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cluster" / "mine.yaml"
    write_profile(path, "first\n")
    with pytest.raises(UsageError, match="is there already, and is never overwritten"):
        write_profile(path, "second\n")
    assert path.read_text() == "first\n"


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OperationError, match="not written"):
        write_profile(tmp_path / "file" / "cluster" / "mine.yaml", "x")


@pytest.mark.parametrize("name", ["../evil", "a/b", "", "x.yaml", "-x", "a\nb"])
def test_a_name_that_no_profile_can_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no name of a profile"):
        profile_path(name, {"HOME": str(tmp_path)})


def test_commands_that_are_not_there_or_refuse_are_noted_and_passed_over() -> None:
    asked: list[str] = []

    def run(argv: list[str]) -> str:
        asked.append(argv[0])
        if argv[0] == "sacctmgr":
            raise OperationError(Fault("sacctmgr is not on this machine's PATH"))
        return "slurm 23.11.1\n" if argv[1] == "--version" else ""

    said = ask("ada", run)
    assert said.version == "slurm 23.11.1\n"
    assert list(said.refused.values()) == ["sacctmgr is not on this machine's PATH"]
    assert asked.count("sinfo") == 2, "scontrol showed no nodes"
    assert all(argv[0] in ("sinfo", "scontrol", "sacctmgr") for argv in commands("ada").values())


def test_what_this_machine_shows_is_looked_at() -> None:
    here = look(dict(os.environ), sys.executable)
    assert here.python
    assert here.runtime
    assert python_version(sys.executable) == sys.version_info[:3]
    assert python_version("/nowhere/python3") is None


MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / /home rw,relatime - nfs4 server:/home rw
31 22 0:41 / /lustre/scratch\\040fast rw - lustre mds@tcp:/x rw
32 22 0:42 / /tmp rw - tmpfs tmpfs rw
broken line
"""


def test_the_kind_of_a_file_system_is_that_of_the_deepest_mount(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    mounts = read_mounts(tmp_path / "mountinfo")
    assert mount_of("/home/ada/x", mounts) == ("/home", "nfs4")
    assert mount_of("/lustre/scratch fast/ada", mounts) == ("/lustre/scratch fast", "lustre")
    assert is_shared("/home/ada", mounts)
    assert not is_shared("/tmp/x", mounts)
    assert not is_shared("/usr", mounts)
    assert read_mounts(tmp_path / "nothing") == {}


def tp(*words: str, home: Path, path: str = "/usr/bin:/bin") -> subprocess.CompletedProcess[str]:
    environ = {"HOME": str(home), "PATH": path, "TUNEPLANE_CONFIG_DIR": str(home), "LANG": "C.UTF-8"}
    return subprocess.run(
        [sys.executable, "-m", "tuneplane.cli.main", *words],
        env={**environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_on_a_machine_without_slurm_discover_says_so_and_writes_nothing(tmp_path: Path) -> None:
    done = tp("cluster", "discover", "mine", home=tmp_path, path=str(tmp_path))
    assert done.returncode == 2
    assert "scontrol is not on this machine's PATH" in done.stderr
    assert "Slurm shows no partition" in done.stderr
    assert not list(tmp_path.rglob("*.yaml"))


@pytest.mark.slow
def test_a_profile_without_slurm_has_nothing_to_check(tmp_path: Path) -> None:
    done = tp("cluster", "check", "local", home=tmp_path)
    assert done.returncode == 2
    assert "there is nothing to ask" in done.stderr
