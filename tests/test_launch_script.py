"""The batch script as bash runs it, for its own logic: strict programs stand for srun, scontrol and the kernel.

The same script with the real ones runs in the tests of the testbed.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from launch_jobs import bare_slurm_job, changed, local_job, write_run
from testbed_client import WEIRD_NAME

from tuneplane.kernel.runfolder import RunFolder
from tuneplane.launch.script import local_script
from tuneplane.launch.slurm import SlurmLauncher
from tuneplane.spec import JobSpec

pytestmark = pytest.mark.timeout(60)

RUN_ID = "ring-20260114-093012-x3k9"
PYTHON = "/usr/bin/python3"

PROGRAM = '''#!/usr/bin/python3 -IS
"""{doc}"""
import json, os, signal, sys, time
from pathlib import Path
run = Path({run!r})
def note(name, **more):
    environ = dict(item.split("=", 1) for item in Path("/proc/self/environ").read_text().split("\\0") if item)
    text = json.dumps({{"argv": sys.argv[1:], "environ": environ, "cwd": os.getcwd(), "pid": os.getpid(), **more}})
    (run / f".{{name}}").write_text(text)
    (run / f".{{name}}").rename(run / f"{{name}}.seen")
def said(name):
    path = run / f"{{name}}.says"
    return path.read_text() if path.exists() else None
{body}
'''

SCONTROL = """
note("scontrol")
if said("scontrol"):
    sys.exit("scontrol: error: " + said("scontrol"))
assert sys.argv[1:3] == ["show", "hostnames"] and len(sys.argv) == 4, sys.argv
print({"n[1-4]": "n1\\nn2\\nn3\\nn4", "n1": "n1"}[sys.argv[3]])
"""

SRUN = """
options = sys.argv[1:]
task = options.index(PYTHON)
nodes = dict(o.lstrip("-").split("=", 1) for o in options[:task])
assert all(o.startswith("--") for o in options[:task]), options
note("srun", options=options[:task], nodes=nodes["nodes"])
code = os.spawnv(os.P_WAIT, options[task], options[task:])
sys.exit(128 - code if code < 0 else code)
""".replace("PYTHON", repr(PYTHON))

KERNEL = """
name = sys.argv[1]
note(name)
assert sys.argv[2] == str(run)
if name == "claim":
    print("loud", file=sys.stderr)
    time.sleep(float(said("claim-sleep") or 0))
    if said("claim"):
        sys.exit(int(said("claim")))
    (run / "attempts/0").mkdir()
    print("0 10.77.0.11 20123")
elif name == "node":
    while said("node") is None:
        time.sleep(0.01)
    sys.exit(int(said("node")))
elif name == "end":
    if said("end") == "fails":
        sys.exit(1)
    print(said("end") or sys.argv[4])
elif name == "local":
    sys.exit(int(said("local") or 0))
"""


@dataclass
class Started:
    """A script started as Slurm does: a copy in its spool, another working directory, the job's environment."""

    run: RunFolder
    spool: Path
    environ: dict[str, str]
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [str(self.spool)],
            cwd="/",
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def say(self, name: str, text: str) -> None:
        """What a program does from now on."""
        (self.run.path / f".{name}.says").write_text(text)
        (self.run.path / f".{name}.says").rename(self.run.path / f"{name}.says")

    def saw(self, name: str) -> dict[str, Any]:
        """What a program was started with; waits for it."""
        path = self.run.path / f"{name}.seen"
        deadline = time.monotonic() + 20
        while not path.exists():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, f"{name} was not started"
            time.sleep(0.005)
        seen: dict[str, Any] = json.loads(path.read_text())
        return seen

    def was_started(self, name: str) -> bool:
        return (self.run.path / f"{name}.seen").exists()

    def end(self) -> tuple[int, str]:
        """Exit code and all that it printed."""
        said, _ = self.process.communicate(timeout=20)
        return self.process.returncode, said


Start = Callable[..., Started]

SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURMD_NODENAME": "n1",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "HOME": "/home/alice",
    "USER": "alice",
    "LOGNAME": "alice",
}
BASHS_OWN = {"PWD", "OLDPWD", "SHLVL", "_"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the script of a JobSpec (by default a bare one on Slurm), with the programs on its PATH."""
    started: list[Started] = []

    def begin(
        job: JobSpec | None = None,
        environ: dict[str, str] | None = None,
        below: str = "",
        before: Callable[[RunFolder], None] | None = None,
        **says: str,
    ) -> Started:
        run = RunFolder(tmp_path / below / RUN_ID)
        programs = tmp_path / "slurm bin"
        run.path.mkdir(parents=True)
        programs.mkdir()
        for name, body in (("srun", SRUN), ("scontrol", SCONTROL)):
            (programs / name).write_text(PROGRAM.format(doc=name, run=str(run.path), body=body))
            (programs / name).chmod(0o755)
        job = changed(
            job or bare_slurm_job(),
            {
                "metadata.folder": str(run.path),
                "spec.node.python": PYTHON,
                "spec.node.path": f"{programs}:/usr/bin:/bin",
            },
        )
        script = SlurmLauncher(job).render() if job.spec.slurm else local_script(job)
        kernel = PROGRAM.format(doc="kernel", run=str(run.path), body=KERNEL).encode()
        write_run(job, script, kernel)
        spool = tmp_path / "spool"
        spool.mkdir()
        spool = spool / "slurm_script"
        spool.write_text(script)
        spool.chmod(0o700)
        for name, text in says.items():
            (run.path / f"{name.replace('_', '-')}.says").write_text(text)
        if before:
            before(run)
        started.append(Started(run, spool, SLURM if environ is None else environ))
        return started[-1]

    yield begin
    for one in started:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()


# The whole way


@pytest.mark.contract("C43")
def test_each_program_is_started_with_what_the_one_before_it_found(start: Start) -> None:
    job = start(
        changed(bare_slurm_job(srun_options=["--mpi=none"]), {"spec.resources.cpus_per_node": 12}), node="0"
    )
    code, said = job.end()
    assert (code, said) == (0, "loud\n")
    run = str(job.run.path)
    assert job.saw("scontrol")["argv"] == ["show", "hostnames", "n[1-4]"]
    assert job.saw("claim")["argv"] == ["claim", run, "n1", "n2", "n3", "n4"]
    assert job.saw("srun")["options"] == [
        "--kill-on-bad-exit=1",
        "--export=ALL",
        "--ntasks-per-node=1",
        "--cpus-per-task=12",
        "--mpi=none",
        "--nodes=4",
        "--ntasks=4",
    ]
    assert job.saw("node")["argv"] == ["node", run, "0", "10.77.0.11", "20123"]
    assert job.saw("end")["argv"] == ["end", run, "0", "0"]
    assert {job.saw(name)["cwd"] for name in ("claim", "node", "end")} == {run}


def test_the_step_spans_the_nodes_that_were_given_not_those_asked_for(start: Start) -> None:
    job = start(environ={**SLURM, "SLURM_JOB_NODELIST": "n1"}, node="0")
    assert job.end()[0] == 0
    assert job.saw("claim")["argv"][2:] == ["n1"]
    assert {"--nodes=1", "--ntasks=1"} <= set(job.saw("srun")["options"])


def test_a_folder_of_any_name_does(start: Start) -> None:
    job = start(below=WEIRD_NAME, node="3")
    assert job.end() == (3, "loud\n")
    assert job.saw("end")["argv"] == ["end", str(job.run.path), "0", "3"]


# Exit codes


def test_the_jobs_exit_code_is_what_the_kernel_says_of_the_end(start: Start) -> None:
    """srun's code is the highest of all tasks, which may be a victim's."""
    job = start(node="137", end="1")
    assert job.end()[0] == 1
    assert job.saw("end")["argv"][3] == "137"


@pytest.mark.parametrize("code", [0, 5])
def test_an_end_that_cannot_be_written_leaves_sruns_code(start: Start, code: int) -> None:
    assert start(node=str(code), end="fails").end()[0] == code


@pytest.mark.parametrize("code", [1, 2])
def test_a_refused_claim_ends_the_job_with_its_code_and_starts_nothing(start: Start, code: int) -> None:
    job = start(claim=str(code))
    assert job.end()[0] == code
    assert not job.was_started("srun") and not job.was_started("end")


def test_unknown_hosts_end_the_job_before_the_claim(start: Start) -> None:
    """Without their names, four nodes would be four worlds of one."""
    job = start(scontrol="Unable to contact slurm controller")
    code, said = job.end()
    assert code == 1 and "Unable to contact slurm controller" in said
    assert not job.was_started("claim")


def test_a_slurm_script_started_without_slurm_says_how_to_start_it(start: Start) -> None:
    job = start(environ={"HOME": "/root"})
    code, said = job.end()
    assert code == 1 and "SLURM_JOB_NODELIST: this is a Slurm job: sbatch starts it" in said
    assert not job.was_started("claim")


# What was reviewed is what runs


def damage(name: str, data: bytes | None) -> Callable[[RunFolder], None]:
    def change(run: RunFolder) -> None:
        path = run.path / name
        path.unlink() if data is None else path.write_bytes(data)

    return change


@pytest.mark.contract("C42")
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("job.json", b"{}"),
        ("job.json", None),
        ("kernel.pyz", b"import os; os.system('touch gotcha')"),
        ("kernel.pyz", None),
        ("SHA256SUMS", b""),
        ("SHA256SUMS", b"nonsense\n"),
        ("SHA256SUMS", None),
    ],
)
def test_a_changed_run_folder_stops_the_job_before_anything(
    start: Start, name: str, data: bytes | None
) -> None:
    job = start(before=damage(name, data), node="0")
    code, said = job.end()
    assert code == 1
    assert name in said
    assert not any(job.was_started(program) for program in ("scontrol", "claim", "srun", "node", "end"))
    assert not (job.run.path / "gotcha").exists()


def test_a_line_of_the_sums_that_is_none_stops_the_job(start: Start) -> None:
    def add(run: RunFolder) -> None:
        with run.sums.open("a") as sums:
            sums.write("and this\n")

    assert start(before=add, node="0").end()[0] == 1


# The environment


@pytest.mark.contract("C10")
def test_nothing_of_the_login_profile_reaches_a_step(start: Start, tmp_path: Path) -> None:
    """Variables of every kind, functions in the place of our programs, and a file that bash reads first."""
    evil = tmp_path / "evil"
    evil.mkdir()
    for name in ("srun", "scontrol", "sha256sum", "env", "python3"):
        (evil / name).write_text("#!/bin/sh\necho hijacked; exit 0\n")
        (evil / name).chmod(0o755)
    bash_env = tmp_path / "bash_env"
    bash_env.write_text(
        "declare -rx READ_ONLY=leak PYTHONHOME=/leak\n"
        "readonly run=/leak hosts=/leak kernel=/leak\n"
        "srun() { echo hijacked; }\nreadonly -f srun\nexport -f srun\n"
        "cd() { echo hijacked; }\n"
        "shopt -s expand_aliases; alias sha256sum='echo hijacked'\n"
        "echo profile speaks\n"
    )
    planted = {
        "PATH": f"{evil}:/usr/bin:/bin",
        "BASH_ENV": str(bash_env),
        "ENV": str(bash_env),
        "HF_TOKEN": "hf_planted",
        "PYTHONPATH": "/leak",
        "LD_LIBRARY_PATH": "/leak",
        "VIRTUAL_ENV": "/leak",
        "CONDA_PREFIX": "/leak",
        "TUNEPLANE_OUT_DIR": "/leak",
        "SLURM_JWT": "eyJ_planted",
        "SBATCH_PARTITION": "leak",
        "SRUN_CONTAINER": "leak",
        "NEW\nLINE": "leak",
        "WITH_NEWLINE": "leak\nexport ALSO=leak\nrm -rf x",
        "not.a.name": "leak",
        "BASH_FUNC_scontrol%%": "() { echo hijacked; }",
        "BASH_FUNC_module%%": "() { echo hijacked; }",
        "LC_ALL": "POSIX",
        "IFS": ":",
        "GREP_OPTIONS": "leak",
        "PS4": "$(echo hijacked >&2)",
        "SHELLOPTS": "braceexpand:hashall:interactive-comments:monitor",
        "CDPATH": "/tmp",
        "GLOBIGNORE": "*",
        "POSIXLY_CORRECT": "1",
    }
    job = start(environ={**planted, **SLURM}, node="0")
    code, said = job.end()
    assert code == 0 and said.replace("profile speaks\n", "") == "loud\n"
    for program in ("claim", "srun", "node", "end"):
        seen = job.saw(program)["environ"]
        assert set(seen) - BASHS_OWN == {*SLURM, "PATH", "LANG"}, program
        assert seen["PATH"] == f"{tmp_path}/slurm bin:/usr/bin:/bin"
        assert seen["LANG"] == "C.UTF-8"
        assert {name: seen[name] for name in SLURM} == SLURM


def test_values_of_slurm_arrive_whole_whatever_they_hold(start: Start) -> None:
    odd = {
        "SLURM_JOB_NAME": "a b $HOME 'q' \"d\"\n#SBATCH 实验",
        "SLURM_EMPTY": "",
        "SLURM_JOB_COMMENT": "-x\\",
    }
    job = start(environ={**SLURM, **odd}, node="0")
    assert job.end()[0] == 0
    seen = job.saw("node")["environ"]
    assert {name: seen[name] for name in odd} == odd


def test_a_tracing_shell_shows_nothing_that_it_should_not(start: Start) -> None:
    job = start(
        environ={**SLURM, "SHELLOPTS": "xtrace", "HF_TOKEN": "hf_planted", "SLURM_JWT": "eyJ_x"}, node="0"
    )
    code, said = job.end()
    assert code == 0 and "hf_planted" not in said and "eyJ_x" not in said


# Modules

INIT = """
: "$SOME_UNSET_VARIABLE"
module() {
  [[ $1 == load ]] || return 1
  [[ $2 != broken ]] || { echo "module: $2 is unknown" >&2; return 1; }
  case ":${LOADEDMODULES-}:" in *":$2:"*) return 0 ;; esac
  export LOADEDMODULES="${LOADEDMODULES:+$LOADEDMODULES:}$2" PATH="/opt/$2/bin:$PATH" LD_LIBRARY_PATH="/opt/$2/lib"
}
export -f module
"""


def with_modules(tmp_path: Path) -> dict[str, str]:
    home = tmp_path / "module system"
    (home / "init").mkdir(parents=True)
    (home / "init" / "bash").write_text(INIT)
    return {
        **SLURM,
        "MODULESHOME": str(home),
        "MODULEPATH": "/opt/modulefiles",
        "LMOD_CMD": "/opt/lmod",
        "LOADEDMODULES": "gcc/12",  # by the profile: its PATH is not there any more
        "_LMFILES_": "/opt/modulefiles/gcc/12",
        "PATH": "/opt/gcc/12/bin:/usr/bin:/bin",
        "LD_LIBRARY_PATH": "/leak",
        "HF_TOKEN": "hf_planted",
        "BASH_FUNC_module%%": "() { echo hijacked; }",
    }


def test_modules_are_loaded_from_none_and_what_they_set_goes_further(start: Start, tmp_path: Path) -> None:
    job = start(bare_slurm_job(modules=["gcc/12", "cuda/12.4"]), environ=with_modules(tmp_path), node="0")
    assert job.end() == (0, "loud\n")
    seen = job.saw("node")["environ"]
    assert seen["PATH"] == f"/opt/cuda/12.4/bin:/opt/gcc/12/bin:{tmp_path}/slurm bin:/usr/bin:/bin"
    assert seen["LOADEDMODULES"] == "gcc/12:cuda/12.4"
    assert seen["LD_LIBRARY_PATH"] == "/opt/cuda/12.4/lib"
    assert "HF_TOKEN" not in seen and "_LMFILES_" not in seen


def test_a_module_that_is_not_there_ends_the_job(start: Start, tmp_path: Path) -> None:
    job = start(bare_slurm_job(modules=["broken"]), environ=with_modules(tmp_path))
    code, said = job.end()
    assert code == 1 and "module: broken is unknown" in said
    assert not job.was_started("claim")


def test_a_node_without_a_module_system_is_told(start: Start) -> None:
    job = start(bare_slurm_job(modules=["gcc/12"]))
    code, said = job.end()
    assert code == 1 and "MODULESHOME: the login profile on this node sets up no modules" in said


# Signals


def test_the_warning_before_the_limit_leaves_a_marker_and_the_step_goes_on(start: Start) -> None:
    job = start()
    step = job.saw("node")
    marker = job.run.attempt(0).stop_marker
    for _ in range(3):
        os.kill(job.process.pid, signal.SIGUSR2)
        time.sleep(0.05)
    assert marker.read_bytes() == b""
    assert job.process.poll() is None
    assert Path(f"/proc/{step['pid']}").exists(), "the signal must not reach the trainer"
    job.say("node", "7")
    assert job.end()[0] == 7
    assert job.saw("end")["argv"] == ["end", str(job.run.path), "0", "7"]


def test_a_warning_while_the_attempt_is_claimed_is_not_lost(start: Start) -> None:
    """With a limit shorter than the warning, Slurm sends it as the job begins."""
    job = start(claim_sleep="0.5", node="0")
    job.saw("claim")
    os.kill(job.process.pid, signal.SIGUSR2)
    assert job.end()[0] == 0
    assert job.run.attempt(0).stop_marker.exists()


def test_without_a_warning_there_is_no_marker(start: Start) -> None:
    job = start(node="0")
    assert job.end()[0] == 0
    assert not job.run.attempt(0).stop_marker.exists()


def test_term_to_the_script_alone_is_outlived_to_write_the_end(start: Start) -> None:
    job = start()
    job.saw("node")
    os.kill(job.process.pid, signal.SIGTERM)
    time.sleep(0.1)
    assert job.process.poll() is None
    job.say("node", "0")
    assert job.end()[0] == 0
    assert job.saw("end")["argv"][3] == "0"


def test_term_to_the_whole_job_is_outlived_to_write_the_end(start: Start) -> None:
    job = start()
    job.saw("node")
    os.killpg(job.process.pid, signal.SIGTERM)
    assert job.end()[0] == 143
    assert job.saw("end")["argv"][3] == "143"


def test_term_before_the_claim_ends_the_script(start: Start) -> None:
    job = start(claim_sleep="5")
    job.saw("claim")
    os.killpg(job.process.pid, signal.SIGTERM)
    assert job.end()[0] in (143, -signal.SIGTERM)
    assert not job.was_started("srun")


def test_a_signal_at_the_very_end_of_the_step_does_not_change_its_code(start: Start) -> None:
    """Signals without a pause while the step ends: the code is the step's, never 128 and the signal."""
    job = start()
    job.saw("node")
    job.say("node", "0")
    while job.process.poll() is None and not job.was_started("end"):
        os.kill(job.process.pid, signal.SIGUSR2)
        os.kill(job.process.pid, signal.SIGTERM)
        time.sleep(0.0005)
    assert job.end()[0] == 0
    assert job.saw("end")["argv"][3] == "0"


# On this machine


@pytest.mark.contract("C10")
def test_a_local_script_cleans_as_well_and_is_no_part_of_somebodys_job(start: Start) -> None:
    planted = {
        **SLURM,
        "HF_TOKEN": "hf_planted",
        "PYTHONPATH": "/leak",
        "BASH_FUNC_cd%%": "() { echo hijacked; }",
    }
    job = start(local_job("/x/" + RUN_ID), environ=planted, local="5")
    assert job.end() == (5, "")
    seen = job.saw("local")
    assert seen["argv"] == ["local", str(job.run.path)]
    assert seen["pid"] == job.process.pid, "whoever waits for the script waits for the run"
    names = {"CUDA_VISIBLE_DEVICES", "HOME", "USER", "LOGNAME", "PATH", "LANG"}
    assert set(seen["environ"]) - BASHS_OWN == names


@pytest.mark.parametrize("name", ["job.json", "kernel.pyz", "SHA256SUMS"])
def test_a_changed_local_run_stops_before_anything(start: Start, name: str) -> None:
    job = start(local_job("/x/" + RUN_ID), before=damage(name, b"x"))
    assert job.end()[0] == 1
    assert not job.was_started("local")


def test_a_script_in_the_working_directory_is_found_by_its_bare_name(start: Start) -> None:
    """`cd <run folder> && bash job.sbatch`, as a reader would start a local one by hand."""
    job = start(local_job("/x/" + RUN_ID))
    job.end()
    job.run.script.chmod(stat.S_IRUSR)
    (job.run.path / "local.seen").unlink()
    done = subprocess.run(["bash", "job.sbatch"], cwd=job.run.path, timeout=20, check=False)
    assert done.returncode == 0
    assert job.was_started("local")
