"""`tp doctor` on this machine: what is missing is told with the command that mends it, and fails where it must."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from warm_tp import run_tp

from tuneplane.discover.said import Said
from tuneplane.discover.slurm import read_site
from tuneplane.doctor.check import FAIL, OK, WARN, Check
from tuneplane.doctor.cluster import look_at_interpreter, look_at_kill_wait, look_at_runtime, look_at_storage
from tuneplane.doctor.limits import ASSOCIATION, QOS, look_at_limits, read_limits
from tuneplane.doctor.node import judge_node, node_script, parse_report
from tuneplane.kernel.errors import Fault, OperationError
from tuneplane.site import Cluster, Config, ContainerRuntime, Slurm

pytestmark = pytest.mark.timeout(120)

SLURM = Cluster(
    name="h200",
    scheduler="slurm",
    device="gpu",
    gpus_per_node=8,
    cpus_per_node=64,
    storage_root="/tmp/x",
    python="/usr/bin/python3",
    slurm=Slurm(partition="gpu", gpu_type="h200", modules=["cuda/13"]),
    container=ContainerRuntime("apptainer", "apptainer"),
)


class User:
    """A user with a home of their own, who says `tp doctor`."""

    def __init__(self, folder: Path) -> None:
        self.home, self.programs = folder / "home", folder / "bin"
        for made in (self.home, self.programs, folder / "site"):
            made.mkdir()
        (self.home / ".gitconfig").write_text("[user]\nname = You\nemail = you@example.org\n")
        self.environ = {
            "HOME": str(self.home),
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "TUNEPLANE_CONFIG_DIR": str(folder / "site"),
            "LANG": "C.UTF-8",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }

    def tp(self, *words: str, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        return run_tp(words, cwd=cwd or self.home, env={**self.environ, **more}, timeout=100)

    def doctor(self, *words: str, code: int = 0, cwd: Path | None = None, **more: str) -> dict[str, Check]:
        done = self.tp("doctor", *words, "--json", cwd=cwd, **more)
        assert done.returncode == code, done.stdout + done.stderr
        return {value["name"]: Check(**value) for value in json.loads(done.stdout)}

    def fake(self, name: str, script: str) -> None:
        path = self.programs / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


def test_a_machine_that_has_all_is_well(user: User) -> None:
    done = user.tp("doctor", "--profile", "local")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].endswith("0 failed, 0 warnings")
    assert "→" not in done.stdout


def test_what_fails_is_told_with_its_mending_and_exit_1(user: User) -> None:
    user.tp("doctor")
    state = user.home / ".local" / "state" / "tuneplane"
    (state / "key").write_bytes(b"x" * 32)
    (state / "key").chmod(0o644)
    done = user.tp("doctor")
    assert done.returncode == 1
    assert "fail  key" in done.stdout
    assert "is open to others (mode 0644)" in done.stdout
    assert f"→ rm {state / 'key'}: the next submit makes another" in done.stdout


def test_a_damaged_key_and_an_open_folder_are_told(user: User) -> None:
    user.tp("doctor")
    state = user.home / ".local" / "state" / "tuneplane"
    (state / "key").write_bytes(b"short")
    (state / "key").chmod(0o600)
    state.chmod(0o755)
    checks = user.doctor(code=1)
    assert "is damaged" in checks["key"].said
    assert checks["state folder"].remedy == f"chmod 700 {state}"


def test_without_git_nothing_can_be_submitted_and_doctor_says_so(user: User) -> None:
    checks = user.doctor(code=1, PATH=str(user.programs))
    assert checks["git"].level == FAIL
    assert "install git" in checks["git"].remedy


def test_an_old_git_and_a_missing_identity_are_warnings(user: User) -> None:
    (user.home / ".gitconfig").unlink()
    user.fake("git", 'case "$*" in --version) echo "git version 2.11.0";; *) exit 1;; esac')
    checks = user.doctor()
    assert checks["git"].level == WARN
    assert 'git config --global user.name "Your Name"' in checks["git identity"].remedy


def test_an_unknown_profile_is_told_with_those_that_are_known(user: User) -> None:
    checks = user.doctor("--profile", "h200", code=1)
    assert "there is no cluster profile 'h200'" in checks["profile h200"].said
    assert "local" in checks["profile h200"].remedy


def test_a_profile_with_faults_is_told_with_all_of_them(user: User) -> None:
    cluster = Path(user.environ["TUNEPLANE_CONFIG_DIR"]) / "cluster"
    cluster.mkdir()
    (cluster / "bad.yaml").write_text("scheduler: slurm\ndevice: tpu\ngpus_per_node: many\n")
    done = user.tp("doctor", "--profile", "bad")
    assert done.returncode == 1
    assert done.stdout.count("fail  profile bad") >= 2
    assert "bad.yaml:2" in done.stdout


def test_deep_needs_a_profile(user: User) -> None:
    done = user.tp("doctor", "--deep")
    assert done.returncode == 2
    assert "--profile NAME --deep" in done.stderr


def test_deep_on_this_machine_has_no_node_to_look_at(user: User) -> None:
    checks = user.doctor("--profile", "local", "--deep")
    assert "there are no other nodes" in checks["node job"].said


@pytest.mark.contract("J")
def test_an_image_of_a_registry_that_is_not_allowed_is_told_without_a_job(user: User) -> None:
    image = "evil.example/x:v1"
    checks = user.doctor("--image", image, code=1, TUNEPLANE_ALLOWED_IMAGE_REGISTRIES="registry.example.com")
    assert "image registry evil.example is not in TUNEPLANE_ALLOWED_IMAGE_REGISTRIES" in checks["image"].said
    assert "registry.example.com" in checks["image"].remedy


def test_an_environment_that_leaves_no_registry_is_a_warning(user: User) -> None:
    site = Path(user.environ["TUNEPLANE_CONFIG_DIR"]) / "site"
    site.mkdir()
    (site / "default.yaml").write_text("allowed_registries: [registry.example.com]\n")
    checks = user.doctor(TUNEPLANE_ALLOWED_IMAGE_REGISTRIES="other.example.com")
    assert checks["image registries"].level == WARN
    assert checks["image registries"].remedy == "unset TUNEPLANE_ALLOWED_IMAGE_REGISTRIES"


@pytest.mark.slow
@pytest.mark.contract("J")
def test_in_a_lab_scaffolds_and_refused_operations_are_told_without_a_job(user: User) -> None:
    assert user.tp("init", "lab").returncode == 0
    lab = user.home / "lab"
    assert user.tp("new", "first", "--method", "custom/custom", cwd=lab).returncode == 0
    checks = user.doctor(cwd=lab)
    assert checks["lab"].said.endswith("1 experiment")
    assert "`no training command yet`" in checks["experiment first"].said
    assert checks["experiment first"].level == WARN
    for operation in ("export", "eval"):
        assert f"{operation} is refused" in checks["operations"].said
    assert "custom adapter" in checks["operations"].said
    script = lab / "experiments" / "first" / "train.sh"
    script.write_text(script.read_text().replace("exit 1\n", "exec python3 train.py\n"))
    assert "experiment first" not in user.doctor(cwd=lab)


@pytest.mark.slow
def test_a_lab_with_changes_that_a_submit_would_refuse_is_told_with_the_files(user: User) -> None:
    user.tp("init", "lab")
    lab = user.home / "lab"
    user.tp("new", "first", "--method", "custom/custom", cwd=lab)
    assert "the lab has no commit yet" in user.doctor(cwd=lab)["lab commit"].said
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for argv in (["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *argv], cwd=lab, check=True, timeout=20)
    assert user.doctor(cwd=lab)["lab commit"].level == OK
    (lab / "notes.txt").write_text("new")
    commit = user.doctor(cwd=lab)["lab commit"]
    assert commit.level == WARN
    assert "notes.txt" in commit.said
    assert commit.remedy.startswith("git add -A && git commit")


def test_a_broken_lock_in_the_lab_fails(user: User) -> None:
    user.tp("init", "lab")
    lab = user.home / "lab"
    user.tp("new", "first", "--method", "custom/custom", cwd=lab)
    (lab / "experiments" / "first" / "recipe.lock.json").write_text("{")
    checks = user.doctor(cwd=lab, code=1)
    assert checks["experiment first"].level in (FAIL, WARN)


def test_programs_of_slurm_that_are_half_there_fail(user: User) -> None:
    user.fake("sbatch", "exit 1")
    cluster = Path(user.environ["TUNEPLANE_CONFIG_DIR"]) / "cluster"
    cluster.mkdir()
    (cluster / "h200.yaml").write_text(
        "defaults:\n  - /container@container: none\n  - _self_\nscheduler: slurm\ndevice: gpu\ngpus_per_node: 8\n"
    )
    checks = user.doctor("--profile", "h200", code=1)
    assert "squeue, scontrol, srun, scancel, sinfo" in checks["Slurm programs"].said


def test_a_controller_that_does_not_answer_fails_and_no_job_is_tried(user: User) -> None:
    for name in ("sbatch", "squeue", "srun", "scancel", "sinfo"):
        user.fake(name, "echo called >>$HOME/calls; exit 1")
    user.fake("scontrol", 'echo "Slurmctld(primary) at ctl is DOWN"')
    cluster = Path(user.environ["TUNEPLANE_CONFIG_DIR"]) / "cluster"
    cluster.mkdir()
    (cluster / "h200.yaml").write_text(
        "defaults:\n  - /container@container: none\n  - _self_\nscheduler: slurm\ndevice: gpu\ngpus_per_node: 8\n"
    )
    checks = user.doctor("--profile", "h200", "--deep", code=1)
    assert "is DOWN" in checks["Slurm controller"].said
    assert "not tried, since Slurm controller failed" in checks["node job"].said
    assert not (user.home / "calls").exists()


def test_a_storage_root_of_somebody_else_or_without_right_is_told(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    found = look_at_storage(dataclasses.replace(SLURM, storage_root=str(open_to_all / "runs")))
    assert found[0].level == FAIL
    assert "everybody may write there" in found[0].said


def test_storage_outside_what_the_site_shares_fails(tmp_path: Path) -> None:
    cluster = dataclasses.replace(SLURM, storage_root=str(tmp_path / "a"), shared=[str(tmp_path / "b")])
    found = {check.name: check for check in look_at_storage(cluster)}
    assert found["storage shared"].level == FAIL
    cluster = dataclasses.replace(cluster, shared=[str(tmp_path)])
    assert all(check.level == OK for check in look_at_storage(cluster))


def test_an_interpreter_that_is_too_old_fails_and_one_that_is_not_here_is_a_warning(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\necho 3 6 8\n")
    old.chmod(0o755)
    found = look_at_interpreter(dataclasses.replace(SLURM, python=str(old)))
    assert (found[0].level, "older than 3.9" in found[0].said) == (FAIL, True)
    found = look_at_interpreter(dataclasses.replace(SLURM, python="/nowhere/python3"))
    assert found[0].level == WARN
    assert found[0].remedy == "tp doctor --profile h200 --deep"


def test_a_runtime_that_is_not_here_is_a_warning_on_a_cluster_and_fails_on_this_machine(
    tmp_path: Path,
) -> None:
    environ = {"PATH": str(tmp_path)}
    cluster = dataclasses.replace(SLURM, path=str(tmp_path))
    assert look_at_runtime(cluster, environ)[0].level == WARN
    assert look_at_runtime(dataclasses.replace(cluster, scheduler="local"), environ)[0].level == FAIL


REPORT = """\
host=n1
canary=abcd
python=3 11 2
resolves=10.0.0.11 n1
scratch=yes
scratch_kb=/dev/sda 100000000 1 90000000 1% /tmp
shm_kb=tmpfs 66000000 0 66000000 0% /dev/shm
memlock=unlimited
visible=0
devices=8
driver=570.86.15
runtime=apptainer version 1.4.5
image=yes
time=1795991833.5
"""


def judged(clock_s: float | None = 0.2, device: str = "gpu", **more: str) -> dict[str, Check]:
    said = {**parse_report(REPORT), **more}
    config = Config(cluster=dataclasses.replace(SLURM, device=device))
    return {check.name: check for check in judge_node(said, config, clock_s)}


def test_a_node_that_has_all_is_well() -> None:
    found = judged()
    assert {check.level for check in found.values()} == {OK}
    assert "driver 570.86.15" in found["GPUs on node"].said


@pytest.mark.parametrize(
    ("name", "level", "more"),
    [
        ("interpreter on node", FAIL, {"python": "/bin/sh: 1: /usr/bin/python3: not found"}),
        ("interpreter on node", FAIL, {"python": "3 8 10"}),
        ("interpreter on node", FAIL, {"python": ""}),
        ("scratch on node", FAIL, {"scratch": "mkdir: cannot create directory: Permission denied"}),
        ("scratch on node", WARN, {"scratch_kb": "/dev/sda 100 1 90 1% /tmp"}),
        ("runtime on node", FAIL, {"runtime": "bash: apptainer: command not found"}),
        ("image on node", FAIL, {"image": "FATAL: could not open image"}),
        ("modules on node", FAIL, {"modules": "cuda/13"}),
        ("names on node", WARN, {"resolves": ""}),
        ("/dev/shm on node", WARN, {"shm_kb": "shm 65536 0 65536 0% /dev/shm"}),
        ("/dev/shm on node", WARN, {"shm_kb": ""}),
        ("GPUs on node", FAIL, {"visible": "unset"}),
        ("GPUs on node", FAIL, {"visible": "NoDevFiles"}),
        ("GPUs on node", WARN, {"driver": "bash: nvidia-smi: command not found"}),
    ],
)
def test_what_a_node_lacks_is_told(name: str, level: str, more: dict[str, str]) -> None:
    found = judged(**more)
    assert found[name].level == level
    assert found[name].remedy
    assert [check.name for check in found.values() if check.level != OK] == [name]


@pytest.mark.parametrize(
    ("ahead_s", "level"), [(0.5, OK), (-3.0, OK), (20.0, WARN), (-20.0, WARN), (600.0, FAIL)]
)
def test_clocks_are_compared(ahead_s: float, level: str) -> None:
    assert judged(ahead_s)["clocks"].level == level
    assert judged(None)["clocks"].level == WARN


def test_a_node_of_cpus_needs_no_gpu() -> None:
    assert "GPUs on node" not in judged(device="cpu", visible="unset")


NAMES = "a b $HOME 'q' \"d\" %j 实验"


def test_the_node_s_script_is_bash_with_the_profile_s_own_directives(tmp_path: Path) -> None:
    folder = tmp_path / NAMES
    folder.mkdir()
    script = node_script(Config(cluster=SLURM), folder, "/images/x y.sif")
    lines = script.splitlines()
    assert "#SBATCH --gpus-per-node=h200:1" in lines
    assert "#SBATCH --partition=gpu" in lines
    assert lines.count("#SBATCH --time=1") == 1
    assert sum(line.startswith("#SBATCH --output") for line in lines) == 1
    assert "%%j" in script
    done = subprocess.run(
        ["bash", "-n"], input=script, text=True, capture_output=True, timeout=20, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_node_s_script_writes_its_report_where_the_folder_has_any_name(tmp_path: Path) -> None:
    folder = tmp_path / NAMES
    folder.mkdir()
    (folder / "canary").write_text("here")
    cluster: Any = dataclasses.replace(
        SLURM, slurm=Slurm(), scratch=str(tmp_path), container=ContainerRuntime()
    )
    script = node_script(Config(cluster=cluster), folder, None)
    before = time.time()
    subprocess.run(["bash", "-c", script], check=True, timeout=60, capture_output=True)
    said = parse_report((folder / "report").read_text())
    assert said["canary"] == "here"
    assert said["scratch"] == "yes"
    assert before - 1 <= float(said["time"]) <= time.time() + 1
    assert len(said["python"].split()) == 3


@pytest.mark.parametrize(
    ("shell", "level", "said"),
    [
        ("", FAIL, "the login profile there sets up no modules"),
        ('module() { [ "$2" = gcc/13 ]; }\n', FAIL, "cuda/13 cannot be loaded"),
        ("module() { echo noise; }\n", OK, "gcc/13, cuda/13 can be loaded"),
    ],
)
def test_modules_are_loaded_on_the_node_as_a_run_loads_them(
    tmp_path: Path, shell: str, level: str, said: str
) -> None:
    (tmp_path / "canary").write_text("here")
    environ = {"PATH": "/usr/bin:/bin"}
    if shell:
        (tmp_path / "init").mkdir()
        (tmp_path / "init" / "bash").write_text(shell)
        environ["MODULESHOME"] = str(tmp_path)
    cluster: Any = dataclasses.replace(
        SLURM, slurm=Slurm(modules=["gcc/13", "cuda/13"]), scratch=str(tmp_path), container=ContainerRuntime()
    )
    config = Config(cluster=cluster)
    script = node_script(config, tmp_path, None)
    subprocess.run(["bash", "-c", script], check=True, timeout=60, capture_output=True, env=environ)
    found = {
        check.name: check
        for check in judge_node(parse_report((tmp_path / "report").read_text()), config, 0.0)
    }
    assert (found["modules on node"].level, found["modules on node"].said) == (level, said)


@pytest.mark.parametrize(
    ("kill_wait", "grace_s", "remedy"),
    [("30 sec", 20.0, None), ("10 sec", 20.0, "stop_grace_s: 6"), ("10 sec", 6.0, None), ("", 20.0, None)],
)
def test_a_slurm_that_kills_before_the_grace_is_over_is_told(
    kill_wait: str, grace_s: float, remedy: str | None
) -> None:
    config = f"KillWait                = {kill_wait}\n" if kill_wait else ""
    site = read_site(Said(config=config))
    checks = look_at_kill_wait(site, dataclasses.replace(SLURM, stop_grace_s=grace_s))
    assert [check.level for check in checks] == ([WARN] if remedy else [])
    assert all(remedy in check.remedy for check in checks if remedy)


def test_limits_are_told_by_what_has_them() -> None:
    asked: list[list[str]] = []

    def run(argv: list[str]) -> str:
        asked.append(argv)
        return "research|30|||gres/gpu=8|gres/gpu=64\nidle|||||\nresearch|30|||gres/gpu=8|gres/gpu=64\n"

    assert read_limits(["assoc", "user=ada"], "account", "Account", ASSOCIATION, run) == [
        "account research: 30 jobs at once, gres/gpu=8 a job, gres/gpu=64 for all its jobs together"
    ]
    assert asked[0][-3:] == [
        "assoc",
        "user=ada",
        "format=Account,MaxJobs,MaxSubmitJobs,MaxWall,MaxTRES,GrpTRES",
    ]


def test_limits_that_slurm_does_not_tell_are_none() -> None:
    def run(argv: list[str]) -> str:
        raise OperationError(Fault("sacctmgr is not on this machine's PATH"))

    assert read_limits(["qos"], "QOS", "Name", QOS, run) == []
    site = read_site(Said(partitions="PartitionName=gpu Default=YES MaxTime=2-00:00:00 MaxNodes=4\n"))
    assert look_at_limits(site, "ada", None)[0].said == "partition gpu: 2-00:00:00 a job, 4 nodes a job"
    assert look_at_limits(site, "ada", "other")[0].said == "none that Slurm tells"
