"""The real Slurm of slurm/testbed is what other tests take it for, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed_client import WEIRD_NAME, CommandFailed, Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(180)]

#: A testbed apart from the shared one, for what would disturb other tests.
SECOND_STATE = Path("/var/lib/tuneplane-testbed-second")


def submit(testbed: Testbed, *arguments: str, user: str = "alice") -> str:
    """Submit a batch job and return its id."""
    return testbed.exec(["sbatch", "--parsable", *arguments], user=user).stdout.strip()


def processes_naming(text: str) -> list[str]:
    """Command lines on this machine that hold ``text``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if text in line and path.parent.name != str(os.getpid()):
            found.append(line)
    return found


def freezer_groups(name: str) -> list[Path]:
    return [path for path in Path("/sys/fs/cgroup").rglob("tuneplane-testbed*") if path.name.endswith(name)]


def machine() -> dict[str, object]:
    """What a testbed could leave changed on the machine."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    return {
        "links": sorted(line.split(":")[1].split("@")[0].strip() for line in links.splitlines()),
        "named network namespaces": sorted(os.listdir("/run/netns")) if Path("/run/netns").exists() else [],
        "users": Path("/etc/passwd").read_bytes(),
        "groups": Path("/etc/group").read_bytes(),
        "hosts": Path("/etc/hosts").read_bytes(),
        "fuse": Path("/dev/fuse").stat().st_mode if Path("/dev/fuse").exists() else None,
        "mounts": [line for line in Path("/proc/self/mounts").read_text().splitlines() if "testbed" in line],
        "slurm": Path("/etc/slurm").exists(),
        "packages": Path("/var/lib/dpkg/status").stat().st_mtime_ns,
    }


def test_four_hosts_have_names_and_addresses_of_their_own(testbed: Testbed) -> None:
    shown = testbed.exec(["srun", "-N4", "--label", "sh", "-c", "echo $(hostname) $(hostname -I)"]).stdout
    pairs = sorted(line.split(": ")[1] for line in shown.splitlines())
    assert pairs == ["n1 10.77.0.11", "n2 10.77.0.12", "n3 10.77.0.13", "n4 10.77.0.14"]
    assert testbed.exec(["hostname"]).stdout == "ctl\n"
    assert "10.77.0.13" in testbed.node_exec("n1", ["getent", "hosts", "n3"]).stdout


def test_a_node_shows_its_own_processes_devices_and_tmp_alone(testbed: Testbed) -> None:
    testbed.node_exec("n1", ["touch", "/tmp/of-n1"])
    assert "of-n1" in testbed.node_exec("n1", ["ls", "/tmp"]).stdout.split()
    assert "of-n1" not in testbed.node_exec("n2", ["ls", "/tmp"]).stdout.split()
    assert not Path("/tmp/of-n1").exists()
    programs = set(testbed.node_exec("n2", ["ps", "-e", "-o", "comm="]).stdout.split())
    assert "slurmd" in programs
    assert "slurmctld" not in programs
    assert testbed.node_exec("n2", ["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]


def test_a_job_sees_the_gpus_it_asked_for(testbed: Testbed) -> None:
    script = "echo $CUDA_VISIBLE_DEVICES $SLURM_GPUS_ON_NODE $SLURM_STEP_GPUS"
    shown = testbed.exec(["srun", "--gpus-per-node=2", "bash", "-c", script]).stdout
    assert shown == "0,1 2 0,1\n"
    shown = testbed.exec(
        ["srun", "-N2", "--gpus-per-node=8", "bash", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    ).stdout
    assert shown == "0,1,2,3,4,5,6,7\n" * 2
    with pytest.raises(CommandFailed, match="Requested node configuration is not available"):
        testbed.exec(["srun", "--gpus-per-node=9", "true"])


def test_jobs_run_as_the_ordinary_user_who_submitted_them(testbed: Testbed) -> None:
    assert testbed.exec(["srun", "id", "-un"], user="bob").stdout == "bob\n"
    assert "lab" in testbed.exec(["srun", "id", "-Gn"], user="carol").stdout.split()
    with pytest.raises(CommandFailed, match="Permission denied"):
        testbed.exec(["ls", testbed.home("alice")], user="bob")


def test_a_command_on_the_login_host_gets_a_fresh_login_and_what_was_given(testbed: Testbed) -> None:
    os.environ["LEAKS_FROM_THE_TEST"] = "1"
    try:
        shown = testbed.exec(["env", "-0"], env={"GIVEN": "a b\n$HOME 'x'"}).stdout
    finally:
        del os.environ["LEAKS_FROM_THE_TEST"]
    variables = dict(entry.split("=", 1) for entry in shown.split("\0") if entry)
    assert variables.pop("PATH").split(":")[0] == f"{testbed.shared}/venv/bin"
    assert variables == {
        "GIVEN": "a b\n$HOME 'x'",
        "HOME": str(testbed.home("alice")),
        "LANG": "C.UTF-8",
        "LOGNAME": "alice",
        "PWD": str(testbed.home("alice")),
        "SHELL": "/bin/bash",
        "TUNEPLANE_CONFIG_DIR": str(testbed.config),
        "USER": "alice",
    }


def test_arguments_folders_input_and_exit_code_pass_unchanged(testbed: Testbed) -> None:
    folder = testbed.home("alice") / WEIRD_NAME
    folder.mkdir(exist_ok=True)
    testbed.give(folder)
    words = ["a b", "$HOME", "'", '"', "--user", "*", "", "a\nb", "实验"]
    script = 'pwd; printf "%s|" "$@"; cat; exit 7'
    done = testbed.exec(["bash", "-c", script, "x", *words], cwd=folder, input="from stdin", check=False)
    assert done.returncode == 7
    assert done.stdout == f"{folder}\n" + "|".join(words) + "|from stdin"


def test_a_command_that_takes_too_long_is_ended(testbed: Testbed) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        testbed.exec(["sleep", "1234"], timeout=1)
    assert "sleep 1234" not in testbed.exec(["ps", "-e", "-o", "args="], user="root").stdout


def test_an_ordinary_user_runs_the_image_in_a_job(testbed: Testbed) -> None:
    argv = ["srun", "-w", "n3", "apptainer", "exec", "--cleanenv", "--no-home", str(testbed.image)]
    shown = testbed.exec(
        [*argv, "python3", "-c", "import os, sys; print(sys.version_info[:2], os.getuid())"]
    ).stdout
    assert shown == f"(3, 11) {testbed.home('alice').stat().st_uid}\n"
    assert testbed.exec([*argv, "bash", "-c", "hostname"]).stdout == "n3\n"


def test_the_second_image_brings_an_environment_of_its_own(testbed: Testbed) -> None:
    argv = ["srun", "apptainer", "exec", "--cleanenv", "--no-home", str(testbed.env_image)]
    script = "image-tool; echo $TUNEPLANE_OUT_DIR $HF_HOME $HF_TOKEN"
    script += "; python3 -c 'import image_module; print(image_module.ORIGIN)'"
    shown = testbed.exec([*argv, "bash", "-c", script]).stdout
    assert shown == "from the image\n/image /image/hf image-planted-token\nimage\n"


def test_a_job_that_leaves_a_process_behind_still_ends(testbed: Testbed) -> None:
    job = submit(testbed, "--wrap", "setsid --fork sleep 4321; exit 3")
    assert testbed.wait_job(job) == "FAILED"
    assert testbed.job(job)["ExitCode"] == "3:0"
    node = testbed.job(job)["NodeList"]
    assert "sleep 4321" not in testbed.node_exec(node, ["ps", "-e", "-o", "args="]).stdout


def test_defaults_that_failures_depend_on_are_slurms_own(testbed: Testbed) -> None:
    shown = testbed.exec(["scontrol", "show", "config"]).stdout
    pairs = (line.partition("=") for line in shown.splitlines())
    conf = {key.strip(): value.strip() for key, _, value in pairs}
    assert conf["SlurmdTimeout"] == "300 sec"
    assert conf["KillWait"] == "30 sec"
    assert conf["MinJobAge"] == "300 sec"
    assert conf["ProctrackType"] == "proctrack/cgroup"
    partitions = testbed.exec(["sinfo", "-h", "-o", "%P %p"]).stdout.split("\n")
    assert "gpu* 10" in partitions
    assert "preempt 1" in partitions


def test_an_urgent_job_requeues_a_preemptible_one(testbed_alone: Testbed) -> None:
    low = submit(testbed_alone, "-p", "preempt", "-w", "n1", "--exclusive", "--wrap", "sleep 300")
    wait_until(lambda: testbed_alone.job(low)["JobState"] == "RUNNING")
    high = submit(testbed_alone, "-p", "gpu", "-w", "n1", "--exclusive", "--wrap", "true")
    assert testbed_alone.wait_job(high) == "COMPLETED"
    assert testbed_alone.job(low)["Restarts"] == "1"


def test_a_cut_node_is_unreachable_until_it_joins_again(testbed_alone: Testbed) -> None:
    def answers() -> bool:
        script = "exec 3<>/dev/tcp/n2/6818"
        return (
            testbed_alone.node_exec("n1", ["timeout", "2", "bash", "-c", script], check=False).returncode == 0
        )

    assert answers()
    testbed_alone.cut("n2")
    assert not answers()
    # What runs on the cut node goes on there.
    assert testbed_alone.node_exec("n2", ["hostname"]).stdout == "n2\n"
    testbed_alone.join("n2")
    wait_until(answers)
    assert testbed_alone.exec(["srun", "-w", "n2", "hostname"]).stdout == "n2\n"


def test_a_job_goes_on_while_accounting_is_switched_and_sacct_shows_what_it_can(
    testbed_alone: Testbed,
) -> None:
    job = submit(testbed_alone, "--wrap", "sleep 6; exit 5")
    wait_until(lambda: testbed_alone.job(job)["JobState"] == "RUNNING")
    testbed_alone.accounting(False)
    with pytest.raises(CommandFailed, match="accounting storage is disabled"):
        testbed_alone.exec(["sacct"])
    assert testbed_alone.exec(["srun", "hostname"]).stdout.startswith("n")
    testbed_alone.accounting(True)
    assert testbed_alone.wait_job(job) == "FAILED"
    assert testbed_alone.job(job)["ExitCode"] == "5:0"

    later = submit(testbed_alone, "--qos", "high", "--wrap", "exit 4")
    testbed_alone.wait_job(later)
    columns = ["sacct", "-nXP", "-j", later, "-o", "State,ExitCode,Account,QOS"]
    wait_until(lambda: testbed_alone.exec(columns).stdout == "FAILED|4:0|research|high\n")
    with pytest.raises(CommandFailed, match="Invalid account"):
        testbed_alone.exec(["sbatch", "--account", "nobodys", "--wrap", "true"])


def test_slurm_forgets_a_job_after_the_min_job_age_that_was_set(testbed_alone: Testbed) -> None:
    testbed_alone.set(MinJobAge=2)
    job = submit(testbed_alone, "--wrap", "true")
    assert testbed_alone.wait_job(job) == "COMPLETED"
    wait_until(lambda: testbed_alone.job(job) == {}, timeout_s=90)
    assert testbed_alone.exec(["sacct", "-nXP", "-j", job, "-o", "State"]).stdout == "COMPLETED\n"
    testbed_alone.reset()
    assert "MinJobAge               = 300 sec" in testbed_alone.exec(["scontrol", "show", "config"]).stdout


def test_values_that_slurm_refuses_leave_it_as_it_was(testbed_alone: Testbed) -> None:
    with pytest.raises(CommandFailed, match="slurmctld"):
        testbed_alone.set(SelectType="select/nonsense")
    assert testbed_alone.exec(["srun", "hostname"]).stdout.startswith("n")


def test_a_restarted_controller_still_knows_its_jobs(testbed_alone: Testbed) -> None:
    job = submit(testbed_alone, "--wrap", "sleep 5; exit 6")
    wait_until(lambda: testbed_alone.job(job)["JobState"] == "RUNNING")
    testbed_alone.restart_controller()
    assert testbed_alone.wait_job(job) == "FAILED"
    assert testbed_alone.job(job)["ExitCode"] == "6:0"


@pytest.fixture
def second(testbed: Testbed) -> Iterator[Testbed]:
    """A testbed of this test's own, beside the shared one: same names and addresses, other namespaces."""
    other = Testbed(SECOND_STATE)
    other.down()
    yield other
    other.down()


def test_two_testbeds_run_beside_each_other_and_down_leaves_nothing(
    testbed: Testbed, second: Testbed
) -> None:
    before = machine()
    second.call("up", "--no-accounting")
    second.call("up")  # nothing to do, and no harm
    submit(second, "-N4", "--wrap", "setsid --fork sleep 5432; sleep 300")
    wait_until(lambda: "sleep 5432" in second.exec(["ps", "-e", "-o", "args="], user="root").stdout)
    assert "sleep 5432" not in testbed.exec(["ps", "-e", "-o", "args="], user="root").stdout
    assert freezer_groups("-second")

    second.down()

    assert processes_naming(str(SECOND_STATE)) == []
    assert processes_naming("sleep 5432") == []
    assert freezer_groups("-second") == []
    assert not SECOND_STATE.exists()
    assert machine() == before
    second.down()  # once more, and no harm
    assert testbed.exec(["srun", "hostname"]).stdout.startswith("n")


def test_up_repairs_a_testbed_of_which_everything_or_a_part_was_killed(second: Testbed) -> None:
    second.call("up", "--no-accounting")
    second.exec(["pkill", "-KILL", "slurmctld"], user="root")
    second.node_exec("n4", ["pkill", "-KILL", "slurmd"])
    assert "missing" in second.call("status", check=False)
    second.call("up")
    assert second.exec(["srun", "-N4", "hostname"]).stdout.count("\n") == 4

    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"{SECOND_STATE}\0".encode() in line.read_bytes():
                os.kill(int(line.parent.name), 9)
        except (OSError, ProcessLookupError):
            continue
    wait_until(lambda: processes_naming(str(SECOND_STATE)) == [])
    second.call("up")
    assert second.exec(["srun", "-N4", "hostname"]).stdout.count("\n") == 4
    assert "missing" not in second.call("status")


def test_commands_on_a_testbed_that_is_down_say_so(second: Testbed) -> None:
    with pytest.raises(CommandFailed, match="start it with `testbed up`"):
        second.exec(["true"])
    with pytest.raises(CommandFailed, match="start it with `testbed up`"):
        second.cut("n1")


def wait_until(condition: object, timeout_s: float = 30.0) -> None:
    """Poll until ``condition()`` holds; fails the test where it takes too long."""
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "this did not become true in time"
        time.sleep(0.1)
