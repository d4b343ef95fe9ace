"""The five hosts: the controller (also the login host) and four nodes, each a set of namespaces.

Called by the commands of ``testbed``. The controller's PID namespace holds those of the nodes, and its network
namespace holds the bridge, so that killing one process ends it all and the machine's own network is untouched.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import init
from layout import ADDRESSES, CONTROLLER, HERE, HOST_MARK, NODES, PREFIX_LENGTH, PYTHON, Layout, TestbedError

HOST_START_TIMEOUT_S = 20.0
HOST_END_TIMEOUT_S = 20.0
#: Joins the freezer group of the host it enters, then becomes the command: nsenter leaves cgroups alone.
JOIN = [
    "/bin/sh",
    "-c",
    '[ ! -w /sys/fs/cgroup/freezer/cgroup.procs ] || echo 0 > /sys/fs/cgroup/freezer/cgroup.procs; exec "$@"',
    "sh",
]


def read_pids() -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            yield int(entry)


def read_cmdline(pid: int) -> list[str]:
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")[:-1]
    except OSError:
        return []


def is_first_process(pid: int) -> bool:
    """Whether ``pid`` is process 1 of its innermost PID namespace and alive."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return fields["NSpid"].split()[-1] == "1" and fields["State"].split()[0] != "Z"


def find_hosts(layout: Layout) -> dict[str, int]:
    """The first process of each running host, by name, as the machine numbers it."""
    found = {}
    for pid in read_pids():
        words = read_cmdline(pid)
        if len(words) > 4 and words[-4:-2] == [HOST_MARK, str(layout.state)] and is_first_process(pid):
            found[words[-2]] = pid
    return found


def find_host(layout: Layout, name: str) -> int:
    """The first process of one host. Raises TestbedError where it does not run."""
    hint = layout.host(name) / "pid"
    try:
        pid = int(hint.read_text())
        words = read_cmdline(pid)
        if words[-4:-1] == [HOST_MARK, str(layout.state), name] and is_first_process(pid):
            return pid
    except (OSError, ValueError):
        pass
    found = find_hosts(layout)
    if name not in found:
        raise TestbedError(f"the testbed's host {name} does not run: start it with `testbed up`")
    return found[name]


def find_processes(first: int) -> dict[str, list[int]]:
    """Processes in the PID namespace of ``first``, by the name of their program."""
    try:
        namespace = Path(f"/proc/{first}/ns/pid").readlink()
    except OSError:
        return {}
    found: dict[str, list[int]] = {}
    for pid in read_pids():
        try:
            if Path(f"/proc/{pid}/ns/pid").readlink() == namespace:
                found.setdefault(Path(f"/proc/{pid}/comm").read_text().strip(), []).append(pid)
        except OSError:
            continue
    return found


def enter_command(first: int, argv: Sequence[str], user: str = "root", cwd: str | None = None) -> list[str]:
    """The command line that runs ``argv`` inside the host whose first process is ``first``.

    The environment is passed on as it is, in no argument list; no shell reads ``argv``.
    """
    command = ["nsenter", "--target", str(first), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]
    command += ["--wdns=/", "--", *JOIN, "/usr/bin/setpriv", "--pdeathsig", "KILL"]
    if user != "root":
        command += ["--reuid", user, "--regid", user, "--init-groups"]
    folder = cwd or "/"
    return [*command, "/usr/bin/env", f"--chdir={folder}", f"PWD={folder}", *argv]


def run_inside(
    first: int, argv: Sequence[str], *, timeout_s: float = 60, check: bool = True, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of the testbed's own as root inside a host. Raises TestbedError where it fails."""
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "HOME": "/root",
    }
    done = subprocess.run(
        enter_command(first, argv),
        env=environment,
        input=text if text is not None else "",
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if check and done.returncode != 0:
        raise TestbedError(
            f"{' '.join(argv)} failed (exit {done.returncode}): {(done.stderr or done.stdout).strip()}"
        )
    return done


def write_spec(layout: Layout, name: str, packages: Path) -> Path:
    """Write what ``init.py`` mounts on one host; the nodes start from the controller's view."""
    folder = layout.host(name)
    for local in ("tmp", "var-tmp"):
        (folder / local).mkdir(parents=True, exist_ok=True)
        (folder / local).chmod(0o1777)
    spec: dict[str, object] = {
        "cgroup": layout.cgroup if name == CONTROLLER else name,
        "overlays": [],
        "tmpfs": [],
        "folders": [],
        "binds": [[str(folder / "tmp"), "/tmp"], [str(folder / "var-tmp"), "/var/tmp"]],
    }
    if name == CONTROLLER:
        overlay = layout.overlay
        spec["overlays"] = [
            [[str(overlay / "usr"), str(packages / "usr"), "/usr"], "/usr"],
            [[str(overlay / "etc"), str(packages / "etc"), "/etc"], "/etc"],
        ]
        spec["tmpfs"] = ["/run"]
        spec["folders"] = ["/run/lock", "/run/munge"]
        binds = [
            [str(layout.slurm), "/etc/slurm"],
            [str(layout.config), "/etc/tuneplane"],
        ]
        if Path("/dev/fuse").exists():
            binds.append([str(layout.devices / "fuse"), "/dev/fuse"])
        spec["binds"] = [*binds, *spec["binds"]]  # type: ignore[misc]
    path = folder / "spec.json"
    path.write_text(json.dumps(spec, indent=1), encoding="utf-8")
    return path


def start_host(layout: Layout, name: str, packages: Path) -> int:
    """Start one host and return its first process. Raises TestbedError with what its start-up said."""
    spec = write_spec(layout, name, packages)
    # A copy, since the checkout may lie where the hosts have a folder of their own, such as /tmp.
    program = layout.state / "init.py"
    shutil.copyfile(HERE / "init.py", program)
    command = [PYTHON, "-I", "-S", str(program), HOST_MARK, str(layout.state), name, str(spec)]
    if name != CONTROLLER:
        controller = str(find_host(layout, CONTROLLER))
        enter = ["nsenter", "--target", controller, "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]
        command = [*enter, "--", *command]
    log = layout.log / f"host-{name}.log"
    with log.open("wb") as sink:
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            timeout=HOST_START_TIMEOUT_S,
            check=False,
        )
    if done.returncode != 0:
        raise TestbedError(
            f"the host {name} did not start:\n{log.read_text(encoding='utf-8', errors='replace').strip()}"
        )
    pid = find_hosts(layout)[name]
    (layout.host(name) / "pid").write_text(str(pid))
    return pid


def run_ip(first: int, *commands: str) -> None:
    """Run lines of ``ip -batch`` in the network namespace of ``first``, in the machine's PID namespace."""
    subprocess.run(
        ["nsenter", "--target", str(first), "--mount", "--net", "--", "ip", "-batch", "-"],
        input="".join(line + "\n" for line in commands),
        text=True,
        check=True,
        capture_output=True,
    )


def has_device(first: int, name: str) -> bool:
    """Whether the network namespace of ``first`` has a device ``name``."""
    lines = Path(f"/proc/{first}/net/dev").read_text(encoding="utf-8").splitlines()
    return any(line.split(":")[0].strip() == name for line in lines)


def wire_controller(first: int) -> None:
    """Make the bridge, unless it is there."""
    if not has_device(first, "br0"):
        run_ip(
            first,
            "link add br0 type bridge forward_delay 0",
            f"addr add {ADDRESSES[CONTROLLER]}/{PREFIX_LENGTH} dev br0",
            "link set br0 up",
        )


def wire_node(controller: int, name: str, first: int) -> None:
    """Connect a node to the bridge by a pair of devices: ``name`` at the bridge, ``eth0`` in the node."""
    if not has_device(first, "eth0"):
        run_ip(
            controller,
            f"link add {name} type veth peer name eth0 netns {first}",
            f"link set {name} master br0 up",
        )
        run_ip(first, f"addr add {ADDRESSES[name]}/{PREFIX_LENGTH} dev eth0", "link set eth0 up")


def set_link(layout: Layout, node: str, up: bool) -> None:
    """Cut a node off the network, or bring it back. Raises TestbedError on a name that is no node."""
    if node not in NODES:
        raise TestbedError(f"there is no node {node!r}: the nodes are {', '.join(NODES)}")
    run_ip(find_host(layout, CONTROLLER), f"link set {node} {'up' if up else 'down'}")


def end_all(layout: Layout) -> None:
    """Kill every process of the testbed and remove its cgroups. Raises TestbedError where one stays."""
    change_freezer(layout.cgroup, thaw=True)
    deadline = time.monotonic() + HOST_END_TIMEOUT_S
    while True:
        hosts = find_hosts(layout)
        if not hosts:
            break
        if time.monotonic() > deadline:
            raise TestbedError(
                f"processes {sorted(hosts.values())} do not end: something holds them in the kernel"
            )
        for pid in hosts.values():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    change_freezer(layout.cgroup, thaw=False)


def change_freezer(group: str, thaw: bool) -> None:
    """Thaw every cgroup below ``group`` (a frozen process ignores SIGKILL), or remove them all.

    Works in a mount namespace of its own, since the hierarchy need not be mounted on the machine.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            init.private_mounts()
            init.mount("tmpfs", "/mnt", "tmpfs")
            if init.mount_freezer("/mnt"):
                for folder, _inner, _files in os.walk(Path("/mnt", group), topdown=thaw):
                    if thaw:
                        Path(folder, "freezer.state").write_text("THAWED")
                    else:
                        remove_cgroup(Path(folder))
            code = 0
        finally:
            os._exit(code)
    _pid, status = os.waitpid(child, 0)
    if status != 0:
        raise TestbedError(f"the cgroup {group} of the freezer could not be changed")


def remove_cgroup(folder: Path) -> None:
    """Remove one cgroup; the kernel lets go of dead members a moment after they are gone."""
    deadline = time.monotonic() + HOST_END_TIMEOUT_S
    while True:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def environment_for(layout: Layout, user: str, extra: Mapping[str, str]) -> dict[str, str]:
    """What a fresh login gives ``user``, and what was asked for on top."""
    home = "/root" if user == "root" else str(layout.home / user)
    clean = {
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/bash",
        "PATH": f"{layout.venv}/bin:/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "TUNEPLANE_CONFIG_DIR": str(layout.config),
    }
    if user == "root":
        clean["PATH"] += ":/usr/local/sbin:/usr/sbin:/sbin"
    return {**clean, **extra}
