"""The Slurm of the testbed: its configuration texts, and starting and restarting its daemons.

Called by the commands of ``testbed``. What ``accounting`` and ``set`` chose is kept in settings.json and read
by every start, so that a restart brings the same Slurm back.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import hosts
from layout import ADDRESSES, CONTROLLER, GPUS_PER_NODE, NODES, Layout, TestbedError

DAEMON_START_TIMEOUT_S = 45.0
DAEMON_END_TIMEOUT_S = 20.0
NODES_IDLE_TIMEOUT_S = 60.0
TAIL_LINES = 12

#: Settings that a running slurmd does not read again (slurm.conf(5)): changing one restarts the nodes' daemons.
SLURMD_KEYS = (
    "AuthInfo",
    "GresTypes",
    "ProctrackType",
    "SlurmdParameters",
    "TaskPlugin",
    "JobAcctGatherType",
)

#: Major and minor numbers of device nodes (Documentation/admin-guide/devices.txt): null, which stands in for a
#: GPU since slurmd asks for a character device, and fuse, which ordinary users may open here.
NULL_DEVICE = (1, 3)
FUSE_DEVICE = (10, 229)

CGROUP_CONF = """\
CgroupPlugin=cgroup/v1
CgroupAutomount=no
CgroupMountpoint=/sys/fs/cgroup
"""


def default_conf(layout: Layout, *, accounting: bool, cgroup: bool) -> dict[str, str]:
    """slurm.conf without nodes and partitions. What is not named here has Slurm's own default."""
    conf = {
        "ClusterName": "testbed",
        "SlurmctldHost": f"{CONTROLLER}({ADDRESSES[CONTROLLER]})",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        # A requeued job may start again when its credential has expired: 11 s instead of 121 s.
        "AuthInfo": "cred_expire=10",
        "StateSaveLocation": str(layout.state / "slurmctld"),
        "SlurmdSpoolDir": str(layout.state / "hosts/%n/spool"),
        "SlurmctldPidFile": "/run/slurmctld.pid",
        "SlurmdPidFile": "/run/slurmd-%n.pid",
        "SlurmctldLogFile": str(layout.log / "slurmctld.log"),
        "SlurmdLogFile": str(layout.log / "slurmd-%n.log"),
        "ProctrackType": "proctrack/cgroup" if cgroup else "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU_Memory",
        # Nodes claim more CPUs and memory than the machine has; the controller's word counts.
        "SlurmdParameters": "config_overrides",
        # Restarting only the controller with a changed file is what this testbed does.
        "DebugFlags": "NO_CONF_HASH",
        "GresTypes": "gpu",
        "DefMemPerCPU": "4096",
        # A batch job starts at once instead of up to 3 s later: nothing but the tests' patience depends on it.
        "SchedulerParameters": "batch_sched_delay=0",
        "ReturnToService": "2",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "JobAcctGatherType": "jobacct_gather/linux",
        "AccountingStorageType": "accounting_storage/none",
    }
    if accounting:
        conf["AccountingStorageType"] = "accounting_storage/slurmdbd"
        conf["AccountingStorageHost"] = CONTROLLER
        conf["AccountingStorageTRES"] = "gres/gpu"
        conf["AccountingStorageEnforce"] = "associations,limits,qos"
    return conf


def slurm_conf(conf: dict[str, str]) -> str:
    """The text of slurm.conf."""
    first, last = (ADDRESSES[node].rsplit(".", 1)[1] for node in (NODES[0], NODES[-1]))
    network = ADDRESSES[NODES[0]].rsplit(".", 1)[0]
    lines = [f"{key}={value}" for key, value in conf.items()]
    lines += [
        f"NodeName=n[1-{len(NODES)}] NodeAddr={network}.[{first}-{last}]"
        " Sockets=2 CoresPerSocket=32 ThreadsPerCore=1"
        f" RealMemory=1030000 Gres=gpu:h200:{GPUS_PER_NODE} State=UNKNOWN",
        "PartitionName=gpu Nodes=ALL Default=YES PriorityTier=10 State=UP",
        "PartitionName=preempt Nodes=ALL PriorityTier=1 State=UP",
    ]
    return "\n".join(lines) + "\n"


def gres_conf(layout: Layout) -> str:
    return f"AutoDetect=off\nName=gpu Type=h200 File={layout.devices}/nvidia[0-{GPUS_PER_NODE - 1}]\n"


@dataclass
class Settings:
    """What ``accounting`` and ``set`` chose."""

    #: Whether slurmctld writes to slurmdbd.
    accounting: bool = True
    #: Keys of slurm.conf that differ from default_conf.
    conf: dict[str, str] = field(default_factory=dict)


def read_settings(layout: Layout) -> Settings:
    try:
        return Settings(**json.loads(layout.settings.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Settings()


def write_settings(layout: Layout, settings: Settings) -> None:
    write_text(layout.settings, json.dumps(asdict(settings), indent=1))


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace a file by rename, so that no daemon reads half of it."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(
        os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8"
    ) as sink:
        sink.write(text)
    temporary.chmod(mode)
    temporary.replace(path)


def write_devices(layout: Layout) -> None:
    """Make the device nodes of the fake GPUs and of fuse below the state folder."""
    layout.devices.mkdir(parents=True, exist_ok=True)
    wanted = {f"nvidia{i}": NULL_DEVICE for i in range(GPUS_PER_NODE)}
    wanted["fuse"] = FUSE_DEVICE
    for name, number in wanted.items():
        path = layout.devices / name
        if not path.exists():
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(*number))
            path.chmod(0o666)


def write_configuration(layout: Layout, *, cgroup: bool) -> None:
    """Write all that the hosts see as /etc/slurm."""
    settings = read_settings(layout)
    conf = {**default_conf(layout, accounting=settings.accounting, cgroup=cgroup), **settings.conf}
    layout.slurm.mkdir(parents=True, exist_ok=True)
    write_text(layout.slurm / "slurm.conf", slurm_conf(conf))
    write_text(layout.slurm / "gres.conf", gres_conf(layout))
    write_text(layout.slurm / "cgroup.conf", CGROUP_CONF)


def has_freezer(controller: int) -> bool:
    """Whether the hosts see the freezer hierarchy that proctrack/cgroup needs."""
    return Path(f"/proc/{controller}/root/sys/fs/cgroup/freezer/cgroup.procs").exists()


def tail(log: Path | None) -> str:
    """The last lines of a log, or nothing where there is none."""
    if log is None or not log.exists():
        return ""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])


def wait_for(what: str, ready: Callable[[], bool], timeout_s: float, log: Path | None = None) -> None:
    """Poll until ``ready()``. Raises TestbedError with the end of ``log`` when it takes too long."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise TestbedError(f"{what} within {timeout_s:.0f} s\n{tail(log)}".rstrip())
        time.sleep(0.05)


def is_running(first: int, program: str) -> bool:
    return bool(hosts.find_processes(first).get(program))


def signal_daemon(first: int, program: str, number: int) -> None:
    for pid in hosts.find_processes(first).get(program, []):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def end_daemon(first: int, program: str) -> None:
    """End a daemon in an orderly way, so that it saves its state."""
    signal_daemon(first, program, signal.SIGTERM)
    wait_for(f"{program} did not end", lambda: not is_running(first, program), DAEMON_END_TIMEOUT_S)


def start_munge(layout: Layout, controller: int) -> None:
    """Start munged with a key of its own; all hosts reach it by its socket in /run."""
    if is_running(controller, "munged"):
        return
    folder = layout.state / "munge"
    folder.mkdir(mode=0o700, exist_ok=True)
    key = folder / "key"
    if not key.exists():
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
    hosts.run_inside(
        controller,
        [
            "munged",
            "--force",
            f"--key-file={key}",
            f"--seed-file={folder}/seed",
            f"--log-file={layout.log}/munged.log",
            "--pid-file=/run/munge/munged.pid",
        ],
    )


def answers(controller: int, argv: list[str]) -> bool:
    return hosts.run_inside(controller, argv, check=False).returncode == 0


def start_detached(first: int, argv: list[str], log: Path) -> None:
    """Start a program that does not leave the foreground by itself."""
    with log.open("ab") as sink:
        subprocess.Popen(
            hosts.enter_command(first, ["/usr/bin/setsid", "--fork", *argv]),
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "HOME": "/root"},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
        ).wait()


def start_controller(layout: Layout, controller: int) -> None:
    """Start slurmctld, unless it runs. Raises TestbedError with the end of its log where it ends again."""
    if is_running(controller, "slurmctld"):
        return
    hosts.run_inside(controller, ["slurmctld"])

    def ready() -> bool:
        if not is_running(controller, "slurmctld"):
            raise TestbedError(f"slurmctld ended at once:\n{tail(log)}")
        return answers(controller, ["scontrol", "ping"])

    log = layout.log / "slurmctld.log"
    wait_for("slurmctld does not answer", ready, DAEMON_START_TIMEOUT_S, log)


def start_node(layout: Layout, name: str, first: int) -> None:
    if is_running(first, "slurmd"):
        return
    (layout.host(name) / "spool").mkdir(exist_ok=True)
    hosts.run_inside(first, ["slurmd", "-N", name])


def announce_nodes(running: dict[str, int]) -> None:
    """Have each slurmd report to a new slurmctld now rather than when it is asked, some seconds later."""
    for name in NODES:
        signal_daemon(running[name], "slurmd", signal.SIGHUP)


def read_node_states(controller: int) -> dict[str, str]:
    """State of each node as sinfo tells it, with its flags (``idle*``: does not answer)."""
    done = hosts.run_inside(controller, ["sinfo", "-h", "-N", "-o", "%N %T"], check=False)
    return dict(line.split(None, 1) for line in done.stdout.splitlines() if " " in line)


def wait_for_nodes(layout: Layout, controller: int) -> None:
    """Wait until every node could take a job."""

    def ready() -> bool:
        states = read_node_states(controller)
        return len(states) == len(NODES) and all(
            re.fullmatch("idle|mixed|allocated|completing", s) for s in states.values()
        )

    try:
        wait_for(
            "not all nodes became idle", ready, NODES_IDLE_TIMEOUT_S, layout.log / f"slurmd-{NODES[0]}.log"
        )
    except TestbedError as error:
        raise TestbedError(f"{error}\nnodes: {read_node_states(controller)}") from error
