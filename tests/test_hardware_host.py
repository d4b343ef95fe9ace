"""What a job uses of its host: its cgroup of either version, else its processes; the network of the node."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_fixture import wait_until

from tuneplane.report.hardware import cgroup, network, processes
from tuneplane.report.hardware.processes import Marked
from tuneplane.report.hardware.sampler import Sampler, make_sampler

V1 = """\
9:name=systemd:/system.slice/slurmd.service
6:freezer:/slurm_n1/uid_1000/job_42/step_0
4:memory:/slurm_n1/uid_1000/job_42/step_0/task_0
2:cpu,cpuacct:/slurm_n1/uid_1000/job_42/step_0/task_0
0::/
"""
V2 = "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n"

V1_MOUNTS = """\
30 25 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro
31 30 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
33 30 0:30 / /sys/fs/cgroup/memory rw,nosuid shared:12 - cgroup cgroup rw,memory
34 30 0:31 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 30 0:32 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer
"""
V2_MOUNTS = "30 25 0:26 / /sys/fs/cgroup ro shared:4 - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("path", "job"),
    [
        ("/slurm/uid_0/job_12/step_batch/task_0", "/slurm/uid_0/job_12"),
        ("/system.slice/slurmstepd.scope/job_12/step_0/user", "/system.slice/slurmstepd.scope/job_12"),
        ("/system.slice/n1_slurmstepd.scope/job_7", "/system.slice/n1_slurmstepd.scope/job_7"),
        ("/system.slice/slurmstepd.scope/s3FKQ/step_0", "/system.slice/slurmstepd.scope/s3FKQ"),
        ("/system.slice/slurmstepd.scope", ""),
        ("/user.slice/user-1000.slice/session-3.scope", ""),
        ("/docker/0123abcd", ""),
        ("/", ""),
        ("/slurm/job_x/job_12_of_mine", ""),
    ],
)
def test_of_a_cgroup_path_the_part_of_the_slurm_job_is_taken_and_nothing_wider(path: str, job: str) -> None:
    assert cgroup.job_path(path) == job


def test_the_folders_of_the_job_are_found_in_either_version() -> None:
    root = "/sys/fs/cgroup"
    job = "/slurm_n1/uid_1000/job_42"
    assert cgroup.job_folders(V1, V1_MOUNTS) == {
        "freezer": f"{root}/freezer{job}",
        "memory": f"{root}/memory{job}",
        "cpu": f"{root}/cpu,cpuacct{job}",
        "cpuacct": f"{root}/cpu,cpuacct{job}",
    }
    assert cgroup.job_folders(V2, V2_MOUNTS) == {"": f"{root}/system.slice/slurmstepd.scope/job_42"}
    # A container that has but a part of the tree mounted.
    part = V2_MOUNTS.replace(" / /sys", " /system.slice/slurmstepd.scope /sys")
    assert cgroup.job_folders(V2, part) == {"": f"{root}/job_42"}
    assert cgroup.job_folders(V2, V2_MOUNTS.replace(" / /sys", " /system /sys")) == {}
    assert cgroup.job_folders("0::/user.slice\n", V2_MOUNTS) == {}
    assert cgroup.job_folders("nonsense\n\n::\n", "30 x\n- \n") == {}


def files(folder: Path, contents: dict[str, str]) -> str:
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)


def test_memory_is_the_jobs_own_without_what_the_kernel_takes_back(tmp_path: Path) -> None:
    v1 = files(
        tmp_path / "v1",
        {
            "memory.usage_in_bytes": "1000\n",
            "memory.limit_in_bytes": "4000\n",
            "memory.stat": "cache 1\ninactive_file 1\ntotal_inactive_file 300\n",
        },
    )
    assert cgroup.read_memory({"memory": v1}) == (700, 4000)
    files(tmp_path / "v1", {"memory.limit_in_bytes": "9223372036854771712\n"})
    assert cgroup.read_memory({"memory": v1}) == (700, None)
    v2 = files(
        tmp_path / "v2",
        {"memory.current": "1000\n", "memory.max": "max\n", "memory.stat": "anon 5\ninactive_file 200\n"},
    )
    assert cgroup.read_memory({"": v2}) == (800, None)
    files(tmp_path / "v2", {"memory.max": "1600\n", "memory.stat": ""})
    assert cgroup.read_memory({"": v2}) == (1000, 1600)
    assert cgroup.read_memory({}) is None
    assert cgroup.read_memory({"": str(tmp_path / "gone")}) is None


def test_cpu_time_comes_from_either_version(tmp_path: Path) -> None:
    v1 = files(tmp_path / "v1", {"cpuacct.usage": "2500000000\n"})
    v2 = files(tmp_path / "v2", {"cpu.stat": "usage_usec 1500000\nuser_usec 1\n"})
    assert cgroup.read_cpu_s({"cpuacct": v1}) == 2.5
    assert cgroup.read_cpu_s({"": v2}) == 1.5
    assert cgroup.read_cpu_s({"": str(tmp_path)}) is None
    assert cgroup.read_cpu_s({}) is None


def test_the_jobs_processes_are_those_of_all_its_steps(tmp_path: Path) -> None:
    job = files(
        tmp_path, {"cgroup.procs": "", "step_0/cgroup.procs": "12\n0\n", "step_0/user/cgroup.procs": "7\n8\n"}
    )
    assert sorted(cgroup.read_processes({"": job}) or ()) == [7, 8, 12]
    assert cgroup.read_processes({"freezer": str(tmp_path / "gone"), "": job}) is not None
    assert cgroup.read_processes({"": str(tmp_path / "gone")}) is None


@pytest.fixture
def tree() -> Iterator[int]:
    """A trainer of run r-1 on node 3 that has a worker, an orphan, and a child with another environment."""
    worker = "import time; b = bytearray(64 << 20); print('up', flush=True)\nwhile True: sum(range(10000))"
    script = (
        f"{sys.executable} -c \"{worker}\" & env -i {sys.executable} -c 'import time; time.sleep(60)' & "
        "(setsid sleep 61 &); wait"
    )
    environment = {**os.environ, "TUNEPLANE_JOB_RUN_ID": "r-1", "TUNEPLANE_MACHINE_RANK": "3"}
    started = subprocess.Popen(
        ["bash", "-c", script], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert started.stdout is not None and started.stdout.readline() == "up\n"
    yield started.pid
    for pid in marked(own=0).pids():
        os.kill(pid, 9)
    started.kill()
    started.communicate()


def marked(run: str = "r-1", node: str = "3", own: int = 0) -> Marked:
    return Marked([f"TUNEPLANE_JOB_RUN_ID={run}", f"TUNEPLANE_MACHINE_RANK={node}"], own)


def test_processes_of_the_job_are_known_by_their_environment_and_their_parents(tree: int) -> None:
    ours = marked()
    wait_until(lambda: len(ours.pids()) == 4, "all four are there")
    assert tree in ours.pids()
    assert marked(run="r-2").pids() == []
    assert marked(node="1").pids() == [], "another node's, where one machine plays several"
    assert marked(run="r-").pids() == []
    assert os.getpid() in marked(run="r-2", own=os.getpid()).pids()


def test_what_they_use_is_added_up(tree: int, tmp_path: Path) -> None:
    ours = marked()
    wait_until(lambda: len(ours.pids()) == 4, "all four are there")
    first = processes.read_cpu_and_memory(ours.pids())
    assert first is not None and first[1] > 64 << 20
    time.sleep(0.5)
    second = processes.read_cpu_and_memory(ours.pids())
    assert second is not None and 0.02 < second[0] - first[0] < 5
    assert processes.read_cpu_and_memory([]) is None
    assert processes.read_cpu_and_memory([2**22 + 5]) is None


def test_what_ended_children_used_is_not_lost() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    before = processes.read_cpu_and_memory([os.getpid()])
    subprocess.run([sys.executable, "-c", burn], check=True, timeout=30)
    after = processes.read_cpu_and_memory([os.getpid()])
    assert before is not None and after is not None and after[0] - before[0] >= 0.25


def test_disk_counts_what_reached_storage(tmp_path: Path) -> None:
    before = processes.read_disk([os.getpid()])
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x" * (4 << 20))
        file.flush()
        os.fsync(file.fileno())
    after = processes.read_disk([os.getpid()])
    assert before is not None and after is not None
    assert after[1] - before[1] >= 4 << 20
    assert processes.read_disk([2**22 + 5]) is None


NET_DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
    lo: 9000 1 0 0 0 0 0 0 9000 1 0 0 0 0 0 0
  eth0: 100 1 0 0 0 0 0 0 10 1 0 0 0 0 0 0
  eth1:2000 1 0 0 0 0 0 0 20 1 0 0 0 0 0 0
 bond0: 2100 1 0 0 0 0 0 0 30 1 0 0 0 0 0 0
broken: x
"""


def test_network_is_counted_once_a_device(tmp_path: Path) -> None:
    proc = files(tmp_path / "proc", {"net/dev": NET_DEV})
    system = tmp_path / "sys"
    assert network.read_network(proc, str(system)) == (4200, 60)  # a container's: none is a device
    for name in ("eth0", "eth1"):
        (system / "class/net" / name / "device").mkdir(parents=True)
    assert network.read_network(proc, str(system)) == (2100, 30)
    assert network.read_network(str(tmp_path / "gone"), str(system)) is None
    real = network.read_network()
    assert real is None or real[0] >= 0


def test_infiniband_counts_all_ports_in_octets(tmp_path: Path) -> None:
    ports = {}
    for card, port, got, gave in (("mlx5_0", 1, 10, 1), ("mlx5_1", 1, 20, 2), ("mlx5_1", 2, 30, 3)):
        counters = f"class/infiniband/{card}/ports/{port}/counters"
        ports[f"{counters}/port_rcv_data"] = f"{got}\n"
        ports[f"{counters}/port_xmit_data"] = f"{gave}\n"
    assert network.read_infiniband(files(tmp_path, ports)) == (240, 24)
    assert network.read_infiniband(str(tmp_path / "gone")) is None


def sampler(node: int = 0) -> Sampler:
    return make_sampler(node, {"SLURM_CPUS_ON_NODE": "1"}, {"TUNEPLANE_JOB_RUN_ID": "r-1"}, has_gpus=False)


def test_a_sample_has_rates_from_the_second_one_on_and_is_the_jobs_alone(tree: int) -> None:
    job = Sampler(2, None, marked(), 1)
    assert set(job.sample()) == {"system/node2/memory_used_bytes"}
    time.sleep(1)
    found = job.sample()
    assert {
        "system/node2/cpu_percent",
        "system/node2/memory_used_bytes",
        "system/node2/disk_read_bytes_per_s",
        "system/node2/disk_write_bytes_per_s",
    } <= set(found)
    assert 5 < found["system/node2/cpu_percent"] < 150, "one of its processes never rests"
    assert 64 << 20 < found["system/node2/memory_used_bytes"] < 1 << 30
    with subprocess.Popen(
        ["sleep", "60"]
    ) as resting:  # not this process: tests before may have left it threads
        idle = Sampler(0, None, marked(run="r-2", own=resting.pid), 1)
        idle.sample()
        time.sleep(1)
        told = idle.sample()
        resting.kill()
    assert told["system/node0/cpu_percent"] < 50


def test_a_count_that_goes_back_gives_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([(100, 1), (300, 2), (50, 3), (150, 4)])
    monkeypatch.setattr(network, "read_network", lambda: next(counts))
    found = []
    one = sampler()
    for _ in range(4):
        found.append({name for name in one.sample() if "network" in name})
        time.sleep(0.01)
    received, sent = "system/node0/network_received_bytes_per_s", "system/node0/network_sent_bytes_per_s"
    assert found == [set(), {received, sent}, {sent}, {received, sent}]


def test_a_source_that_fails_costs_its_own_values_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a kernel that writes otherwise")

    monkeypatch.setattr(network, "read_network", fail)
    monkeypatch.setattr(processes, "read_disk", fail)
    one = sampler()
    one.sample()
    assert set(one.sample()) == {"system/node0/cpu_percent", "system/node0/memory_used_bytes"}


def test_the_cpus_are_those_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, cpus in (("64", 64), ("", len(os.sched_getaffinity(0))), ("0", len(os.sched_getaffinity(0)))):
        assert make_sampler(0, {"SLURM_CPUS_ON_NODE": said}, {}, has_gpus=False)._cpus == cpus
