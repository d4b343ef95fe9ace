"""The first process of one host of the testbed: makes its namespaces, mounts its view, then reaps.

Started by ``hosts.py`` as ``init.py MARK STATE HOST SPEC``, where SPEC is a JSON file of what to mount.
Killing it ends every process of the host, so nothing else needs to be hunted down.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

# <linux/sched.h>
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x20000000, 0x40000000
# <sys/mount.h>
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MS_RDONLY = 1
MNT_DETACH = 2

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    check(libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int = 0, options: str | None = None) -> None:
    def encoded(text: str | None) -> bytes | None:
        return None if text is None else os.fsencode(text)

    result = libc.mount(
        encoded(source), encoded(target), encoded(kind), ctypes.c_ulong(flags), encoded(options)
    )
    check(result, f"mount {source} on {target}")


def unmount_all(target: str) -> None:
    """Detach whatever is mounted at ``target``, one layer after the other, until nothing is."""
    while libc.umount2(os.fsencode(target), MNT_DETACH) == 0:
        pass


def mount_freezer(target: str) -> bool:
    """Mount the freezer hierarchy of cgroup v1 at ``target``; False where the kernel offers none."""
    try:
        mount("cgroup", target, "cgroup", MS_NOSUID | MS_NODEV | MS_NOEXEC, "freezer")
    except OSError:
        return False
    return True


def private_mounts() -> None:
    unshare(CLONE_NEWNS)
    mount("none", "/", None, MS_REC | MS_PRIVATE)


def join_cgroup(mountpoint: str, group: str) -> bool:
    """Put this process into ``group`` of the freezer, as the root that its cgroup namespace will show."""
    Path(mountpoint).mkdir(parents=True, exist_ok=True)
    if not mount_freezer(mountpoint):
        return False
    folder = Path(mountpoint, group)
    folder.mkdir(exist_ok=True)
    (folder / "cgroup.procs").write_text("0")
    unmount_all(mountpoint)
    return True


def mount_view(spec: dict[str, Any], has_freezer: bool) -> None:
    """Everything that this host sees differently from the machine it runs on."""
    for lowers, target in spec["overlays"]:
        mount("overlay", target, "overlay", MS_RDONLY, "lowerdir=" + ":".join(lowers))
    for target in spec["tmpfs"]:
        mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    for folder in spec["folders"]:
        Path(folder).mkdir(parents=True, exist_ok=True)
    for source, target in spec["binds"]:
        mount(source, target, None, MS_BIND)
    unmount_all("/proc")
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    unmount_all("/sys")
    mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if has_freezer:
        mount("tmpfs", "/sys/fs/cgroup", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=755")
        Path("/sys/fs/cgroup/freezer").mkdir()
        mount_freezer("/sys/fs/cgroup/freezer")


def reap_forever() -> None:
    """What the first process of a PID namespace owes to the others; only SIGKILL from outside ends it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.sigwait([signal.SIGCHLD])


def main() -> None:
    _mark, state, host, spec_path = sys.argv[1:5]
    spec = json.loads(Path(spec_path).read_text(encoding="utf-8"))
    os.setsid()
    os.chdir("/")
    os.umask(0o022)
    private_mounts()
    has_freezer = join_cgroup(f"{state}/hosts/{host}/freezer", spec["cgroup"])
    unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWCGROUP)
    ready_read, ready_write = os.pipe()
    if os.fork():
        os.close(ready_write)
        # Empty when the child died: its own words are in the log.
        sys.exit(0 if os.read(ready_read, 1) else 1)
    os.close(ready_read)
    socket.sethostname(host)
    mount_view(spec, has_freezer)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.write(ready_write, b"1")
    os.close(ready_write)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    reap_forever()


if __name__ == "__main__":
    main()
